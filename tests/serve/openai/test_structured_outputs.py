"""Structured output of the bundled model through the API and the official client."""

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from lockstep import LLM, SamplingParams
from tests.serve.live_server import (
    CALL,
    CODE,
    MTP,
    SETTINGS,
    TOOLS,
    chat,
    complete,
    serving,
)
from tests.waiting import wait_until

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "owner": {"type": "string", "maxLength": 10},
        "limit": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["owner", "limit"],
    "additionalProperties": False,
}
REGEX = "[a-c]{2,5}[0-9]"
FORMAT = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA, "strict": True}}
SEVERAL: list[Any] = [
    *TOOLS,
    {"type": "function", "function": {"name": "ping", "parameters": None}},
]
STRICT: list[Any] = [
    {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}},
]


class Found(pydantic.BaseModel):
    """Schema for the official client's parse()."""

    owner: str = pydantic.Field(max_length=10)
    limit: int = pydantic.Field(ge=0, le=999)


@pytest.fixture(scope="module")
def stack() -> Iterator[SimpleNamespace]:
    with serving(LLM(speculative_config=MTP, **SETTINGS)) as result:
        yield result


@pytest.fixture
def server(stack: SimpleNamespace) -> Iterator[SimpleNamespace]:
    yield stack
    wait_until(lambda: not stack.llm.engine.scheduler.entries)
    assert stack.engine.is_alive


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("stream", [False, True])
def test_json_schema_response_format(server: SimpleNamespace, stream: bool) -> None:
    result = chat(server, CALL, response_format=FORMAT, stream=stream)
    if stream:
        text = "".join(c.choices[0].delta.content or "" for c in result if c.choices)
        reason = result[-1].choices[0].finish_reason
    else:
        text = result.choices[0].message.content
        reason = result.choices[0].finish_reason
    jsonschema.validate(json.loads(text), SCHEMA)
    assert reason == "stop"


def test_parse_helper_of_official_client(server: SimpleNamespace) -> None:
    result = server.ask.chat.completions.parse(
        model="lockstep", messages=CALL, response_format=Found, temperature=0, max_tokens=80
    )
    assert isinstance(result.choices[0].message.parsed, Found)


@pytest.mark.default_cases("fields0", "fields1", "fields2", "fields3")
@pytest.mark.parametrize(
    ("fields", "judge"),
    [
        ({"structured_outputs": {"regex": REGEX}}, lambda text: re.fullmatch(REGEX, text)),
        ({"guided_regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
        ({"guided_choice": ["left", "right"]}, lambda text: text in ("left", "right")),
        ({"guided_grammar": 'root ::= "x" [0-9]'}, lambda text: re.fullmatch("x[0-9]", text)),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": ""},
            lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None and " :" not in text,
        ),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
            lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None,
        ),
    ],
)
def test_every_structured_field_in_both_apis(
    server: SimpleNamespace, fields: Any, judge: Any
) -> None:
    answer = chat(server, CALL, extra_body=fields, max_tokens=120)
    assert answer.choices[0].finish_reason == "stop"
    assert judge(answer.choices[0].message.content)
    written = complete(server, extra_body=fields, max_tokens=120)
    assert written.choices[0].finish_reason == "stop"
    assert judge(written.choices[0].text)


def test_json_object_response_format(server: SimpleNamespace) -> None:
    result = chat(server, CALL, response_format={"type": "json_object"}, max_tokens=60)
    if result.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(result.choices[0].message.content), dict)
    else:
        assert result.choices[0].message.content.lstrip().startswith("{")


def test_structured_request_does_not_change_others(server: SimpleNamespace) -> None:
    alone = complete(server, max_tokens=30).choices[0].text
    prompts = [CODE] * 3
    retained = {"structured_outputs": {"regex": REGEX}}
    stream = server.ask.completions.create(
        model="lockstep", prompt=prompts, stream=True, temperature=1, extra_body=retained
    )
    companion = complete(server, max_tokens=30).choices[0].text
    list(stream)
    assert companion == alone


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "find_record"}}]
)
def test_required_tool_calls(server: SimpleNamespace, choice: Any, stream: bool) -> None:
    question = [{"role": "user", "content": "My name is Tavoli."}]
    result = chat(server, question, tools=TOOLS, tool_choice=choice, stream=stream, temperature=1)
    if stream:
        parts = [c.choices[0].delta.tool_calls or [] for c in result if c.choices]
        text = "".join(p.function.arguments or "" for part in parts for p in part if p.index == 0)
        reason = result[-1].choices[0].finish_reason
    else:
        assert not result.choices[0].message.content
        text = result.choices[0].message.tool_calls[0].function.arguments
        reason = result.choices[0].finish_reason
    if reason == "tool_calls":
        jsonschema.validate(json.loads(text), TOOLS[0]["function"]["parameters"])
    else:
        assert reason == "length"


