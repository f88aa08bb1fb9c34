"""Fields of a chat request: reasoning, token ids, continued messages, ignored fields."""

import copy
import json
from types import SimpleNamespace

import openai
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast

from lockstep.serve.app import create_app
from lockstep.serve.requests.service import Service
from lockstep.text.parsers.kimi_k2 import KimiK2Parser
from lockstep.text.processor import Processor
from lockstep.text.settings import TextSettings
from tests.serve.api_calls import (
    CALL,
    CHAT_PATH,
    TEXT_PATH,
    TOOLS,
    USER,
    create_chat,
    create_completion,
    fetch,
    post,
)

THINK = {"chat_template_kwargs": {"enable_thinking": True}}
CALLS = [{"id": "c", "type": "function", "function": {"name": "get", "arguments": "{}"}}]


def last_prompt(server: SimpleNamespace) -> str:
    """Return the last prompt as text."""
    ids = server.client.requests[-1].prompt_token_ids
    return server.processor.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture
def server(server: SimpleNamespace, processor: Processor) -> SimpleNamespace:
    server.processor = processor
    return server


@pytest.mark.parametrize("step", [1, 3, 50])
def test_reasoning_tokens_are_independent_of_steps(server, step):
    """A token counts if the text after it is inside reasoning; </think> does not count."""
    server.text = "the fox\n</think>\n\nhello"
    server.client.step = step
    expected = len(server.processor.tokenizer.encode("the fox\n"))
    answer = create_chat(server, extra_body=THINK)
    assert answer.choices[0].message.content == "hello"
    assert answer.usage.completion_tokens_details.reasoning_tokens == expected
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = create_chat(server, stream=True, stream_options=options, extra_body=THINK)
    counts = [c.usage.completion_tokens_details.reasoning_tokens for c in chunks]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == expected
    plain = create_chat(server).usage.completion_tokens_details
    assert plain.reasoning_tokens == 0


def test_reasoning_tokens_of_n_completions_are_summed(server):
    server.text = "the fox\n</think>\n\nhello"
    one = create_chat(server, extra_body=THINK).usage.completion_tokens_details.reasoning_tokens
    three = create_chat(
        server, n=3, extra_body=THINK
    ).usage.completion_tokens_details.reasoning_tokens
    assert three == 3 * one > 0


@pytest.mark.parametrize(
    ("effort", "thinks"), [("none", False), ("low", True), ("medium", True), ("max", True)]
)
def test_reasoning_effort_sets_enable_thinking(server, effort, thinks):
    create_chat(server, reasoning_effort=effort)
    assert last_prompt(server).endswith("<think>\n") == thinks
    create_chat(server, reasoning_effort=effort, extra_body={"chat_template_kwargs": {}})
    assert last_prompt(server).endswith("<think>\n") == thinks


def test_chat_template_kwargs_override_reasoning_effort(server):
    create_chat(server, reasoning_effort="none", extra_body=THINK)
    assert last_prompt(server).endswith("<think>\n")


def test_reasoning_effort_requires_template_support(server, processor):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    unaware = Processor(processor.tokenizer, template, 512)
    server.app = create_app(Service(server.client, unaware, "tiny", "ls-test"))
    with pytest.raises(openai.BadRequestError) as caught:
        create_chat(server, reasoning_effort="high")
    assert caught.value.param == "reasoning_effort"
    graded = Processor(processor.tokenizer, template + "{{ reasoning_effort }}", 512)
    server.app = create_app(Service(server.client, graded, "tiny", "ls-test"))
    create_chat(server, reasoning_effort="high")
    assert last_prompt(server).endswith("high")


