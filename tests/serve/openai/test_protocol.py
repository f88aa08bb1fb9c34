"""Request bodies: nulls, limits, types, and unsupported fields."""

import json
import threading
import time
from typing import Any

import jsonschema
import pytest

from lockstep.serve.app import SMALL_BODY_BYTES
from lockstep.serve.requests.service import Service
from lockstep.serve.requests.unsupported_fields import CHAT, COMPLETIONS, EVERYWHERE
from tests.serve.api_calls import BODIES, CHAT_PATH, TEXT_PATH, fetch, post

USER = [{"role": "user", "content": "the fox"}]


def refused_by(path: str) -> dict[str, Any]:
    return {**EVERYWHERE, **(CHAT if path == CHAT_PATH else COMPLETIONS)}


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_unsupported_fields_are_refused(server, path):
    for name, (harmless, _) in refused_by(path).items():
        response = post(server, path, **{name: {"type": "nonsense"}})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, name), response.text
        assert "not supported" in error["message"]
        for value in (*harmless, None):
            assert post(server, path, **{name: value}).status_code == 200, (name, value)


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (CHAT_PATH, {"max_tokens": True}, "max_tokens"),
        (CHAT_PATH, {"num_predict": True}, "max_tokens"),
        (CHAT_PATH, {"temperature": False}, "temperature"),
        (CHAT_PATH, {"n": True}, "n"),
        (CHAT_PATH, {"logit_bias": {"5": True}}, "logit_bias"),
        (TEXT_PATH, {"logprobs": False}, "logprobs"),
        (TEXT_PATH, {"seed": False}, "seed"),
        ("/v1/responses", {"input": "x", "top_p": True}, "top_p"),
        ("/v1/messages", {"messages": USER, "max_tokens": True}, "max_tokens"),
        (
            "/v1/messages",
            {
                "messages": USER,
                "max_tokens": 9,
                "thinking": {"type": "enabled", "budget_tokens": True},
            },
            "thinking.budget_tokens",
        ),
        (TEXT_PATH, {"prompt": [True]}, "prompt"),
        (TEXT_PATH, {"prompt": [[5, False]]}, "prompt"),
        (CHAT_PATH, {"stop_token_ids": [True]}, "stop_token_ids[0]"),
        (TEXT_PATH, {"stop_token_ids": [5, False]}, "stop_token_ids[1]"),
        (CHAT_PATH, {"allowed_token_ids": [5, True]}, "allowed_token_ids[1]"),
        (TEXT_PATH, {"forced_token_ids": [True]}, "forced_token_ids[0]"),
        ("/v1/responses", {"input": "x", "allowed_token_ids": [True]}, "allowed_token_ids[0]"),
        ("/detokenize", {"tokens": [5, 6, True]}, "tokens[2]"),
    ],
)
def test_boolean_is_no_number(server, path, body, place):
    """A client of /v1/completions with the `logprobs: false` of chats got log-probabilities."""
    response = post(server, path, **body)
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    faults = (": Input should be a number", ": Input should be a valid integer", "=")
    assert message.startswith(tuple(place + fault for fault in faults))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", {"type": "grammar"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("use_beam_search", True),
        ("best_of", 2),
        ("suffix", "end"),
        ("truncation_side", "right"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_unsupported_values_of_clients_are_refused(server, name, value, stream):
    for path in BODIES:
        response = post(server, path, stream=stream, **{name: value})
        assert response.status_code == 400 and response.json()["error"]["param"] == name


def test_true_is_not_a_number(server):
    """best_of=1 has no effect; true is no number."""
    assert post(server, TEXT_PATH, best_of=1).status_code == 200
    assert post(server, TEXT_PATH, best_of=True).status_code == 400


def test_fields_without_effect_are_ignored(server):
    extra = {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "x": 1}
    assert post(server, CHAT_PATH, **extra).status_code == 200
    response = post(server, CHAT_PATH, guided_decoding_backend="xgrammar", guided_choice=["a"])
    assert response.headers["x-lockstep-ignored-fields"] == "guided_decoding_backend"


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_ignored_fields_are_logged_for_served_requests(server, path, caplog):
    for refused in ({"model": "other"}, {"n": 0}, {"use_beam_search": True}, {"n": 5000}):
        assert post(server, path, store=False, **refused).status_code in (400, 404)
    assert "ignored" not in caplog.text
    assert post(server, path, store=False, metadata={}).status_code == 200
    assert [r.getMessage() for r in caplog.records if r.name == "lockstep.serve"] == [
        "fields were ignored: metadata, store"
    ]


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_null_fields_use_defaults(server, path):
    names = "stream stream_options temperature n stop seed logit_bias max_tokens logprobs user"
    names += " top_p priority timeout cache_salt tools tool_choice parallel_tool_calls top_logprobs"
    names += " max_completion_tokens chat_template_kwargs add_generation_prompt echo model"
    response = post(server, path, **dict.fromkeys(names.split()))
    assert response.status_code == 200, response.text
    nested = {"stream": True, "stream_options": {"include_usage": None}}
    assert post(server, path, **nested).status_code == 200


def test_prompt_logprobs_with_stream_are_refused(server):
    response = post(server, TEXT_PATH, stream=True, prompt_logprobs=1)
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt_logprobs"


def test_cache_salt(server):
    for wrong in ("", 5, "x" * 300):
        response = post(server, TEXT_PATH, cache_salt=wrong)
        assert response.status_code == 400 and response.json()["error"]["param"] == "cache_salt"
    assert post(server, TEXT_PATH, cache_salt="mine").status_code == 200
    assert server.client.requests[-1].cache_salt == "mine"
    post(server, TEXT_PATH)
    assert server.client.requests[-1].cache_salt == ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_echo_with_zero_max_tokens(server, stream, logprobs):
    body = {"prompt": "the dog", "echo": True, "max_tokens": 0, "logprobs": logprobs}
    response = post(server, TEXT_PATH, stream=stream, stream_options=None, **body)
    assert response.status_code == 200
    if stream:
        lines = [x[6:] for x in response.text.split("\n\n") if x.startswith("data: {")]
        chunks = [json.loads(x) for x in lines]
        (choice,) = [c for chunk in chunks for c in chunk["choices"]]
    else:
        (choice,) = response.json()["choices"]
        assert response.json()["usage"]["completion_tokens"] == 0
    assert (choice["text"], choice["finish_reason"]) == ("the dog", "length")
    if logprobs:
        assert "".join(choice["logprobs"]["tokens"]) == "the dog"
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["token_logprobs"][1] is not None
    refused = post(server, TEXT_PATH, max_tokens=0)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


def test_developer_role_equals_system_role(server):
    """The roles system and developer give the same prompt."""
    prompts = []
    for role in ("system", "developer"):
        post(server, CHAT_PATH, messages=[{"role": role, "content": "be brief"}, *USER])
        prompts.append(server.client.requests[-1].prompt_token_ids)
    assert prompts[0] == prompts[1]


WRONG_MESSAGES = [
    ([5], "messages[0]"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": 5, "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
    ([{"role": "user", "content": [7]}], "messages[0].content"),
    ([{"role": "user", "content": {"text": "x"}}], "messages[0].content"),
    ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "tool_calls": [{"function": 5}]}], "tool_calls[0].function"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}], "function.name"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
        "arguments",
    ),
    ([{"role": "assistant", "content": "x", "reasoning_content": 5}], "reasoning_content"),
    ([*USER, {"role": "tool", "content": None, "tool_call_id": 5}], "tool_call_id"),
    ([{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}], "function_call"),
    ([{"role": "assistant", "audio": {"id": "x"}}], "messages[0].audio is not supported"),
]


