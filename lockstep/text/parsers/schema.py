"""JSON values out of plain text, by a tool's schema (coercion order as in vLLM)."""

import json
import math
from typing import Any


def types_of(schema: Any, root: dict[str, Any], depth: int = 0) -> set[str]:
    """The JSON types that a schema allows, through anyOf, oneOf, enum and $ref."""
    if not isinstance(schema, dict) or depth > 8:
        return set()
    found = schema.get("type", [])
    types = set(found) if isinstance(found, list) else {found}
    for option in [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        types |= types_of(option, root, depth + 1)
    if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#/"):
        target: Any = root
        for key in ref[2:].split("/"):
            target = target.get(key, {}) if isinstance(target, dict) else {}
        types |= types_of(target, root, depth + 1)
    return types


def coerce(text: str, types: set[str]) -> Any:
    """The value that the text means: the first type that fits, else the text itself."""
    for name, read in _READERS:
        if name in types:
            try:
                return read(text)
            except ValueError:
                continue
    return text


def _null(text: str) -> None:
    if text.strip().lower() != "null":
        raise ValueError(text)


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return int(value) if value.is_integer() else value


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("true", "false", "1", "0"):
        raise ValueError(text)
    return word in ("true", "1")


def _json(kind: type) -> Any:
    def read(text: str) -> Any:
        value = json.loads(text)
        if not isinstance(value, kind):
            raise ValueError(text)
        return value

    return read


_READERS: tuple[tuple[str, Any], ...] = (
    ("null", _null),
    ("integer", int),
    ("number", _number),
    ("boolean", _boolean),
    ("object", _json(dict)),
    ("array", _json(list)),
)
