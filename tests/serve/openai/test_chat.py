"""/v1/chat/completions through the official client."""

import json

import openai
import pytest

from tests.serve.api_calls import CALL, TOOLS, USER, create_chat


def test_chat_completion(server):
    answer = create_chat(server, seed=5, max_completion_tokens=50)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("hello fox", "stop")
    assert choice.message.role == "assistant" and choice.message.tool_calls is None
    assert answer.system_fingerprint == "ls-test" and choice.seed == 5
    (request,) = server.client.requests
    usage = answer.usage
    assert usage.prompt_tokens == len(request.prompt_token_ids)
    assert usage.completion_tokens == len(request.output_token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 2
    accepted = usage.completion_tokens_details.accepted_prediction_tokens
    assert accepted == request.metrics.num_accepted_tokens > 0
    assert request.params.temperature == 0.5 and request.params.max_tokens == 50
    assert server.client.aborted == []


@pytest.mark.parametrize("n", [1, 3])
def test_stream_equals_full_response(server, n):
    server.text = "naïve 日本語 🦊 done"
    chunks = create_chat(server, stream=True, n=n, stream_options={"include_usage": True})
    for index in range(n):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == server.text
        assert [c.finish_reason for c in mine if c.finish_reason] == ["stop"]
        assert mine[-1].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert all(c.usage is None for c in chunks[:-1])
    assert len({r.seed for r in server.client.requests}) == n
    full = create_chat(server, n=n)
    assert [c.message.content for c in full.choices] == [server.text] * n


def test_tool_calls_with_and_without_stream(server):
    server.text = "Look:\n\n" + CALL + "\n" + CALL
    message = create_chat(server, tools=TOOLS).choices[0].message
    assert message.content == "Look:" and len(message.tool_calls) == 2
    chunks = [c.choices[0] for c in create_chat(server, tools=TOOLS, stream=True)]
    calls: dict[int, list[str]] = {}
    for delta in (d for c in chunks for d in c.delta.tool_calls or []):
        if delta.id:
            calls[delta.index] = [delta.function.name, ""]
        calls[delta.index][1] += delta.function.arguments or ""
    expected = {"city": 'Rio "x"', "n": 3}
    for full, streamed in zip(message.tool_calls, calls.values(), strict=True):
        assert [full.function.name, full.function.arguments] == streamed
        assert json.loads(full.function.arguments) == expected
    assert chunks[-1].finish_reason == "tool_calls"
    parts = [d for c in chunks for d in c.delta.tool_calls or []]
    assert len(parts) > 6
    alone = create_chat(server, tools=TOOLS, parallel_tool_calls=False).choices[0]
    assert len(alone.message.tool_calls) == 1 and alone.finish_reason == "tool_calls"


def test_tool_choice(server):
    server.text = CALL
    plain = create_chat(server, tools=TOOLS, tool_choice="none").choices[0].message
    assert plain.tool_calls is None and "<function=get>" in plain.content
    absent = {"type": "function", "function": {"name": "absent"}}
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [absent]}}
    for choice in ("always", absent, some):
        with pytest.raises(openai.BadRequestError) as caught:
            create_chat(server, tools=TOOLS, tool_choice=choice)
        assert caught.value.param == "tool_choice"


def test_conversation_with_tool_results(server):
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": '{"n": 1}'}}
    turns = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c"},
    ]
    create_chat(server, messages=USER + turns, tools=TOOLS)


def test_reasoning(server):
    server.text = "so it is\n</think>\n\nyes"
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    message = create_chat(server, extra_body=extra).choices[0].message
    assert (message.reasoning_content, message.content) == ("so it is", "yes")
    assert message.reasoning == message.reasoning_content
    chunks = [c.choices[0].delta for c in create_chat(server, extra_body=extra, stream=True)]
    for name in ("reasoning_content", "reasoning"):
        received = "".join(getattr(d, name, None) or "" for d in chunks)
        assert received == "so it is"
    assert "".join(d.content or "" for d in chunks) == "yes"


def test_include_reasoning_false(server):
    server.text = "so it is\n</think>\n\nyes"
    extra = {"chat_template_kwargs": {"enable_thinking": True}, "include_reasoning": False}
    answer = create_chat(server, extra_body=extra)
    message = answer.choices[0].message
    assert message.content == "yes"
    assert not hasattr(message, "reasoning_content")
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    chunks = [c.choices[0].delta for c in create_chat(server, extra_body=extra, stream=True)]
    assert "".join(d.content or "" for d in chunks) == "yes"
    assert not [d for d in chunks if hasattr(d, "reasoning_content")]


def test_logprobs(server):
    full = create_chat(server, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    (request,) = server.client.requests
    assert len(full) == len(request.output_token_ids)
    assert bytes(b for t in full[:-1] for b in t.bytes).decode() == "hello fox"
    assert full[0].logprob == -0.5 and full[0].top_logprobs[0].token == full[0].token
    assert full[0].top_logprobs[1].logprob == -9999.0
    chunks = create_chat(server, logprobs=True, top_logprobs=2, stream=True)
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert streamed == full
    bare = create_chat(server, logprobs=True).choices[0].logprobs.content
    assert bare[0].top_logprobs == []


def test_stop_string_aborts_the_request(server):
    choice = create_chat(server, stop=["lo f"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("hel", "stop")
    assert choice.stop_reason == "lo f"
    server.text = "hello fox and more and more and more"
    create_chat(server, stop=["lo f"], stream=True)
    assert server.client.requests[-1].id in server.client.aborted


def test_vllm_fields_reach_the_engine(server, processor):
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "allowed_token_ids": [1, 2],
        "bad_words": ["fox"],
        "skip_special_tokens": False,
        "prompt_logprobs": 1,
    }
    body = {**extra, "priority": 3, "nobody_knows": 1}
    answer = create_chat(server, extra_body=body, logit_bias={"7": -5}, max_tokens=6)
    (request,) = server.client.requests
    for name, value in extra.items():
        assert getattr(request.params, name) == value
    assert request.params.logit_bias == {7: -5} and request.priority == 3
    assert processor.tokenizer.encode("fox") in request.params.bad_words_ids
    assert len(answer.prompt_logprobs) == len(request.prompt_token_ids)
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"messages": []}, None),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "fox " * 2000}]}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": -1, "max_tokens": 5}, "max_completion_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
    ],
)
def test_invalid_chat_input_is_refused(server, options, param):
    if options == {"messages": []}:
        create_chat(server, **options)  # the template decides; this one accepts no messages
    else:
        with pytest.raises(openai.BadRequestError) as caught:
            create_chat(server, **options)
        assert caught.value.param == param and caught.value.type == "invalid_request_error"
        assert len(caught.value.message) > 20
    assert create_chat(server).choices[0].message.content == "hello fox"
