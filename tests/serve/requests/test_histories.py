"""Answers may be sent back as history unchanged, in all three APIs."""

import asyncio
from typing import Any

import pytest

from tests.serve.api_calls import CALL, CHAT_PATH, SCHEMA, TOOLS, USER, anthropic, create_chat, post
from tests.serve.openai.responses.test_endpoint import THINK, THOUGHT, create

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
FUNCTION: dict[str, Any] = {"type": "function", "name": "get", "parameters": SCHEMA}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "patch"}
PATCH = (
    "<tool_call>\n<function=patch>\n<parameter=input>\nx\n</parameter>\n</function>\n</tool_call>"
)
ALL = THOUGHT + "hello fox\n\n" + CALL


@pytest.mark.parametrize("exclude_none", [False, True])
def test_chat_message_may_be_sent_back(server: Any, exclude_none: bool) -> None:
    server.text = ALL
    answer = create_chat(server, tools=TOOLS, logprobs=True, extra_body=THINK)
    message = answer.choices[0].message
    output = message.model_dump(exclude_none=exclude_none)
    assert message.tool_calls and message.reasoning_content
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
    response = post(server, CHAT_PATH, messages=[*USER, output, result], tools=TOOLS)
    assert response.status_code == 200, response.text


def test_extra_fields_of_chat_clients_are_accepted(server: Any) -> None:
    call = {
        "id": "a",
        "index": 0,
        "type": "function",
        "function": {"name": "get", "arguments": "{}", "parsed_arguments": {}},
        "provider_specific_fields": {"a": 1},
        "extra_content": {"google": {}},
    }
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "parsed": None,
        "name": "helper",
        "reasoning_content": "y",
        "thinking_blocks": [],
        "injected": False,
        "message_id": "1",
        "opts": {"visible": True},
        "reasoning_signature": None,
        "tool_calls": [call],
        "id": "msg",
        "status": "completed",
    }
    result = {"role": "tool", "tool_call_id": "a", "name": "get", "content": "3"}
    response = post(server, CHAT_PATH, messages=[*USER, message, result], tools=TOOLS)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("exclude_none", [False, True])
def test_response_items_may_be_sent_back(server: Any, exclude_none: bool) -> None:
    server.text = f"{ALL}\n{PATCH}"
    tools = [FUNCTION, CUSTOM]
    first = create(server, tools=tools, include=["message.output_text.logprobs"], extra_body=THINK)
    assert len(first.output) == 4
    items = [item.model_dump(exclude_none=exclude_none) for item in first.output]
    for item in first.output[2:]:
        kind = "custom_tool_call" if item.type == "custom_tool_call" else "function_call"
        items.append({"type": f"{kind}_output", "call_id": item.call_id, "output": "3"})
    response = post(server, RESPONSES, input=[*USER, *items], tools=tools)
    assert response.status_code == 200, response.text