def test_named_tool_is_called(server: SimpleNamespace) -> None:
    named = {"type": "function", "function": {"name": "ping"}}
    result = chat(server, CALL, tools=SEVERAL, tool_choice=named, max_tokens=200)
    assert {call.function.name for call in result.choices[0].message.tool_calls} == {"ping"}


@pytest.mark.default_cases("auto")
@pytest.mark.parametrize("mode", ["required", "auto"])
def test_allowed_tools_limit_calls(server: SimpleNamespace, mode: str) -> None:
    ping = {"type": "function", "function": {"name": "ping"}}
    some = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [ping]}}
    result = chat(server, CALL, tools=SEVERAL, tool_choice=some, max_tokens=200)
    shown = chat(server, CALL, tools=SEVERAL, max_tokens=200)
    assert result.usage.prompt_tokens == shown.usage.prompt_tokens
    assert shown.choices[0].message.tool_calls[0].function.name != "ping"
    called = {call.function.name for call in result.choices[0].message.tool_calls or ()}
    assert called == {"ping"} if mode == "required" else called <= {"ping"}
    answer = server.ask.responses.create(
        model="lockstep",
        input=CALL[-1]["content"],
        tools=[{"type": "function", **tool["function"]} for tool in SEVERAL],
        tool_choice={
            "type": "allowed_tools",
            "mode": mode,
            "tools": [{"type": "function", "name": "ping"}],
        },
        temperature=0,
        max_output_tokens=200,
    )
    calls = {item.name for item in answer.output if item.type == "function_call"}
    assert calls == {"ping"} if mode == "required" else calls <= {"ping"}


def test_strict_tools_constrain_arguments(server: SimpleNamespace) -> None:
    for temperature in (0, 1):
        result = chat(server, CALL, tools=STRICT, temperature=temperature, seed=3)
        for call in result.choices[0].message.tool_calls or ():
            jsonschema.validate(
                json.loads(call.function.arguments), STRICT[0]["function"]["parameters"]
            )
    free = chat(server, [{"role": "user", "content": "What is my name?"}], tools=STRICT)
    assert free.choices[0].message.content


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json", "'not' at the root"),
    (
        {"response_format": {**FORMAT, "json_schema": {"schema": {"items": {"type": "text"}}}}},
        "response_format",
        "response_format: the keyword 'type' at items of the schema cannot be enforced: Invalid "
        "type: text. Correct it.",
    ),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "x"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"rgx": "a"}}, "structured_outputs", "'rgx'"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "one of them"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "structured_outputs"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "structured_outputs"),
    ({"guided_regex": "[a&&b]"}, "guided_regex", "no text matches"),
    ({"guided_regex": ".*" * 2000 + "x"}, "guided_regex", "cannot be enforced"),
    ({"guided_regex": "a" * 5000}, "guided_regex", "at most 4096"),
    ({"response_format": {"type": "structural_tag", "format": {}}},
     "response_format", "is not supported"),
    ({"guided_json": {}, "guided_whitespace_pattern": "x" * 5000}, "guided_whitespace_pattern",
     "at most 4096"),
    ({"structured_outputs": {"grammar": "start: a\na: &"}}, "structured_outputs.grammar", "2("),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "says"), REFUSED)
def test_invalid_fields_are_refused(
    server: SimpleNamespace, fields: dict[str, Any], param: str, says: str
) -> None:
    for ask in (lambda: chat(server, CALL, extra_body=fields),
                lambda: complete(server, extra_body=fields)):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as caught:
            ask()
        assert caught.value.param == param
        assert says in caught.value.message


def test_unsupported_strict_tools_are_refused(server: SimpleNamespace) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}
    wrong = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": bad}}]
    with pytest.raises(openai.BadRequestError, match="'pattern' at properties.a"):
        chat(server, CALL, tools=wrong)
    loose = {"type": "function", "function": {"name": "f", "parameters": bad}}
    result = chat(server, CALL, tools=[loose], tool_choice="required", max_tokens=200)
    assert result.choices[0].message.tool_calls[0].function.name == "f"
    with pytest.raises(openai.BadRequestError, match="needs tools"):
        chat(server, CALL, tool_choice="required")
    with pytest.raises(openai.BadRequestError, match="strict tools are not supported together"):
        chat(server, CALL, tools=STRICT, extra_body={"guided_choice": ["left", "right"]})


