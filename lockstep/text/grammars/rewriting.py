"""Changing each object of a JSON schema."""

from collections.abc import Callable
from typing import Any

MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("additionalProperties", "additionalItems", "items")
"""Keywords whose values are schemas: in objects by name, in lists, and alone or in lists."""
NOTES = (
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$comment",
)  # fmt: skip
"""Keywords that tell a reader something, and restrict no value."""
Json = dict[str, Any]


def rewritten(schema: Any, change: Callable[[Json], Json]) -> Any:
    """Return the schema with each of its objects changed, inner ones first."""
    if not isinstance(schema, dict):
        return schema
    found: Json = {}
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            found[key] = {name: rewritten(part, change) for name, part in value.items()}
        elif key in (*LISTS, *SINGLE) and isinstance(value, list):
            found[key] = [rewritten(part, change) for part in value]
        else:
            found[key] = rewritten(value, change) if key in SINGLE else value
    return change(found)
