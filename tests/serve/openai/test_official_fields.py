"""Every field of the official clients' parameter types has an effect, is refused, or is documented
as ignored."""

import asyncio
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from typing_extensions import is_typeddict

from tests.serve.api_calls import CHAT_PATH, TEXT_PATH

PAGE = Path(__file__).parents[3] / "docs" / "request_fields.md"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
PARAMS: dict[str, str] = {
    CHAT_PATH: "openai.types.chat.completion_create_params.CompletionCreateParamsNonStreaming",
    TEXT_PATH: "openai.types.completion_create_params.CompletionCreateParamsNonStreaming",
    RESPONSES: "openai.types.responses.response_create_params.ResponseCreateParamsNonStreaming",
    MESSAGES: "anthropic.types.message_create_params.MessageCreateParamsNonStreaming",
    COUNT: "anthropic.types.message_count_tokens_params.MessageCountTokensParams",
}
VALUES: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 9,
    "logprobs": 1,
    "top_logprobs": 1,
    "prompt": "the",
    "arguments": "{}",
    "seed": 3,
    "store": True,
    "definition": "[a-z]+",
    "syntax": "regex",
    "input_schema": {"type": "object"},
    "schema": {"type": "object"},
    "parameters": {"type": "object"},
    "metadata": {"user_id": "a"},
    "logit_bias": {"3": 1},
    "tool_choice": "auto",
    "best_of": 2,
    "modalities": ["audio"],
    "context": "current_turn",
    "allowed_callers": ["programmatic"],
    "url": "data:image/png;base64,AAAA",
}
"""Valid values of fields by name, where an arbitrary value of the type is invalid."""
TOOLS: dict[str, Any] = {
    CHAT_PATH: [{"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}],
    RESPONSES: [{"type": "function", "name": "a", "parameters": {"type": "object"}}],
    MESSAGES: [{"name": "a", "input_schema": {"type": "object"}}],
}
TOOLS[COUNT] = TOOLS[MESSAGES]
BASES: dict[str, dict[str, Any]] = {
    CHAT_PATH: {"messages": [{"role": "user", "content": "the"}]},
    TEXT_PATH: {"prompt": "the"},
    RESPONSES: {"input": "the"},
    MESSAGES: {"messages": [{"role": "user", "content": "the"}], "max_tokens": 9},
    COUNT: {"messages": [{"role": "user", "content": "the"}]},
}
CALL_BLOCK = {"type": "tool_use", "id": "a", "name": "a", "input": {}}
CALL = {"id": "a", "function": {"name": "a", "arguments": "{}"}}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    CHAT_PATH: ("messages", {"role": "assistant", "tool_calls": [CALL]}),
    RESPONSES: (
        "input",
        {"type": "function_call", "call_id": "a", "name": "a", "arguments": "{}"},
    ),
    MESSAGES: ("messages", {"role": "assistant", "content": [CALL_BLOCK]}),
}
CALLS[COUNT] = CALLS[MESSAGES]
"""Field of the conversation, and the call of which a result may be tried."""
NEEDS: dict[tuple[str, str], dict[str, Any]] = {
    (CHAT_PATH, "top_logprobs"): {"logprobs": True},
    (CHAT_PATH, "logprobs"): {"logprobs": True},
    (CHAT_PATH, "stream_options"): {"stream": True},
    (TEXT_PATH, "stream_options"): {"stream": True},
    (RESPONSES, "background"): {"background": True},
}
"""Fields that need other fields."""
DECLARED = {(CHAT_PATH, "user"), (TEXT_PATH, "user"), (MESSAGES, "metadata")}
"""Fields of the published schema that have no effect."""


def plain(kind: Any) -> Any:
    """Return a type without Required, NotRequired and Annotated."""
    while get_origin(kind) in (typing.Required, typing.NotRequired, Annotated):
        kind = get_args(kind)[0]
    return kind


def alternatives(kind: Any) -> list[Any]:
    """Return the types that a field may have."""
    kind = plain(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return [one for part in get_args(kind) for one in alternatives(part)]
    return [kind]


def is_listed(kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Iterable) and not is_mapping(kind)


def is_mapping(kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def objects_of(kind: Any, suffix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the objects that a field may hold, with "[]" for those of a list."""
    for one in alternatives(kind):
        if is_typeddict(one):
            yield suffix, one
        elif is_listed(one):
            yield from objects_of(get_args(one)[0], suffix + "[]")


def sample(kind: Any, name: str = "") -> Any:
    """Return a value of a type, as small as it may be."""
    options = alternatives(kind)
    if name in VALUES and not any(is_typeddict(one) for one in options):
        return VALUES[name]
    one = options[0]
    if is_typeddict(one):
        return minimal_object(one)
    if get_origin(one) is Literal:
        return get_args(one)[0]
    if is_listed(one):
        return [sample(get_args(one)[0])]
    simple = {str: "a", int: 1, float: 0.5, bool: True, type(None): None}
    return {} if is_mapping(one) else simple.get(one, "a")


def hints(kind: Any) -> dict[str, Any]:
    """Return the fields of an object's type."""
    return get_type_hints(kind, include_extras=True)


def minimal_object(kind: Any) -> dict[str, Any]:
    """Return an object with only its required fields, and its type if that is a constant."""
    fields = hints(kind)
    expected = [
        name for name, field in fields.items() if name == "type" or is_required(kind, field)
    ]
    return {name: sample(fields[name], name) for name in expected}


def is_required(kind: Any, field: Any) -> bool:
    """Return True if an object of the type must have the field.

    The class's own __required_keys__ are empty if its annotations are strings.
    """
    origin = get_origin(field)
    return origin is typing.Required or (kind.__total__ and origin is not typing.NotRequired)


class FieldWalk:
    """Sender of a request for every field of one API's parameters."""

    def __init__(self, server: Any, path: str) -> None:
        self.server = server
        self.path = path
        self.schema = server.app.openapi()
        self.body_schema = self.schema["paths"][path]["post"]["requestBody"]["content"][
            "application/json"
        ]["schema"]
        self.without_effect: set[str] = set()
        self.faults: list[str] = []
        self.count = 0

    async def run(self) -> None:
        module, name = PARAMS[self.path].rsplit(".", 1)
        root = getattr(import_module(module), name)
        async with self.server.http() as self.client:
            await self._object(root, "", lambda value: {**BASES[self.path], **value}, [])

    async def _object(self, kind: Any, index: str, wrap: Any, above: list[Any]) -> None:
        for name, field in hints(kind).items():
            spot = f"{index}.{name}" if index else name
            objects = list(objects_of(field))
            if not objects:
                value = sample(field, name)
                await self._check_field(
                    spot, wrap({**self._around(kind, index), name: value}), name
                )
                continue
            for suffix, one in objects:
                if one in above:
                    continue

                def inner(
                    value: Any, one: Any = one, suffix: str = suffix, name: str = name
                ) -> dict[str, Any]:
                    for _ in range(suffix.count("[]")):
                        value = [value]
                    return wrap({**self._around(kind, index), name: value})

                taken = await self._check_field(
                    f"{spot}{suffix}", inner(minimal_object(one)), name, one
                )
                if taken:
                    await self._object(one, f"{spot}{suffix}", inner, [*above, one])

    def _around(self, kind: Any, index: str) -> dict[str, Any]:
        return {} if not index else minimal_object(kind)

    async def _check_field(
        self, spot: str, body: dict[str, Any], name: str, kind: Any = None
    ) -> bool:
        """Check one field; return True if its content is read further."""
        self.count += 1
        top = spot.split(".")[0].removesuffix("[]")
        body = {**body, **NEEDS.get((self.path, top), {})}
        if top == "tool_choice" or body.get("tool_choice"):
            body.setdefault("tools", TOOLS[self.path])
        if body.get("messages") and self.path in (MESSAGES, COUNT):
            body["messages"] = [*body["messages"], {"role": "user", "content": "the"}]
        conversation, call = CALLS.get(self.path, ("", {}))
        if top == conversation and "id': 'a'" in str(body[top]):
            body[top] = [call, *body[top]]
        response = await self.client.post(self.path, json=body)
        if response.status_code in (400, 404):
            message = response.json()["error"]["message"]
            where = re.sub(r"\[\d+\]", "[]", message)
            if not where.startswith(spot.removesuffix("[]")):
                self.faults.append(f"{spot}: refused without its name: {message}")
            return False
        if response.status_code != 200:
            self.faults.append(f"{spot}: {response.status_code} {response.text[:200]}")
            return False
        if not self._is_known(spot) or (self.path, spot) in DECLARED:
            self.without_effect.add(spot)
            return False
        return True

    def _is_known(self, spot: str) -> bool:
        """Return True if the published schema of the body has the field."""
        parts = [self.body_schema]
        for step in re.findall(r"\[\]|[^.\[\]]+", spot):
            parts = [
                inner
                for part in parts
                for one in self._parts(part)
                for inner in self._step(one, step)
            ]
        return bool(parts)

    def _step(self, schema: Any, step: str) -> list[Any]:
        if step == "[]":
            return [schema["items"]] if "items" in schema else []
        properties = schema.get("properties")
        if properties is None and schema.get("type", "object") == "object":
            return [] if {"anyOf", "oneOf", "$ref"} & schema.keys() else [schema]
        return [properties[step]] if properties and step in properties else []

    def _parts(self, schema: Any) -> Iterator[Any]:
        if "$ref" in schema:
            schema = self.schema["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        yield schema
        for word in ("anyOf", "oneOf", "allOf"):
            for one in schema.get(word, ()):
                yield from self._parts(one)


def documented(path: str) -> set[str]:
    """Return the fields without effect that the page lists for an API."""
    text = PAGE.read_text()
    _, _, section = text.partition(f"## Without effect: `{path}`\n")
    section = section.partition("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.M))


@pytest.mark.default_cases("/v1/chat/completions", "/v1/completions", "/v1/messages")
@pytest.mark.parametrize("path", PARAMS)
def test_every_official_field_is_handled(server: Any, path: str) -> None:
    walk = FieldWalk(server, path)
    asyncio.run(walk.run())
    print("FIELDS", path, sorted(walk.without_effect))
    assert not walk.faults, "\n".join(walk.faults)
    assert walk.count > 15
    assert walk.without_effect == documented(path)
