"""Validator of the part of JSON Schema that the probe's own schemas use."""

import json
from typing import Any

TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}


def parse(text: str) -> Any:
    """Parse JSON. Raises ValueError, also for text that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def mismatch(value: Any, schema: dict[str, Any], path: str = "value") -> str | None:
    """Return why a value does not match a schema, or None if it does."""
    kind: str = schema["type"]
    is_bool_as_number = isinstance(value, bool) and kind in ("integer", "number")
    if not _is_of(value, kind) or is_bool_as_number:
        return f"{path} is not of type {kind}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{path} is none of {schema['enum']}"
    if kind == "array":
        return _first(mismatch(v, schema["items"], f"{path}[{i}]") for i, v in enumerate(value))
    if kind == "object":
        return _object_mismatch(value, schema, path)
    return None


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, TYPES[kind])


def _object_mismatch(value: dict[str, Any], schema: dict[str, Any], path: str) -> str | None:
    properties = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in value]
    if missing:
        return f"{path} lacks {missing[0]}"
    unknown = [name for name in value if name not in properties]
    if unknown and schema.get("additionalProperties") is False:
        return f"{path} has the unknown property {unknown[0][:40]}"
    known = [(name, value[name]) for name in value if name in properties]
    return _first(mismatch(v, properties[name], f"{path}.{name}") for name, v in known)


def _first(reasons: Any) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