@pytest.mark.parametrize(("messages", "message"), WRONG_MESSAGES, ids=lambda v: str(v)[:40])
def test_wrong_types_in_messages(server, messages, message):
    response = post(server, CHAT_PATH, messages=[*messages])
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "messages"


def test_message_with_null_fields_may_be_sent_back(server):
    """The official client serializes an answer with null fields."""
    message = {"role": "assistant", "content": "fox", "function_call": None, "audio": None}
    assert post(server, CHAT_PATH, messages=[*USER, message, *USER]).status_code == 200


@pytest.mark.parametrize("name", ["messages", "tools", "self"])
@pytest.mark.parametrize("path", [CHAT_PATH, "/tokenize"])
def test_reserved_template_kwargs_are_refused(server, path, name):
    response = post(server, path, messages=USER, chat_template_kwargs={name: []})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    "tools",
    [
        5,
        [5],
        [{}],
        [{"type": "function"}],
        [{"type": "web_search"}],
        [{"type": "function", "function": {}}],
        [{"type": "function", "function": {"name": ""}}],
        [{"type": "function", "function": {"name": 5}}],
        [{"type": "function", "function": {"name": "f", "parameters": 5}}],
        [{"type": "function", "function": {"name": "f", "description": 5}}],
    ],
    ids=str,
)
def test_wrong_types_in_tools(server, tools):
    response = post(server, CHAT_PATH, tools=tools)
    assert response.status_code == 400 and response.json()["error"]["param"] == "tools"


