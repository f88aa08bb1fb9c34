"""The render endpoints: prompts as they would be sent to the model, without generating."""

from lockstep.serve.openai.schema import RenderedPrompt
from lockstep.serve.requests.parsed_request import GenerationBody
from lockstep.serve.requests.service import Service


async def rendered_prompts(
    service: Service, body: GenerationBody, id_prefix: str
) -> list[RenderedPrompt]:
    """Return the token ids and sampling parameters of each prompt, in vLLM's form.

    Raises RequestError.
    """
    parsed, requests = await service.parse(body, id_prefix)
    num_prompts = len(parsed.prompts)
    return [
        {
            "request_id": parsed.id if num_prompts == 1 else request.id,
            "token_ids": request.prompt_token_ids,
            "features": None,
            "sampling_params": request.params.clone(
                n=parsed.params.n, seed=parsed.params.seed
            ).to_json(),
            "model": parsed.adapter or service.model_name,
            "stream": parsed.stream,
            "stream_options": parsed.stream_options,
            "cache_salt": parsed.cache_salt,
            "priority": parsed.priority,
            "kv_transfer_params": None,
        }
        # The first of the n completions of each prompt.
        for request in requests[:: parsed.params.n]
    ]
