"""Malformed bodies: none crashes the server, and /health answers throughout."""

import asyncio
import copy
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.api_calls import CALL, TOOLS, USER

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, 1e308, 1e-320, "",
    "x", "\x00", "\ud800", "<|im_end|>", "é" * 300, "9" * 400, "-1", "nan", [], [[]], [None],
    [[1, "x"]],
    {}, {"": None}, {"type": "text"}, {"$ref": "#"}, [{}] * 50, ["x"] * 100, list(range(300)),
]  # fmt: skip
RAW = [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"[" * 3000, b'"\\ud800"', b"\xff", b"9" * 5000]
NAMES = (
    "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty n seed "
    "stop stop_token_ids min_tokens ignore_eos allowed_token_ids bad_words logit_bias "
    "skip_special_tokens include_stop_str_in_output prompt_logprobs priority timeout cache_salt "
    "user model stream stream_options max_tokens max_completion_tokens logprobs top_logprobs tools "
    "tool_choice parallel_tool_calls chat_template_kwargs add_generation_prompt echo prompt "
    "messages response_format structured_outputs guided_json guided_regex guided_choice "
    "guided_grammar guided_whitespace_pattern suffix best_of nobody_knows tokens "
    "add_special_tokens "
    "reasoning_effort continue_final_message return_token_ids return_token_sources speculate "
    "forced_token_ids forced_mismatch scored_from "
    "return_token_strs input instructions "
    "store text system thinking reasoning include metadata previous_response_id"
).split()
CALLS = [{"id": "c", "type": "function", "function": {"name": "get", "arguments": '{"n": 1}'}}]
SCHEMA: dict[str, Any] = {
    "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}]}},
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/a"}, "n": {"type": ["integer", "null"]}},
}
ODD_TOOLS = [{"type": "function", "function": {"name": "get", "parameters": SCHEMA}}]
TURNS = [
    {"role": "system", "content": "be brief"},
    *USER,
    {"role": "assistant", "tool_calls": CALLS, "reasoning_content": "so"},
    {"role": "tool", "content": [{"type": "text", "text": "sunny"}], "tool_call_id": "c"},
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "the fox"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
    {"type": "function_call", "call_id": "c", "name": "get", "arguments": '{"n": 1}'},
    {"type": "function_call_output", "call_id": "c", "output": "sunny"},
]
FLAT_TOOLS = [{"type": "function", "name": "get", "parameters": SCHEMA}]
BLOCKS = [
    *USER,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "get", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "sunny"}]},
]
INPUT_TOOLS = [{"name": "get", "input_schema": SCHEMA}]
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 20}),
    ("/v1/chat/completions", {"messages": TURNS, "tools": TOOLS, "stream": True, "n": 2}),
    ("/v1/chat/completions", {"messages": TURNS, "tools": ODD_TOOLS, "logprobs": True}),
    ("/v1/completions", {"prompt": "the fox", "max_tokens": 9, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "n": 2, "stream": True, "stop": ["x", "fox"]}),
    ("/v1/responses", {"input": "the fox", "max_output_tokens": 20, "stream": True}),
    ("/v1/responses", {"input": ITEMS, "tools": FLAT_TOOLS, "instructions": "be brief"}),
    ("/v1/messages", {"messages": USER, "max_tokens": 20, "stream": True}),
    ("/v1/messages", {"messages": BLOCKS, "tools": INPUT_TOOLS, "max_tokens": 20, "system": "x"}),
    ("/v1/messages/count_tokens", {"messages": BLOCKS, "tools": INPUT_TOOLS}),
    ("/v1/chat/completions/render", {"messages": TURNS, "tools": TOOLS, "n": 2}),
    ("/v1/completions/render", {"prompt": ["the fox", "a"], "n": 2, "logit_bias": {"5": 1}}),
    ("/invocations", {"messages": USER, "max_tokens": 20}),
    ("/invocations", {"prompt": "the fox", "stream": True}),
    ("/tokenize", {"messages": TURNS, "tools": TOOLS}),
    ("/tokenize", {"prompt": "the fox"}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the paths to every entry of a JSON value."""
    yield path
    if isinstance(value, (dict, list)):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(entry, (*path, key))


def changed(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with one to three entries replaced, dropped, doubled, or added."""
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        path = rng.choice([p for p in places(body)][1:] or [("x",)])
        owner: Any = body
        for key in path[:-1]:
            owner = owner[key]
        match rng.choice(("replace", "replace", "drop", "double", "field", "key")):
            case "replace":
                owner[path[-1]] = copy.deepcopy(rng.choice(ODD))
            case "drop" if path[-1] in (owner if isinstance(owner, dict) else range(len(owner))):
                del owner[path[-1]]
            case "double" if isinstance(owner, list):
                owner *= 2
            case "key" if isinstance(owner, dict):
                owner[rng.choice(["type", "function", "name", "content", "role", "$ref", ""])] = (
                    copy.deepcopy(rng.choice(ODD))
                )
            case _:
                body[rng.choice(NAMES)] = copy.deepcopy(rng.choice(ODD))
    return body


def raw(rng: random.Random, body: dict[str, Any]) -> bytes:
    """Return the body as bytes; one in five contains invalid JSON."""
    text = json.dumps(body).encode()
    if rng.random() < 0.2:
        cut = rng.randrange(len(text))
        text = text[:cut] + rng.choice(RAW) + text[cut + rng.randint(0, 5) :]
    return text


def attack(server: Any, count: int, seed: int) -> None:
    """Send `count` changed bodies, eight at a time, and request /health meanwhile."""
    rng = random.Random(seed)
    server.text = "Look:\n\n" + CALL
    headers = {"Content-Type": "application/json"}
    slowest = 0.0

    async def run() -> None:
        nonlocal slowest
        busy = True

        async def probe(client: Any) -> None:
            nonlocal slowest
            while busy:
                begun = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                slowest = max(slowest, time.monotonic() - begun)
                await asyncio.sleep(0.01)

        async with server.http() as client:
            probing = asyncio.create_task(probe(client))
            for _ in range(count // 8):
                chosen = [rng.choice(SEEDS) for _ in range(8)]
                sent = [(path, raw(rng, changed(rng, body))) for path, body in chosen]
                requested = [client.post(p, content=body, headers=headers) for p, body in sent]
                for (path, body), result in zip(
                    sent, await asyncio.gather(*requested), strict=True
                ):
                    late = result.status_code == 504 and b'"timeout"' in body
                    assert result.status_code < 500 or late, (path, body[:500], result.text[:500])
                    check_response(result)
            busy = False
            await probing

    asyncio.run(run())
    assert slowest < 1.0, f"/health took {slowest:.2f} s"


def check_response(actual: Any) -> None:
    """Assert that a response, whole or streamed, is JSON without NaN, and that an error is an error
    object."""
    if actual.headers["content-type"].startswith("text/event-stream"):
        events = [e for e in actual.text.split("\n\n") if e]
        named = events[0].startswith("event: ")
        assert named or events.pop() == "data: [DONE]"
        parts = [strict(e.splitlines()[-1].removeprefix("data: ")) for e in events]
        assert all("internal error" not in json.dumps(part) for part in parts)
    else:
        body = strict(actual.text)
        if actual.status_code != 200:
            assert {"message", "type"} <= set(body["error"])
            assert 0 < len(body["error"]["message"]) < 2000


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_server_survives_changed_bodies(server: Any) -> None:
    attack(server, 240, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_server_survives_many_changed_bodies(server: Any, seed: int) -> None:
    attack(server, 400, seed)