def test_final_message_is_continued(server):
    messages = [*USER, {"role": "assistant", "content": "hello the "}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    server.text = "fox"
    answer = create_chat(server, messages=messages, extra_body=body)
    assert last_prompt(server).endswith("<|im_start|>assistant\nhello the ")
    assert answer.choices[0].message.content == "fox"
    result = post(server, "/tokenize", messages=messages, **body).json()
    assert result["tokens"] == server.client.requests[-1].prompt_token_ids


@pytest.mark.parametrize(
    ("messages", "body"),
    [
        ([*USER, {"role": "assistant", "content": "x"}], {"continue_final_message": True}),
        (USER, {"continue_final_message": True, "add_generation_prompt": False}),
        (
            [*USER, {"role": "assistant", "content": "x", "tool_calls": CALLS}],
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
    ],
)
def test_invalid_continued_messages_are_refused(server, messages, body):
    result = post(server, CHAT_PATH, messages=messages, **body)
    error = result.json()["error"]
    assert (result.status_code, error["param"]) == (400, "continue_final_message")


def test_control_token_in_continued_message_is_text(server):
    messages = [*USER, {"role": "assistant", "content": "<|im_end|>"}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    create_chat(server, messages=messages, extra_body=body)
    assert last_prompt(server).endswith("<|im_end|>")
    assert server.client.requests[-1].prompt_token_ids[-1] != server.eos


@pytest.mark.parametrize("n", [1, 2])
def test_return_token_ids_of_chat(server, n):
    body = {"return_token_ids": True}
    full = create_chat(server, n=n, extra_body=body)
    chunks = create_chat(server, n=n, stream=True, extra_body=body)
    prompt = server.client.requests[-1].prompt_token_ids
    assert full.prompt_token_ids == prompt == chunks[0].prompt_token_ids
    for index in range(n):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        streamed = [token for choice in mine for token in choice.token_ids or []]
        assert streamed == full.choices[index].token_ids
        assert streamed == [*server.processor.tokenizer.encode(server.text), server.eos]
    assert "token_ids" not in create_chat(server).choices[0].model_dump()


def test_return_token_ids_of_completions(server):
    body = {"return_token_ids": True}
    prompts = [[1, 2], [3]]
    full = create_completion(server, prompt=prompts, max_tokens=50, extra_body=body)
    chunks = create_completion(server, prompt=prompts, max_tokens=50, stream=True, extra_body=body)
    for index, prompt in enumerate(prompts):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert mine[0].prompt_token_ids == prompt == full.choices[index].prompt_token_ids
        streamed = [token for choice in mine for token in choice.token_ids or []]
        assert streamed == full.choices[index].token_ids
    assert "token_ids" not in create_completion(server, prompt="x").choices[0].model_dump()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_ignored_fields_are_named_in_a_header(server, path, stream):
    """No field name may break the header or make it long."""
    odd = {
        "metadata": {},
        "x\r\nSet-Cookie: a": 1,
        "é": 1,
        **dict.fromkeys(map(str, range(500)), 1),
    }
    header = post(server, path, stream=stream, user="u", **odd).headers["x-lockstep-ignored-fields"]
    assert "0, 1, 10" in header and len(header) <= 200 and "Set-Cookie" not in header
    received = post(server, path, stream=stream, store=True).headers["x-lockstep-ignored-fields"]
    assert received == "store"
    assert "x-lockstep-ignored-fields" not in post(server, path, best_of=1).headers


def test_version_and_probes(server):
    assert fetch(server, "GET", "/version").json()["version"]
    for method in ("GET", "POST"):
        assert fetch(server, method, "/ping").text == "ok"
    server.client.alive = False
    assert fetch(server, "GET", "/ping").status_code == 503


def test_tokenize_with_token_strings_and_model(server):
    result = post(server, "/tokenize", prompt="the fox", return_token_strs=True).json()
    assert (
        "".join(result["token_strs"]) == "the fox" and len(result["token_strs"]) == result["count"]
    )
    for path, body in {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]}}.items():
        assert post(server, path, model="tiny", **body).status_code == 200
        assert post(server, path, model="other", **body).status_code == 404


@pytest.mark.parametrize("step", [1, 50])
def test_malformed_call_is_text_with_a_note(server, step):
    server.text = "<tool_call>\nget the fox\n</tool_call>"
    server.client.step = step
    full = create_chat(server, tools=TOOLS).choices[0]
    assert (full.message.content, full.finish_reason) == (server.text, "stop")
    assert full.message.tool_calls is None and full.tool_call_parse_error
    *_, last = create_chat(server, tools=TOOLS, stream=True)
    assert last.choices[0].tool_call_parse_error == full.tool_call_parse_error
    assert "tool_call_parse_error" not in create_chat(server).choices[0].model_dump()


def kimi(processor: Processor, special: bool) -> Processor:
    """Return a processor whose tool tags are tokens of their own, special ones or not."""
    tokenizer = copy.copy(processor.tokenizer)
    tags = sorted(KimiK2Parser.texts())
    tokenizer.fast = Fast.from_str(processor.tokenizer.fast.to_str())
    tokenizer._known_bytes = tokenizer._bytes_of  # not what the other one has kept
    tokenizer.fast.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in tags])
    added = tokenizer.fast.get_added_tokens_decoder()
    tokenizer.special_ids = frozenset(i for i, token in added.items() if token.special)
    settings = TextSettings(tool_call_parser="kimi_k2")
    return Processor(
        tokenizer, tokenizer.chat_template, 512, processor.eos_ids, processor.defaults, settings
    )