@pytest.mark.default_cases("tools0")
@pytest.mark.parametrize("tools", [TOOLS, STRICT])
def test_tools_with_response_format_call_or_follow_it(
    server: SimpleNamespace, tools: list[Any]
) -> None:
    called = chat(server, CALL, tools=tools, response_format=FORMAT)
    (call,) = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"owner": "Zorin", "limit": 12}
    assert called.choices[0].message.content is None
    tokenizer = server.llm.tokenizer
    begins = (b"<", b"\n")
    openers = [i for i in range(len(tokenizer)) if tokenizer.token_bytes(i).startswith(begins)]
    bias = {str(opener): -100 for opener in openers}
    fields = {"tools": tools, "response_format": FORMAT, "logit_bias": bias}
    answered = chat(server, CALL, **fields)
    jsonschema.validate(json.loads(answered.choices[0].message.content), SCHEMA)
    assert answered.choices[0].message.tool_calls is None


def test_required_call_ignores_response_format(server: SimpleNamespace) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "seed": 3}
    assert content_and_call(server, **fields) == content_and_call(
        server, **fields, response_format=FORMAT
    )


def content_and_call(server: SimpleNamespace, **fields: Any) -> tuple[Any, str]:
    """Return the answer's content and its first call's arguments."""
    message = chat(server, CALL, **fields).choices[0].message
    return message.content, message.tool_calls[0].function.arguments


def test_grammar_constrains_content_but_not_reasoning(server: SimpleNamespace) -> None:
    """The prompt begins inside reasoning; a logit bias ends it immediately."""
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    end = server.llm.tokenizer.fast.token_to_id("</think>")
    retained = {**thinks, "guided_choice": ["left", "right"]}
    result = chat(server, CALL, extra_body=retained, logit_bias={str(end): 100}, max_tokens=20)
    assert result.choices[0].message.content.strip() in ("left", "right")
    free = chat(server, CALL, extra_body=retained, logit_bias={str(end): -100}, max_tokens=8)
    plain = chat(server, CALL, extra_body=thinks, logit_bias={str(end): -100}, max_tokens=8)
    assert free.choices[0].message == plain.choices[0].message


THINKS = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.mark.slow
def test_thinking_budget_with_drafts_changes_no_answer(stack: SimpleNamespace) -> None:
    """A logit bias keeps the model from ending its reasoning early."""
    end = stack.llm.tokenizer.fast.token_to_id("</think>")
    requested = [
        SamplingParams(
            thinking_token_budget=budget,
            max_tokens=12,
            seed=5,
            logprobs=1,
            logit_bias={end: -100},
            structured_outputs=form,
            **more,
        )
        for budget, form, more in (
            (0, None, {"temperature": 0}),
            (5, {"choice": ["left", "right"]}, {"temperature": 0}),
            (7, None, {"n": 2, "repetition_penalty": 1.1}),
        )
    ]
    received = []
    for drafts in (MTP, None):
        llm = LLM(speculative_config=drafts, **SETTINGS)
        outs = llm.chat([CALL] * 3, requested, chat_template_kwargs=THINKS["chat_template_kwargs"])
        received.append([[(one.token_ids, one.logprobs) for one in out.outputs] for out in outs])
    assert received[0] == received[1]
    for params, outputs in zip(requested, received[0], strict=True):
        for tokens, _ in outputs:
            assert tokens.index(end) == params.thinking_token_budget


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("stream", [False, True])
def test_thinking_budget_limits_reasoning_tokens(server: SimpleNamespace, stream: bool) -> None:
    end = server.llm.tokenizer.fast.token_to_id("</think>")
    fields: dict[str, Any] = {"logit_bias": {str(end): -100}, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    for name in ("thinking_token_budget", "thinking_budget"):
        result = chat(server, CALL, extra_body={**THINKS, name: 3}, max_tokens=30, **fields)
        usage = result[-1].usage if stream else result.usage
        assert usage.completion_tokens_details.reasoning_tokens == 3
    free = chat(server, CALL, extra_body=THINKS, max_tokens=30, **fields)
    usage = free[-1].usage if stream else free.usage
    assert usage.completion_tokens_details.reasoning_tokens > 3


def test_structured_chat_in_python(stack: SimpleNamespace) -> None:
    requested = SamplingParams(temperature=0, structured_outputs={"choice": ["left", "right"]})
    out = LLM(**SETTINGS).chat(CALL, requested)[0].outputs[0]
    assert out.text in ("left", "right")
