"""Rendered prompts, and /invocations, the path of SageMaker."""

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.sampling_params import SamplingParams
from tests.serve.api_calls import CHAT_PATH, SCHEMA, TEXT_PATH, TOOLS, USER, fetch, post

FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}


def render_and_send(server: SimpleNamespace, path: str, **body: Any) -> Any:
    """Return the rendered prompts of a body, and the engine requests of the same body."""
    response = fetch(server, "POST", f"{path}/render", json=body)
    assert response.status_code == 200, response.text
    assert server.client.requests == [], "nothing is generated"
    assert post(server, path, **body).status_code == 200
    return response.json()


def test_rendered_chat_equals_engine_request(server: SimpleNamespace) -> None:
    result = render_and_send(
        server, CHAT_PATH, messages=USER, tools=TOOLS, seed=7, n=2, priority=3, cache_salt="mine"
    )
    requests = server.client.requests
    assert [result["token_ids"]] * 2 == [request.prompt_token_ids for request in requests]
    assert result["request_id"].startswith("chatcmpl-")
    assert (result["model"], result["priority"], result["cache_salt"]) == ("tiny", 3, "mine")
    assert (result["stream"], result["stream_options"], result["features"]) == (False, None, None)
    params = result["sampling_params"]
    assert (params["n"], params["seed"], params["temperature"]) == (2, 7, 0.5)
    assert params["max_tokens"] == requests[0].params.max_tokens
    assert SamplingParams(**{**params, "n": 1}) == requests[0].params


def test_each_prompt_is_rendered_separately(server: SimpleNamespace) -> None:
    prompts = ["the fox", "the quick brown fox"]
    result = render_and_send(
        server, TEXT_PATH, prompt=prompts, request_id="mine", bad_words=["dog"]
    )
    requests = server.client.requests
    assert [one["token_ids"] for one in result] == [r.prompt_token_ids for r in requests]
    assert len({one["request_id"] for one in result}) == 2
    assert {one["sampling_params"]["max_tokens"] for one in result} == {16}
    assert result[0]["sampling_params"]["bad_words_ids"] == requests[0].params.bad_words_ids
    alone = fetch(
        server, "POST", f"{TEXT_PATH}/render", json={"prompt": "the fox", "request_id": "mine"}
    )
    assert [one["request_id"] for one in alone.json()] == ["cmpl-mine"]


def test_response_format_is_rendered(server: SimpleNamespace) -> None:
    body = {"messages": USER, "response_format": FORM, "stream": True}
    options = {"stream_options": {"include_usage": True}}
    result = fetch(server, "POST", f"{CHAT_PATH}/render", json=body | options).json()
    assert result["sampling_params"]["structured_outputs"] == {"json": SCHEMA}
    assert result["stream"] is True and result["stream_options"]["include_usage"] is True


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT_PATH, {"messages": USER, "temperature": -1}, "temperature"),
        (CHAT_PATH, {"messages": USER, "model": "other"}, "model"),
        (CHAT_PATH, {"messages": USER, "n": 2000}, "n"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "fox " * 600}]}, "messages"),
        (CHAT_PATH, {"messages": USER, "guided_regex": "("}, "guided_regex"),
        (CHAT_PATH, {}, "messages"),
        (TEXT_PATH, {"prompt": []}, "prompt"),
        (TEXT_PATH, {"prompt": ["fox"] * 1025}, "prompt"),
        (TEXT_PATH, {"prompt": "fox", "best_of": 3}, "best_of"),
    ],
)
def test_render_refuses_like_generation(
    server: SimpleNamespace, path: str, body: dict[str, Any], field: str
) -> None:
    refused = fetch(server, "POST", f"{path}/render", json=body)
    assert refused.json()["error"]["param"] == field
    again = fetch(server, "POST", path, json=body)
    assert (refused.status_code, refused.json()) == (again.status_code, again.json())


def test_render_names_ignored_fields(server: SimpleNamespace) -> None:
    response = fetch(server, "POST", f"{CHAT_PATH}/render", json={"messages": USER, "store": True})
    assert response.headers["x-lockstep-ignored-fields"] == "store"


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT_PATH, {"messages": USER}), (TEXT_PATH, {"prompt": "the fox"})]
)
@pytest.mark.parametrize("stream", [False, True])
def test_invocation_is_routed_by_its_fields(
    server: SimpleNamespace, path: str, body: dict[str, Any], stream: bool
) -> None:
    body = {**body, "seed": 1, "request_id": "mine", "stream": stream}
    answers = [fetch(server, "POST", one, json=body) for one in ("/invocations", path)]
    kinds = {answer.headers["content-type"] for answer in answers}
    assert [answer.status_code for answer in answers] == [200, 200] and len(kinds) == 1
    if not stream:
        first, second = ({**answer.json(), "created": 0} for answer in answers)
        assert first == second
    first, second = server.client.requests
    assert first.prompt_token_ids == second.prompt_token_ids and first.params == second.params


@pytest.mark.parametrize(
    "body", [{"messages": USER, "temperature": "hot"}, {"prompt": "a", "n": ""}]
)
def test_invalid_field_of_invocation_is_named(
    server: SimpleNamespace, body: dict[str, Any]
) -> None:
    path = CHAT_PATH if "messages" in body else TEXT_PATH
    answers = [fetch(server, "POST", one, json=body) for one in ("/invocations", path)]
    assert answers[0].status_code == 400
    assert answers[0].json() == answers[1].json()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"inputs": "the fox"}, "neither"),
        ({"messages": None}, "neither"),
        ({"messages": USER, "prompt": "the fox"}, "both"),
        ([USER], "not"),
    ],
)
def test_invocation_of_unknown_kind_is_refused(
    server: SimpleNamespace, body: Any, message: str
) -> None:
    refused = fetch(server, "POST", "/invocations", json=body)
    assert refused.status_code == 400 and message in refused.json()["error"]["message"]
