"""Keyword arguments of other engines that are not parameters here, with a remedy for each."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from lockstep.errors import LockstepError, RequestError, brief

Kind = TypeVar("Kind")
Foreign = Mapping[str, tuple[tuple[Any, ...], str]]
"""Keyword -> (values that change nothing, what to do instead)."""


def check_keywords(
    keywords: Mapping[str, Any],
    known: Sequence[str],
    foreign: Foreign,
    error: type[LockstepError] = RequestError,
    field: str | None = None,
) -> None:
    """Check keywords that are not parameters; None and the values that change nothing are accepted.

    Others raise `error`: with the remedy for a foreign keyword, with the nearest known name for an
    unknown one.
    field: parameter that a RequestError names instead of the keyword.
    """
    for name, value in keywords.items():
        if name not in foreign:
            # A misspelt name of another engine is also a misspelt name here.
            near = get_close_matches(name, [*known, *foreign], n=1)
            meant = f"Did you mean {near[0]}? " if near else ""
            raise _error(
                error,
                field or name,
                f"{brief(name)[1:-1]} is not a parameter; allowed: {', '.join(known)}. "
                f"{meant}Remove or rename it.",
            )
        neutral_values, remedy = foreign[name]
        if value is not None and not any(_equal(value, other) for other in neutral_values):
            raise _error(error, field or name, f"{name}={brief(value)} is not supported: {remedy}")


def _equal(value: Any, other: Any) -> bool:
    """Compare by type first: True is not 1, and comparing arrays gives no truth value."""
    return type(value) is type(other) and bool(value == other)


def _error(error: type[LockstepError], name: str, message: str) -> LockstepError:
    return RequestError(message, name) if issubclass(error, RequestError) else error(message)


def explain_foreign_keywords(foreign: Foreign) -> Callable[[type[Kind]], type[Kind]]:
    """Return a class decorator: unknown keywords of the constructor go through check_keywords."""

    def decorate(cls: type[Kind]) -> type[Kind]:
        construct = cls.__init__
        known = tuple(signature(construct).parameters)[1:]

        @wraps(construct)
        def init(self: Kind, *values: Any, **keywords: Any) -> None:
            unknown = {name: keywords[name] for name in keywords if name not in known}
            check_keywords(unknown, known, foreign)
            accepted = {name: value for name, value in keywords.items() if name not in unknown}
            construct(self, *values, **accepted)

        setattr(cls, "__init__", init)  # noqa: B010  (mypy takes no assignment to it)
        return cls

    return decorate


_STRUCTURED_OUTPUTS = "write structured_outputs=StructuredOutputsParams(...)."
_NO_BEAMS = "beam search is not supported: drafts and batches would change its answer. Remove it."
_REMOVE_IT = "remove it."
_NO_ADAPTERS = "name an adapter of lora_modules by lora_request, or remove it."
_NO_MEDIA = "only text is supported; remove it."

SAMPLING: Foreign = {
    "best_of": ((1,), "completions are not ranked; ask for n and choose."),
    "logits_processors": (
        ([],),
        "code of a request does not run inside a step; use logit_bias, allowed_token_ids, "
        "bad_words or structured_outputs.",
    ),
    "use_beam_search": ((False,), _NO_BEAMS),
    "num_beams": ((1,), _NO_BEAMS),
    "length_penalty": ((1, 1.0), _NO_BEAMS),
    "early_stopping": ((False,), _NO_BEAMS),
    **dict.fromkeys(
        (
            "guided_decoding",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "guided_json_object",
            "response_format",
            "json_schema",
            "regex",
            "ebnf",
            "grammar",
            "structural_tag",
        ),
        ((), _STRUCTURED_OUTPUTS),
    ),
    "spaces_between_special_tokens": (
        (True,),
        "text is decoded as the tokenizer writes it; leave it out.",
    ),
    # A cached prefix gives the same bits as a computed one, so both values have the same answer.
    "skip_reading_prefix_cache": ((True, False), _REMOVE_IT),
    "extra_args": (({},), "no code reads it; leave it out."),
    "flat_logprobs": ((False,), "log-probabilities are one dict a token; leave it out."),
    "logprob_token_ids": ((), "ask for logprobs, the likeliest tokens, or leave it out."),
    "thinking_budget": ((), "it is thinking_token_budget here."),
    "repetition_detection": ((), "set repetition_penalty, or leave it out."),
    "stop_regex": ((), "stop takes plain strings; write those, or leave it out."),
    "max_new_tokens": ((), "it is max_tokens here."),
    "max_completion_tokens": ((), "it is max_tokens here."),
    "min_new_tokens": ((), "it is min_tokens here."),
    "num_return_sequences": ((), "it is n here."),
    "stop_sequences": ((), "it is stop here."),
    "repeat_penalty": ((1, 1.0), "it is repetition_penalty here."),
    "no_stop_trim": ((False,), "it is include_stop_str_in_output here."),
    "do_sample": ((True,), "temperature=0 is greedy; set that."),
    "typical_p": ((1, 1.0), "choose top_p or min_p, or leave it out."),
    "no_repeat_ngram_size": ((0,), "set repetition_penalty, or leave it out."),
}
"""Keywords of SamplingParams in vLLM, SGLang, transformers and the OpenAI API."""

PROMPT: Foreign = {
    "prompt_embeds": ((), "prompts are text or token ids; send one of them."),
    "multi_modal_data": (({},), _NO_MEDIA),
    "multi_modal_uuids": (({},), _NO_MEDIA),
    "mm_processor_kwargs": (({},), _NO_MEDIA),
    "token_type_ids": ((), "models here read no token types; leave it out."),
    "encoder_prompt": ((), "models here have no encoder; send prompt."),
    "decoder_prompt": ((), "models here have no encoder; send prompt."),
}
"""Keys of a prompt in vLLM."""

CALL: Foreign = {
    "prompt_adapter_request": ((), _NO_ADAPTERS),
    "mm_processor_kwargs": (({},), _NO_MEDIA),
    "tokenization_kwargs": (({},), "send token ids, or leave it out."),
    "prompt_token_ids": ((), 'send [{"prompt_token_ids": ids}] as prompts.'),
    "guided_options_request": ((), "set structured_outputs of the SamplingParams."),
    "trace_headers": (({},), "the server sends traces; leave it out."),
    "data_parallel_rank": ((0,), "there is one replica; leave it out."),
    "prompt_text": ((), "the prompt is text or token ids; send one of them as the prompt."),
}
"""Keywords of generate() in vLLM."""

TEMPLATE: Foreign = {
    "chat_template": ((), "give chat_template to LLM(...)."),
    "documents": (([],), "give them as a variable that the template reads, by another name."),
    "padding": ((False,), "call it for each conversation; leave it out."),
    "truncation": ((False,), "set truncate_prompt_tokens of the SamplingParams."),
    "max_length": ((), "set truncate_prompt_tokens of the SamplingParams."),
    "return_tensors": ((), "token ids are a list; make a tensor of it."),
    "return_dict": ((False,), "token ids are a list; leave it out."),
    "return_assistant_tokens_mask": ((False,), "leave it out."),
    "tokenizer_kwargs": (({},), "set tokenize=False and call encode()."),
}
"""Keywords of apply_chat_template() in transformers that are not variables of the template."""

CHAT: Foreign = {
    **CALL,
    "chat_template": ((), "give chat_template to LLM(...)."),
    "chat_template_content_format": (("auto", "string"), "content is text; leave it out."),
    "documents": (([],), "put them into chat_template_kwargs, if the template reads them."),
    "response_format": ((), "set structured_outputs of the SamplingParams."),
}
"""Keywords of chat() in vLLM."""

_GENERATES = "models generate text here; serve embeddings and scores by another engine."
_ONE_PROCESS = "the engine is one process; use engine, the engine itself."
_TRACE = "measure a step's kernels by `lockstep bench --trace`."
METHODS: Mapping[str, str] = {
    **dict.fromkeys(("encode", "embed", "classify", "reward"), _GENERATES),
    **dict.fromkeys(("collective_rpc", "apply_model"), _ONE_PROCESS),
    **dict.fromkeys(("start_profile", "stop_profile"), _TRACE),
    "sleep": "close() frees the memory; make a new LLM later.",
    "wake_up": "close() frees the memory; make a new LLM later.",
    "get_metrics": "engine.stats has the counters.",
    "set_tokenizer": "the tokenizer is the checkpoint's.",
    "model_config": "engine.config and engine.plan have the settings.",
}
"""Methods of vLLM's LLM that are missing here -> what to do instead."""