@pytest.mark.parametrize("special", [False, True])
def test_special_tool_tags_are_parsed(server, processor, special):
    """They appear neither as text nor in answers without tools."""
    result = kimi(processor, special)
    text = (
        "Look:<|tool_calls_section_begin|><|tool_call_begin|>functions.get:7"
        '<|tool_call_argument_begin|>{"n": 3}<|tool_call_end|><|tool_calls_section_end|>'
    )
    server.client.answer = lambda request: [*result.tokenizer.encode(text), server.eos]
    server.app = create_app(Service(server.client, result, "tiny", "ls-test"))
    for stream in (False, True):
        answer = create_chat(server, tools=TOOLS, stream=stream, max_tokens=300)
        if stream:
            deltas = [c.choices[0].delta for c in answer]
            (call, *_) = [call for d in deltas for call in d.tool_calls or []]
            content = "".join(d.content or "" for d in deltas)
        else:
            message = answer.choices[0].message
            (call,) = message.tool_calls
            content = message.content
        assert (call.id, call.function.name, content) == ("functions.get:7", "get", "Look:")
    plain = create_chat(server, max_tokens=300).choices[0].message.content
    assert ("<|tool_call_begin|>" in plain) != special


@pytest.mark.parametrize("length", [8, 20, 40, 60])
def test_truncated_call_is_incomplete_in_every_api(server, length):
    server.text = CALL
    body = {"tools": TOOLS, "max_tokens": length}
    full = create_chat(server, **body).choices[0]
    assert full.finish_reason == "length"
    calls = full.message.tool_calls or []
    for call in calls:
        with pytest.raises(ValueError):
            json.loads(call.function.arguments)
    chunks = create_chat(server, stream=True, **body)
    streamed = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
    joined = "".join(call.function.arguments for call in streamed)
    assert joined == "".join(call.function.arguments for call in calls)
    assert chunks[-1].choices[0].finish_reason == "length"
    tool = {"name": "get", "input_schema": TOOLS[0]["function"]["parameters"]}
    sent = {"model": "tiny", "messages": USER, "tools": [tool], "max_tokens": length}
    message = fetch(server, "POST", "/v1/messages", json=sent).json()
    assert message["stop_reason"] == "max_tokens"
    assert [block["type"] for block in message["content"]] == ["text"]
    tool = {"type": "function", **TOOLS[0]["function"]}
    sent = {"input": "x", "tools": [tool], "max_output_tokens": length}
    response = fetch(server, "POST", "/v1/responses", json=sent).json()
    assert response["status"] == "incomplete"
    assert all(item["status"] == "incomplete" for item in response["output"])
    server.text = "hello"
    sent = {"input": "go on", "previous_response_id": response["id"]}
    assert fetch(server, "POST", "/v1/responses", json=sent).json()["status"] == "completed"
    assert "Rio" not in last_prompt(server)


@pytest.mark.parametrize("stop", ["</tool_call>", "Rio"])
def test_stop_string_ends_or_truncates_call(server, stop):
    server.text = CALL
    choice = create_chat(server, tools=TOOLS, stop=stop).choices[0]
    (call,) = choice.message.tool_calls
    if stop == "Rio":
        assert choice.finish_reason == "stop" and call.function.arguments == '{"city": "'
    else:
        assert choice.finish_reason == "tool_calls"
        assert json.loads(call.function.arguments) == {"city": 'Rio "x"', "n": 3}


def test_call_in_reasoning_without_grammar(server):
    """A grammar begins after </think>, so a call before it is unconstrained."""
    server.text = f"so\n{CALL}\n</think>\n\n{CALL}"
    for choice, calls in (("auto", 2), ("required", 1)):
        result = post(server, CHAT_PATH, messages=USER, tools=TOOLS, tool_choice=choice, **THINK)
        message = result.json()["choices"][0]["message"]
        assert len(message["tool_calls"]) == calls
        assert ("<tool_call>" in message["reasoning_content"]) == (choice == "required")
