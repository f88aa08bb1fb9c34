"""Bottom-up rewriting of JSON schemas."""

from collections.abc import Callable
from typing import Any

DEFINITIONS = ("$defs", "definitions")
"""Keywords of definitions, which restrict values only where a reference leads to them."""
MAPS = ("properties", "patternProperties", *DEFINITIONS)
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("additionalProperties", "additionalItems", "items")
"""Keywords whose values are schemas: in objects by name, in lists, and alone or in lists."""
NOTES = (
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$comment",
)  # fmt: skip
"""Annotations: keywords that restrict no value."""
Json = dict[str, Any]


def rewrite(schema: Any, change: Callable[[Json], Json]) -> Any:
    """Return the schema with `change` applied to each of its objects, inner ones first."""
    if not isinstance(schema, dict):
        return schema
    result: Json = {}
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            result[key] = {name: rewrite(part, change) for name, part in value.items()}
        elif key in (*LISTS, *SINGLE) and isinstance(value, list):
            result[key] = [rewrite(part, change) for part in value]
        else:
            result[key] = rewrite(value, change) if key in SINGLE else value
    return change(result)
