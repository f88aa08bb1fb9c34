"""Large JSON bodies: equal results, refusals, and no delay of other requests."""

import asyncio
import json
from typing import Any

import pytest

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


def test_large_body_does_not_block_the_event_loop() -> None:
    """json.loads would let the loop run only twice."""
    numbers = b"[" + b"1," * 300_000 + b"1]"
    fields = b"{" + b",".join(b'"%06d":1' % number for number in range(100_000)) + b"}"
    for body in (numbers, fields):
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
