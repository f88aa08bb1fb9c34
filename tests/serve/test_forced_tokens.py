"""Forced tokens over HTTP: fields of requests, and what responses say about a mismatch."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep import LLM
from tests.serve.live_server import MTP, SETTINGS, serving
from tests.waiting import wait_until

MODEL = str(Path(__file__).parents[1] / "assets" / "qwen3")
PATHS = {
    "/v1/completions": {"prompt": "def read(path):"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Count to ten."}]},
}
WANTED = {
    "temperature": 0.8,
    "seed": 5,
    "max_tokens": 24,
    "ignore_eos": True,
    "return_token_ids": True,
    "return_token_sources": True,
}


@pytest.fixture(scope="module")
def stack() -> Iterator[SimpleNamespace]:
    """Yield a server."""
    with serving(LLM(MODEL, speculative_config=MTP | {"method": "ngram"}, **SETTINGS)) as result:
        yield result


@pytest.fixture
def server(stack: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """Yield the server; assert afterwards that it has no request."""
    yield stack
    wait_until(lambda: not stack.llm.engine.scheduler.entries)


def choice_of(server: SimpleNamespace, path: str, **fields: Any) -> dict[str, Any]:
    """Return the only choice of a completion."""
    response = server.http.post(path, json={**PATHS[path], **WANTED, **fields})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


def last_choice(server: SimpleNamespace, path: str, **fields: Any) -> tuple[dict[str, Any], str]:
    """Return the choice of a stream that has the finish reason, and the whole text of the
    stream."""
    body = {**PATHS[path], **WANTED, **fields, "stream": True}
    with server.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    (last,) = [choice for choice in choices if choice["finish_reason"] is not None]
    return last, "".join(lines)


@pytest.mark.parametrize("path", PATHS)
def test_forced_prefix_gives_the_same_answer(server: SimpleNamespace, path: str) -> None:
    fields: dict[str, Any] = {"logprobs": 2} if "chat" not in path else {"logprobs": True}
    expected = choice_of(server, path, **fields)
    forced = expected["token_ids"][:15]
    choice = choice_of(server, path, forced_token_ids=forced, **fields)
    sources = [entry["source"] for entry in choice["token_sources"]]
    assert sources[:15] == ["forced"] * 15 and "forced" not in sources[15:]
    for one in (choice, expected):
        del one["token_sources"]
    assert choice == expected


@pytest.mark.parametrize("path", PATHS)
def test_mismatch_ends_the_choice_or_is_reported(server: SimpleNamespace, path: str) -> None:
    ids = choice_of(server, path)["token_ids"]
    wrong = 9 if ids[3] != 9 else 8
    forced = [*ids[:3], wrong, 5, 5]
    mismatch = {"index": 3, "forced": wrong, "chosen": ids[3]}
    choice = choice_of(server, path, forced_token_ids=forced)
    assert (choice["finish_reason"], choice["token_ids"]) == ("error", ids[:3])
    assert f"forced_token_ids[3] is {wrong}, but the model chooses {ids[3]}" in choice["error"]
    assert choice["forced_mismatch"] == mismatch
    choice, text = last_choice(server, path, forced_token_ids=forced)
    assert choice["finish_reason"] == "error" and choice["forced_mismatch"] == mismatch
    assert text.count('"forced_mismatch":{') == 1
    reporting = {"forced_token_ids": forced, "forced_mismatch": "report"}
    choice = choice_of(server, path, **reporting)
    assert choice["token_ids"][:6] == forced and choice["finish_reason"] == "length"
    assert choice["forced_mismatch"] == mismatch and "error" not in choice
    choice, text = last_choice(server, path, **reporting)
    assert choice["forced_mismatch"] == mismatch and text.count('"forced_mismatch":{') == 1


def test_mismatch_after_a_stop_string_is_not_reported(server: SimpleNamespace) -> None:
    path = "/v1/completions"
    ids = choice_of(server, path)["token_ids"]
    encode = server.llm.get_tokenizer().encode
    forced = encode(" stop here", add_special_tokens=False)
    fields = {"forced_token_ids": [*forced, *ids], "forced_mismatch": "report", "max_tokens": 64}
    first = choice_of(server, path, **fields)["forced_mismatch"]["index"]
    assert first < len(forced)
    text = server.llm.get_tokenizer().decode(ids[:2])
    changed = [*ids[:6], *forced]
    fields = {"forced_token_ids": changed, "forced_mismatch": "report", "max_tokens": 64}
    assert choice_of(server, path, **fields)["forced_mismatch"]["index"] >= 6
    stopped = choice_of(server, path, **fields, stop=[text])
    assert stopped["finish_reason"] == "stop"
    assert "forced_mismatch" not in stopped


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"forced_token_ids": [1] * 25}, "forced_token_ids"),
        ({"forced_token_ids": [10**7]}, "forced_token_ids"),
        ({"forced_token_ids": [-1]}, "forced_token_ids"),
        ({"forced_token_ids": "abc"}, "forced_token_ids"),
        ({"forced_token_ids": [1.5]}, "forced_token_ids"),
        ({"forced_token_ids": [1], "forced_mismatch": "skip"}, "forced_mismatch"),
        ({"forced_token_ids": [1], "forced_mismatch": 3}, "forced_mismatch"),
    ],
)
def test_wrong_fields_are_refused(
    server: SimpleNamespace, path: str, fields: dict[str, Any], param: str
) -> None:
    response = server.http.post(path, json={**PATHS[path], **WANTED, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_other_apis_refuse_forced_tokens(server: SimpleNamespace, path: str) -> None:
    body = (
        {"input": "hi"}
        if "responses" in path
        else {**PATHS["/v1/chat/completions"], "max_tokens": 5}
    )
    response = server.http.post(path, json={**body, "forced_token_ids": [1]})
    assert response.status_code == 400 and "forced_token_ids" in response.text