def test_fields_of_parse_helpers_are_accepted(server: Any) -> None:
    """They add their own fields to the answer."""
    server.text = ALL

    async def run() -> tuple[Any, Any]:
        async with server.openai() as client:
            strict = {**SCHEMA, "required": ["city", "n"], "additionalProperties": False}
            chat_tools = [
                {
                    "type": "function",
                    "function": {"name": "get", "parameters": strict, "strict": True},
                }
            ]
            chat = await client.chat.completions.parse(
                model="tiny", messages=USER, tools=chat_tools, extra_body=THINK
            )
            tools = [{**FUNCTION, "parameters": strict, "strict": True}]
            full = await client.responses.parse(
                model="tiny", input="the", tools=tools, extra_body=THINK
            )
            return chat.choices[0].message.model_dump(), [o.model_dump() for o in full.output]

    message, items = asyncio.run(run())
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    response = post(server, CHAT_PATH, messages=[*USER, message, result], tools=TOOLS)
    assert response.status_code == 200, response.text
    result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "3"}
    response = post(server, RESPONSES, input=[*USER, *items, result], tools=[FUNCTION])
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("exclude_none", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_anthropic_message_may_be_sent_back(server: Any, exclude_none: bool, full: bool) -> None:
    """The next request repeats the content, as in Anthropic's examples, or the whole message."""
    server.text = ALL
    tools = [{"name": "get", "input_schema": SCHEMA}]

    sent = {"max_tokens": 300, "messages": USER, "tools": tools, **THINK}
    answer = anthropic().types.Message.model_validate(post(server, MESSAGES, **sent).json())
    dumped = answer.model_dump(exclude_none=exclude_none)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    message = dumped if full else {"role": "assistant", "content": dumped["content"]}
    result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": "3"}
    turns = [*USER, message, {"role": "user", "content": [result]}]
    for path, more in ((MESSAGES, {"max_tokens": 9}), (f"{MESSAGES}/count_tokens", {})):
        response = post(server, path, messages=turns, tools=tools, **more)
        assert response.status_code == 200, response.text


UNKNOWN = "a tool result has the id 'b', which no tool call has"


def test_chat_result_of_unknown_call_is_refused(server: Any) -> None:
    call = {"id": "a", "function": {"name": "get", "arguments": "{}"}}
    turns = {name: {"role": "assistant", "tool_calls": [{**call, "id": name}]} for name in "ab"}
    result = {"role": "tool", "tool_call_id": "b", "content": "3"}
    for messages in ([turns["a"], result], [result]):
        response = post(server, CHAT_PATH, messages=[*USER, *messages], tools=TOOLS)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["message"].startswith(f"messages: {UNKNOWN}") and error["param"] == "messages"
    assert not server.client.requests
    turns["absent"] = {"role": "assistant", "tool_calls": [{"function": call["function"]}]}
    turns["empty"] = {"role": "assistant", "tool_calls": [{**call, "id": ""}]}
    results = ({"role": "tool", **more, "content": "3"} for more in ({}, {"tool_call_id": ""}))
    for messages in (
        [turns["b"], turns["a"], result],
        [turns["absent"], result],
        [turns["empty"], result],
        *([turns["a"], plain] for plain in results),
    ):
        response = post(server, CHAT_PATH, messages=[*USER, *messages], tools=TOOLS)
        assert response.status_code == 200, response.text


def test_response_item_of_unknown_call_is_refused(server: Any) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "get", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "b", "output": "3"}
    response = post(server, RESPONSES, input=[*USER, call, result], tools=[FUNCTION])
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"].startswith(f"input: {UNKNOWN}") and error["param"] == "input"
    # OpenAI's server pairs items wherever they are.
    for items in (
        [{**call, "call_id": "b"}, *USER, call, result],
        [result, {**call, "call_id": "b"}],
    ):
        response = post(server, RESPONSES, input=[*USER, *items], tools=[FUNCTION])
        assert response.status_code == 200, response.text


def test_response_item_of_no_call_is_read(server: Any) -> None:
    """Codex writes what an automation or another thread sends as a result without a call.

    https://github.com/openai/codex/issues/44723
    """
    message = {
        "type": "function_call_output",
        "id": "fco_1",
        "name": "automation_update",
        "namespace": "codex_app",
        "output": "<heartbeat>check the build</heartbeat>",
    }
    call = {"type": "function_call", "call_id": "a", "name": "get", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": "3"}
    for items in ([message], [*USER, message], [*USER, call, result, message]):
        response = post(server, RESPONSES, input=items, tools=[FUNCTION])
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_anthropic_result_of_unknown_call_is_refused(server: Any, path: str) -> None:
    call = {"type": "tool_use", "id": "a", "name": "get", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "b", "content": "3"}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    body = {"max_tokens": 9} if path == MESSAGES else {}
    response = post(server, path, messages=[*USER, *turns], **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"messages: {UNKNOWN}")


@pytest.mark.parametrize(
    ("path", "body", "index"),
    [
        (CHAT_PATH, {"messages": [{**USER[0], "contnet": "x"}]}, "messages[0].contnet"),
        (
            CHAT_PATH,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "txt": 1}]}]},
            "messages[0].content[0].txt",
        ),
        (
            CHAT_PATH,
            {"response_format": {"type": "json_object", "schemaa": {}}},
            "response_format.schemaa",
        ),
        (CHAT_PATH, {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        (RESPONSES, {"input": [{**USER[0], "x": 1}]}, "input[0].x"),
        (RESPONSES, {"input": "x", "reasoning": {"efort": "low"}}, "reasoning.efort"),
        (RESPONSES, {"input": "x", "tools": [{**FUNCTION, "strct": True}]}, "tools[0].strct"),
        (RESPONSES, {"input": "x", "text": {"format": {"type": "text", "x": 1}}}, "text.format.x"),
        (
            MESSAGES,
            {"max_tokens": 9, "messages": [{"role": "user", "content": "x", "y": 1}]},
            "messages[0].y",
        ),
    ],
)
def test_unknown_history_field_is_named_by_path(
    server: Any, path: str, body: dict[str, Any], index: str
) -> None:
    response = post(server, path, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"].startswith(f"{index} is not known here"), (
        response.text
    )
    assert not server.client.requests


def test_long_field_name_is_truncated_in_errors(server: Any) -> None:
    """This is also true for a field that a template may read."""
    for message in ({**USER[0], "x" * 3000: 1}, {"role": "user", "content": [{"y" * 3000: 1}]}):
        response = post(server, CHAT_PATH, messages=[message])
        assert response.status_code == 400 and len(response.json()["error"]["message"]) < 400
