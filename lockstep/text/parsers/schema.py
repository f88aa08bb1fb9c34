"""JSON values out of plain text, by a tool's schema (coercion order as in vLLM).

Schemas come from clients and may hold anything: what has the wrong type counts as absent.
"""

import json
import math
import sys
from itertools import islice
from typing import Any

MAX_PARTS = 256  # parts of a schema that are looked at for one parameter; entries of one list


def parameters_by_name(tools: Any) -> dict[str, dict[str, Any]]:
    """The JSON schema of each tool's parameters; of two tools with one name, the first's."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(function, dict) and isinstance(name, str):
            found.setdefault(name, _object(function.get("parameters")))
    return found


def types_of(schema: Any, root: dict[str, Any]) -> set[str]:
    """The JSON types that a schema allows, through anyOf, oneOf, allOf, enum, const and $ref.

    Each part is visited once; a schema of more than MAX_PARTS parts counts as {}.
    """
    types: set[str] = set()
    visited: set[int] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in visited:
            continue
        visited.add(id(part))
        if len(visited) > MAX_PARTS:
            return set()
        waiting += [o for key in ("anyOf", "oneOf", "allOf") for o in _list(part.get(key))]
        waiting.append(target(part.get("$ref"), root))
        named = part.get("type")
        types.update(t for t in [named, *_list(named)] if isinstance(t, str))
        values = [*_list(part.get("enum")), *([part["const"]] if "const" in part else [])]
        types.update(_type_of(value) for value in values)
    return types


def property_types(schema: Any, name: str) -> set[str]:
    """The JSON types that an object's schema allows for one of its properties."""
    root = _object(schema)
    return types_of(_object(root.get("properties")).get(name), root)


def coerce(text: str, types: set[str]) -> Any:
    """The value that the text means: the first type that fits, else the text itself."""
    for name, read in _READERS:
        if name in types:
            try:
                return read(text)
            except ValueError:
                continue
    return text


def to_json(value: Any) -> str:
    """JSON text of a value. Raises ValueError for what JSON cannot say, or not so deeply."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        return text
    except UnicodeEncodeError:  # half a surrogate pair is a legal escape, and no legal text
        return json.dumps(value, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def from_json(text: str) -> Any:
    """The value of JSON text. Raises ValueError for what `to_json` could not say again."""
    try:
        value = json.loads(text, parse_float=lambda number: finite(float(number)))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    to_json(value)
    return value


def finite(value: float) -> float:
    """A number as written; one beyond what a double holds is the largest."""
    return math.copysign(sys.float_info.max, value) if math.isinf(value) else value


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return list(islice(value, MAX_PARTS)) if isinstance(value, list) else []


def target(ref: Any, root: dict[str, Any]) -> Any:
    """The schema that a reference within this one stands for; None where there is none."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    target: Any = root
    for key in ref.split("/", MAX_PARTS)[1:]:
        target = _object(target).get(key)
    return target


def _type_of(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", dict: "object", list: "array", type(None): "null"}
    return kinds.get(type(value), "number")


def _null(text: str) -> None:
    if text.strip().lower() != "null":
        raise ValueError(text)


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        value = float(text)
    if math.isinf(value) and any(char.isdigit() for char in text):
        value = finite(value)
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
        value = from_json(text)
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