def test_tools_reach_the_template_unchanged(server, processor):
    """Keys are neither reordered nor dropped, so the prompt is the client's."""
    tool = {"function": {"x": 1, "parameters": {"b": 1, "a": 2}, "name": "f"}, "type": "function"}
    post(server, CHAT_PATH, tools=[tool])
    requested = processor.render(USER, [tool])
    assert server.client.requests[-1].prompt_token_ids == requested


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"", "JSON object"),
        (b"[]", "JSON object"),
        (b"5", "JSON object"),
        (b"null", "JSON object"),
        (b'"text"', "JSON object"),
        (b"\xff\xfe", "body"),
        (b"[" * 100_000, "body"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "body"),
        (b"prompt=the", "not JSON"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_malformed_bodies_are_refused(server, content, message):
    headers = {"Content-Type": "application/json"}
    response = fetch(server, "POST", TEXT_PATH, content=content, headers=headers)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert message in error["message"] and error["type"] == "invalid_request_error"


def test_body_of_other_content_type_is_refused(server):
    response = fetch(server, "POST", TEXT_PATH, content=b"prompt=the")
    assert response.status_code == 400 and "Content-Type" in response.json()["error"]["message"]


def test_large_lists_are_refused_quickly(server):
    """Limits are checked before the entries."""
    started = time.process_time()
    for path, body in [
        (TEXT_PATH, {"prompt": [0.5] * 200_000}),
        (TEXT_PATH, {"prompt": [[1]] * 100_000}),
        (TEXT_PATH, {"prompt": "x" * 5_000_000}),
        (TEXT_PATH, {"logit_bias": {f"x{i}": "bad" for i in range(100_000)}}),
        (TEXT_PATH, {"stop": ["x"] * 200_000}),
        (TEXT_PATH, {"stop": ["x" * 1_000_000]}),
        (TEXT_PATH, {"stop_token_ids": ["x"] * 200_000}),
        (TEXT_PATH, {"allowed_token_ids": ["x"] * 200_000}),
        (CHAT_PATH, {"messages": [5] * 200_000}),
        (CHAT_PATH, {"messages": USER * 100_000}),
        (CHAT_PATH, {"messages": [{"role": "user", "content": ["x"] * 200_000}]}),
        (CHAT_PATH, {"tools": [5] * 200_000}),
        ("/detokenize", {"tokens": ["x"] * 200_000}),
        ("/tokenize", {"prompt": "x" * 5_000_000}),
    ]:
        begun = time.process_time()
        assert post(server, path, **body).status_code == 400, (path, list(body))
        assert time.process_time() - begun < 5, (path, list(body))
    assert time.process_time() - started < 20


def test_number_of_completions_is_limited(server):
    response = post(server, TEXT_PATH, prompt=["x"] * 500, n=128)
    assert (
        response.status_code == 400 and "64000 completions" in response.json()["error"]["message"]
    )
    assert not server.client.requests
    mixed = post(server, TEXT_PATH, prompt=["x", [1]])
    assert mixed.status_code == 400 and "prompt[1]" in mixed.json()["error"]["message"]
    wrong = post(server, TEXT_PATH, prompt={"text": "a"})
    assert "prompt is an object" in wrong.json()["error"]["message"]


@pytest.mark.parametrize("tokens", [[-1], [2**80], [1.5], "x", [None], 5, [1, 2**20]])
def test_detokenize_refuses_invalid_tokens(server, tokens):
    response = post(server, "/detokenize", tokens=tokens)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens"


def test_tokenize_requires_prompt_or_messages(server):
    messages = [{"role": "user", "content": "a"}]
    for body in ({}, {"prompt": "a", "messages": messages}):
        response = post(server, "/tokenize", **body)
        assert response.status_code == 400
        assert "send one of them" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "index"),
    [
        ("/v1/responses", {"input": [{"type": "image"}]}, "input[0]"),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_unknown_type_error_lists_allowed_types(server, path, body, index):
    response = fetch(server, "POST", path, json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith(
        f"{index}: type='image' is not supported: this server reads text only"
    )
    assert "_" not in message.partition("allowed: ")[0]


def test_error_names_the_sent_field(server):
    response = fetch(server, "POST", "/v1/responses", json={"input": "a", "max_output_tokens": 0})
    message = response.json()["error"]["message"]
    assert message.startswith("max_output_tokens=0 is not allowed")
    assert "max_tokens" not in message


def test_responses_match_the_schema(server):
    """With and without stream, with all options on."""
    from tests.serve.api_calls import CALL, TOOLS

    document = fetch(server, "GET", "/openapi.json").json()

    def validate(value, name):
        """Unknown fields are errors, too: types without additional fields are closed."""
        reference = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.validate(value, reference)

    server.text = "Look:\n\n" + CALL
    options = {"n": 2, "prompt_logprobs": 1}
    chat = {"tools": TOOLS, "logprobs": True, "top_logprobs": 2}
    text = {"logprobs": 2, "echo": True}
    stream_options = {"stream": True, "stream_options": {"include_usage": True}}
    for path, extra, full, chunk in (
        (CHAT_PATH, chat, "ChatCompletion", "ChatChunk"),
        (TEXT_PATH, text, "Completion", "CompletionChunk"),
    ):
        validate(post(server, path, **options, **extra).json(), full)
        stream = post(server, path, n=2, **stream_options, **extra).text
        lines = [line[6:] for line in stream.split("\n\n") if line.startswith("data: {")]
        assert len(lines) > 4
        for line in lines:
            validate(json.loads(line), chunk)
    validate(post(server, TEXT_PATH, n=0).json(), "Error")
    validate(fetch(server, "GET", "/v1/models").json(), "ModelList")
    validate(post(server, "/tokenize", prompt="a").json(), "TokenizeResponse")
    validate(post(server, "/detokenize", tokens=[1]).json(), "DetokenizeResponse")


def test_schema_has_no_422(server):
    schema = fetch(server, "GET", "/openapi.json").json()
    text = json.dumps(schema)
    assert "HTTPValidationError" not in text and '"422"' not in text
    for path in (CHAT_PATH, TEXT_PATH, "/tokenize", "/detokenize"):
        received = schema["paths"][path]["post"]["responses"]
        assert {"200", "400", "401", "413", "429", "503"} <= set(received)
        form = received["400"]["content"]["application/json"]["schema"]
        assert form == {"$ref": "#/components/schemas/Error"}
    stream = schema["paths"][CHAT_PATH]["post"]["responses"]["200"]["content"]
    assert set(stream) == {"application/json", "text/event-stream"}
    names = set(schema["components"]["schemas"])
    assert {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]} <= names


@pytest.mark.parametrize(
    ("fields", "at_once"),
    [
        ({}, True),
        ({"n": 2}, False),
        ({"prompt": ["the fox", "a dog"]}, False),
        ({"prompt": "the fox " * (SMALL_BODY_BYTES // 8)}, False),
        ({"guided_regex": "[a-z]+"}, False),
    ],
)
def test_slow_parsing_runs_in_a_thread(server, monkeypatch, fields, at_once):
    threads = []
    parse = Service._parse

    def recorded(*args):
        threads.append(threading.current_thread())
        return parse(*args)

    monkeypatch.setattr(Service, "_parse", recorded)
    assert post(server, TEXT_PATH, **fields).status_code == 200
    (thread,) = threads
    assert (thread is threading.main_thread()) == at_once
