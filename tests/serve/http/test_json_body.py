"""JSON bodies: refusals of ambiguous ones. Large ones delay no other request."""

import asyncio
import json
from typing import Any

import pytest

from lockstep.errors import RequestError
from lockstep.serve.http import json_body
from lockstep.serve.http.json_body import LARGE_BODY_BYTES, MAX_VALUES, BodyReader
from tests.serve.openai.test_protocol import fetch

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "the fox"}
WIDE = 'é"\\\n\U0001f98a' * (LARGE_BODY_BYTES // 8)


def send(server: Any, body: bytes) -> Any:
    headers = {"Content-Type": "application/json"}
    return fetch(server, "POST", PATH, content=body, headers=headers)


def large(**fields: Any) -> bytes:
    """Return a body that is large enough to be parsed in a thread."""
    body = json.dumps({"messages": [USER], **fields}).encode()
    return body + b" " * max(LARGE_BODY_BYTES - len(body), 0)


def test_large_body_equals_small_body(server: Any) -> None:
    small = send(server, json.dumps({"messages": [USER], "seed": 5}).encode())
    prompt = server.client.requests[-1].prompt_token_ids
    result = send(server, large(seed=5))
    assert result.json()["choices"] == small.json()["choices"]
    assert server.client.requests[-1].prompt_token_ids == prompt
    assert server.client.requests[-1].seed == 5


def test_incremental_parser_equals_json() -> None:
    value = {"text": WIDE, "many": [1, -2.5e300, None, True, {"a": [[]]}], "": {}}
    body = json.dumps(value).encode()
    assert len(body) > LARGE_BODY_BYTES
    assert asyncio.run(BodyReader().read(body)) == value == json.loads(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"messages": [}' + b" " * LARGE_BODY_BYTES, "not JSON"),
        (b"[" * LARGE_BODY_BYTES, "not JSON"),
        (b'{"messages": "\xff' + b" " * LARGE_BODY_BYTES + b'"}', "not JSON"),
        (b'{"zz": [' + b"[]," * 2 * MAX_VALUES + b"[]]}", "more than 131072 objects, lists"),
    ],
)
def test_invalid_large_body_is_refused(server: Any, body: bytes, message: str) -> None:
    result = send(server, body)
    assert result.status_code == 400 and message in result.json()["error"]["message"], result.text


HALF = rb'"a\ud83d"'
"""JSON text of a string with half of an emoji, as clients that cut texts send it."""


@pytest.mark.parametrize("size", [0, LARGE_BODY_BYTES])
@pytest.mark.parametrize(
    ("path", "body", "field", "message"),
    [
        ("/v1/responses", b'"input": "x", "metadata": {"a": %b}', "metadata", "metadata.a: charac"),
        ("/v1/responses", b'"input": "x", "user": %b', "user", "user: character 1 is half"),
        ("/v1/responses", b'"input": "x", "instructions": %b', "instructions", "character 1"),
        ("/v1/responses", b'"input": [{"role": "user", "x": %b}]', "input", "input[0].x: charac"),
        (PATH, b'"messages": [], "stop": [%b]', "stop", "stop[0]: character 1 is half of a surro"),
        (PATH, b'"messages": [], "unknown": {%b: 1}', "unknown", r"unknown.a\ud83d: character 1 "),
        (PATH, b'"messages": [], %b: 1', r"a\ud83d", r"a\ud83d: character 1 is half of a"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused(
    server: Any, path: str, body: bytes, field: str, message: str, size: int
) -> None:
    headers = {"Content-Type": "application/json"}
    sent = b"{%b}" % (body % HALF) + b" " * size
    result = fetch(server, "POST", path, content=sent, headers=headers)
    assert result.status_code == 400
    assert message in result.json()["error"]["message"]
    assert result.json()["error"]["param"] == field


@pytest.mark.parametrize(
    "body",
    [b'["\\ud83d"' + b", 1" * 150_000 + b"]", b"[" + b"1, " * 150_000 + rb'"\ud83d"]', HALF],
    ids=["first entry", "last entry", "no list"],
)
def test_search_for_half_of_a_surrogate_pair_is_bounded(body: bytes) -> None:
    """A list in a small body has 250,000 entries. A search of all took 0.2 s in the event loop."""
    place = r"^\[0\]: character 0 is" if body.startswith(b'["') else "^the body has"
    with pytest.raises(RequestError, match=f"{place} half of a surrogate pair"):
        asyncio.run(BodyReader().read(body))


def test_invalid_utf8_of_half_a_surrogate_pair_is_refused(server: Any) -> None:
    result = send(server, b'{"messages": [{"role": "user", "content": "\xed\xa0\xbd"}]}')
    assert "messages[0].content: character 0 is half" in result.json()["error"]["message"]


def test_escaped_surrogate_pair_is_a_character(server: Any) -> None:
    body = rb'{"messages": [{"role": "user", "content": "\ud83e\udd8a \\ud83e"}]}'
    assert send(server, body).status_code == 200


def test_pairs_are_whole_wherever_the_text_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    text = r'"\ud83e\udd8a \\ud83e \n\u00e9\uD83E\uDD8A é"'
    for size in range(12, 24):
        monkeypatch.setattr(json_body, "MATCHED_CHARACTERS", size)
        assert asyncio.run(BodyReader().read(text.encode())) == json.loads(text)
        for half in (r"\ud83e", r"\uDD8A", r"\udd8a\ud83e", r"\\\ud83e"):
            with pytest.raises(RequestError, match="half of a surrogate pair"):
                asyncio.run(BodyReader().read(f'[{text}, {text[:-1]}{half}"]'.encode()))


@pytest.mark.parametrize("size", [0, LARGE_BODY_BYTES])
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (b'"seed": 1, "seed": 2', "seed"),
        (b'"seed": 1, "x": 0, "seed": true', "seed"),
        (b'"metadata": {"a": [{"b": 1, "b": {}}]}', "b"),
    ],
)
def test_field_with_two_values_is_refused(
    server: Any, fields: bytes, field: str, size: int
) -> None:
    body = b'{"messages": [{"role": "user", "content": "the fox"}], %b}' % fields
    result = send(server, body + b" " * size)
    assert result.status_code == 400
    assert result.json()["error"]["param"] == field
    assert f"the field {field!r} occurs twice" in result.json()["error"]["message"]


def test_field_with_one_value_may_occur_twice(server: Any) -> None:
    body = b'{"messages": [{"role": "user", "content": "the fox"}], "seed": 5, "seed": 5}'
    assert send(server, body).status_code == 200
    assert server.client.requests[-1].seed == 5


def test_large_body_does_not_block_the_event_loop() -> None:
    """json.loads would let the loop run only twice."""
    numbers = b"[" + b"1," * 300_000 + b"1]"
    fields = b"{" + b",".join(b'"%06d":1' % number for number in range(100_000)) + b"}"
    escapes = b'["' + rb"\n" * 2_000_000 + b'"]'
    for body in (numbers, fields, escapes):
        assert len(body) > LARGE_BODY_BYTES
        assert asyncio.run(loop_turns_during(body)) > 5


async def loop_turns_during(body: bytes) -> int:
    """Return how often the event loop ran while the body was parsed."""
    reading = asyncio.create_task(BodyReader().read(body))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0.001)
        turns += 1
    await reading
    return turns
