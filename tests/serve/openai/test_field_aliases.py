"""Field names of other servers, and fields that carry a conversation or its metadata."""

from typing import Any

import pytest

from lockstep.serve.requests.unsupported_fields import ALIASES
from tests.serve.api_calls import CHAT_PATH, TEXT_PATH, USER, post

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
COUNT = f"{MESSAGES}/count_tokens"
BASES: dict[str, dict[str, Any]] = {
    CHAT_PATH: {},
    TEXT_PATH: {},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": USER, "max_tokens": 9},
    COUNT: {"messages": USER},
}


def post_to(server: Any, path: str, **fields: Any) -> Any:
    return post(server, path, **{**BASES[path], **fields})


@pytest.mark.parametrize(
    ("alias", "value", "read"),
    [
        ("n_predict", 3, lambda params: params.max_tokens),
        ("num_predict", 3, lambda params: params.max_tokens),
        ("max_new_tokens", 3, lambda params: params.max_tokens),
        ("min_new_tokens", 2, lambda params: params.min_tokens),
        ("repeat_penalty", 1.5, lambda params: params.repetition_penalty),
        ("random_seed", 7, lambda params: params.seed),
        ("sampling_seed", 7, lambda params: params.seed),
        ("no_stop_trim", True, lambda params: params.include_stop_str_in_output),
        ("regex", "[a-z ]+", lambda params: params.structured_outputs.regex),
        ("ebnf", 'root ::= "hello"', lambda params: params.structured_outputs.grammar),
        ("grammar", 'root ::= "hello"', lambda params: params.structured_outputs.grammar),
        ("json_schema", {"type": "object"}, lambda params: params.structured_outputs.json),
    ],
)
@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_aliases_have_the_same_effect(
    server: Any, path: str, alias: str, value: Any, read: Any
) -> None:
    response = post_to(server, path, **{alias: value})
    assert response.status_code == 200, response.text
    assert "x-lockstep-ignored-fields" not in response.headers
    assert read(server.client.requests[-1].params) == value


def test_every_alias_is_used_refused_or_reported(server: Any) -> None:
    """No API ignores an alias silently; count_tokens accepts those of its API."""
    for path in BASES:
        for alias in sorted(ALIASES.keys() - {"enable_thinking"}):
            response = post_to(
                server, path, **{alias: 5.5 if alias == "json_schema" else {"wrong": 1}}
            )
            received = response.headers.get("x-lockstep-ignored-fields")
            assert response.status_code == 400 or received, (path, alias, response.text)


def test_alias_and_field_must_agree(server: Any) -> None:
    for path, field in ((CHAT_PATH, "max_tokens"), (RESPONSES, "max_output_tokens")):
        assert post_to(server, path, n_predict=3, **{field: 3}).status_code == 200
        response = post_to(server, path, n_predict=3, **{field: 4})
        assert response.status_code == 400
        assert f"n_predict and {field}" in response.json()["error"]["message"]
    two = post_to(server, CHAT_PATH, regex="a", structured_outputs={"regex": "b"})
    assert two.status_code == 400 and "structured_outputs.regex" in two.text


@pytest.mark.parametrize("path", BASES)
@pytest.mark.parametrize(
    ("name", "remedy"), [("n_keep", "prompts are not cut"), ("top_logprobs_num", "top_logprobs")]
)
def test_unsupported_fields_of_other_servers_are_refused(
    server: Any, path: str, name: str, remedy: str
) -> None:
    response = post_to(server, path, **{name: 3})
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and message.startswith(f"{name}=3 is not supported")
    assert remedy in message
    assert post_to(server, path, **{name: 0}).status_code == 200


def test_schema_inside_response_format(server: Any) -> None:
    """llama.cpp and others accept this form."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for kind in ("json_object", "json_schema"):
        assert post_to(
            server, CHAT_PATH, response_format={"type": kind, "schema": schema}
        ).is_success
        assert server.client.requests[-1].params.structured_outputs.json == schema


def test_enable_thinking_reaches_the_template(server: Any, processor: Any) -> None:
    for path in (CHAT_PATH, RESPONSES, MESSAGES):
        assert post_to(server, path, enable_thinking=True).status_code == 200
        ids = server.client.requests[-1].prompt_token_ids
        prompt = processor.tokenizer.decode(ids, skip_special_tokens=False)
        assert prompt.endswith("<think>\n"), path
    assert post_to(server, TEXT_PATH, enable_thinking=True).status_code == 400


@pytest.mark.parametrize("path", [MESSAGES, COUNT, RESPONSES, CHAT_PATH])
@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}]
)
def test_thread_field_is_refused(server: Any, path: str, thread: Any) -> None:
    """Otherwise the answer would ignore the earlier conversation."""
    response = post_to(server, path, thread=thread)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("thread=... is not supported")
    assert not server.client.requests


def test_billing_header_is_removed_from_the_prompt(server: Any) -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch={};"
    rules = {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}

    def prompt(system: Any) -> list[int]:
        assert post_to(server, MESSAGES, system=system).status_code == 200
        ids: list[int] = server.client.requests[-1].prompt_token_ids
        counted = post_to(server, COUNT, system=system).json()["input_tokens"]
        assert counted == len(ids)
        return ids

    plain = prompt([rules])
    for mark in ("a1", "b2"):
        first = {"type": "text", "text": line.format(mark)}
        assert prompt([first, rules]) == plain
        assert prompt(line.format(mark) + "\nbe brief") == plain
    assert prompt([rules, {"type": "text", "text": line}]) != plain, "only in front of all"
    received = post_to(server, MESSAGES, system=line).headers["x-lockstep-ignored-fields"]
    assert received == "system.x-anthropic-billing-header"


def test_redacted_thinking_is_ignored(server: Any) -> None:
    """Sessions that began on another server can continue."""
    hidden = {"type": "redacted_thinking", "data": "abc"}
    message = [{"role": "assistant", "content": [hidden, {"type": "text", "text": "hello"}]}, *USER]
    response = post_to(server, MESSAGES, messages=[*USER, *message])
    assert response.status_code == 200
    assert response.headers["x-lockstep-ignored-fields"] == "redacted_thinking"


@pytest.mark.parametrize("kind", ["image", "document", "search_result"])
def test_image_in_tool_result_is_refused_by_path(server: Any, kind: str) -> None:
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    content = [{"type": "text", "text": "seen"}, {"type": kind, "source": {}}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": content}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    for path in (MESSAGES, COUNT):
        response = post_to(server, path, messages=[*USER, *turns])
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert message.startswith(f"messages[2].content[0].content[1]: type='{kind}'")
        assert "this server reads text only" in message
