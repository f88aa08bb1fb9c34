"""LiteLLM: completion, stream, tool loop and token counts, over both APIs."""

import json
import sys

import litellm

URL = sys.argv[1]
OPENAI = {"model": "openai/lockstep", "api_base": f"{URL}/v1", "api_key": "none"}
ANTHROPIC = {"model": "anthropic/lockstep", "api_base": URL, "api_key": "none"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}

for provider in (OPENAI, ANTHROPIC):
    question = [{"role": "user", "content": "List the first 5 primes."}]
    complete = litellm.completion(messages=question, temperature=0, max_tokens=40, **provider)
    text = complete.choices[0].message.content
    assert text and complete.usage.completion_tokens > 0, complete
    chunks = litellm.completion(
        messages=question, temperature=0, max_tokens=40, stream=True, **provider
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == text, (streamed, text)

    history = [{"role": "user", "content": "What is the weather in Rome?"}]
    options = {"tools": [WEATHER], "tool_choice": "required", "temperature": 0, "max_tokens": 80}
    reply = litellm.completion(messages=history, **options, **provider).choices[0]
    assert reply.finish_reason == "tool_calls", reply
    call = reply.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    history += [
        reply.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny, 25 degrees"},
    ]
    answer = litellm.completion(messages=history, tools=[WEATHER], max_tokens=40, **provider)
    assert answer.choices[0].message.content is not None, answer
