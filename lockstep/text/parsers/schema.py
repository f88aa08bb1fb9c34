"""Conversion of plain text to JSON values by a tool's schema (order of coercion as in vLLM).

Schemas come from clients and may contain anything: values of a wrong type count as absent.
"""

import json
import math
import re
from decimal import Decimal
from itertools import islice
from typing import Any
from urllib.parse import unquote

from lockstep.text.parsers.literals import finite, literal_value

MAX_PARTS = 256
"""Maximum parts of a schema that are read for one parameter, and entries of one list."""
MAX_DIGITS = 400
"""Maximum digits of an integer."""
MAX_SEARCHED = 10_000
"""Maximum parts of a schema that are searched for an anchor."""
_INDEX = re.compile("0|[1-9][0-9]{0,5}")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
TYPE_NAMES = {
    **dict.fromkeys(("str", "string"), "string"),
    **dict.fromkeys(("int", "integer", "int32", "int64", "uint", "long", "short"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double", "num", "number"), "number"),
    **dict.fromkeys(("bool", "boolean"), "boolean"),
    **dict.fromkeys(("dict", "map", "mapping", "object"), "object"),
    **dict.fromkeys(("list", "arr", "array", "tuple", "set", "sequence"), "array"),
    **dict.fromkeys(("none", "nonetype", "null"), "null"),
    **dict.fromkeys(("any",), ""),
}
"""Lower-case type names of programming and schema languages -> JSON Schema's names."""


def parameters_by_name(tools: Any) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each tool's parameters; of two equal names, the first."""
    schemas: dict[str, dict[str, Any]] = {}
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(function, dict) and isinstance(name, str):
            schemas.setdefault(name, _object(function.get("parameters")))
    return schemas


def json_type(name: str) -> str:
    """Return JSON Schema's name of a type; "" for a name of any type.

    Schemas made from signatures of programs have other names, such as int, float and list[str].
    """
    if name in TYPES:
        return name
    return TYPE_NAMES.get(name.partition("[")[0].strip().lower(), name)


def parts_of(schema: Any, root: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a schema and those that it combines, through anyOf, oneOf, allOf and $ref.

    Each part is visited once; a schema of more than MAX_PARTS parts has none.
    """
    parts: list[dict[str, Any]] = []
    visited: set[int] = set()
    pending = [schema]
    while pending:
        part = pending.pop()
        if not isinstance(part, dict) or id(part) in visited:
            continue
        visited.add(id(part))
        if len(visited) > MAX_PARTS:
            return []
        parts.append(part)
        pending += [o for key in ("anyOf", "oneOf", "allOf") for o in _list(part.get(key))]
        pending.append(target(part.get("$ref"), root))
    return parts


def types_of(schema: Any, root: dict[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows, by type, enum and const of all its parts."""
    types: set[str] = set()
    for part in parts_of(schema, root):
        named = part.get("type")
        types.update(json_type(t) for t in [named, *_list(named)] if isinstance(t, str))
        values = [*_list(part.get("enum")), *([part["const"]] if "const" in part else [])]
        types.update(_type_of(value) for value in values)
    return types - {""}


def property_types(schema: Any, name: str) -> set[str]:
    """Return the JSON types that an object's schema allows for one of its properties."""
    root = _object(schema)
    parts = parts_of(root, root)
    named = [part for part in parts if name in _object(part.get("properties"))]
    if named:
        return set().union(*(types_of(part["properties"][name], root) for part in named))
    return set().union(*(types_of(part.get("additionalProperties"), root) for part in parts))


def coerce(text: str, types: set[str]) -> Any:
    """Return the text converted to the first type that fits, else the text itself."""
    for name, read in _READERS if "string" in types else (*_READERS, ("null", _none)):
        if name in types:
            try:
                return read(text)
            except ValueError:
                continue
    return text


def to_json(value: Any) -> str:
    """Return the JSON text of a value. Raises ValueError for values that JSON cannot express or
    that are nested too deeply."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        return text
    except UnicodeEncodeError:  # a lone surrogate is legal as an escape, but not as text
        return json.dumps(value, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def from_json(text: str) -> Any:
    """Return the value of JSON text. Raises ValueError for values that `to_json` could not
    write."""
    try:
        value = json.loads(text, parse_float=lambda number: finite(float(number)))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    to_json(value)
    return value


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return list(islice(value, MAX_PARTS)) if isinstance(value, list) else []


def target(ref: Any, root: dict[str, Any]) -> Any:
    """Return the schema that a reference within `root` names; None if there is none.

    The fragment is a JSON Pointer or an anchor, percent-encoded as in any URI (RFC 6901, 6). Only
    the root's own $id may precede it.
    """
    if not isinstance(ref, str):
        return None
    document, _, fragment = ref.partition("#")
    if document and document != str(root.get("$id", "")).rstrip("#"):
        return None
    fragment = unquote(fragment)
    if fragment and not fragment.startswith("/"):
        return _anchored(fragment, root)
    part: Any = root
    for token in fragment.split("/", MAX_PARTS)[1:]:
        key = token.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and _INDEX.fullmatch(key):
            part = part[int(key)] if int(key) < len(part) else None
        else:
            part = _object(part).get(key)
    return part


def _anchored(name: str, root: dict[str, Any]) -> Any:
    """Return the part of a schema with an anchor, searching MAX_SEARCHED parts."""
    pending: list[Any] = [root]
    for _ in range(MAX_SEARCHED):
        if not pending:
            break
        part = pending.pop()
        if isinstance(part, dict):
            if part.get("$anchor") == name:
                return part
            pending += part.values()
        elif isinstance(part, list):
            pending += part
    return None


def _type_of(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", dict: "object", list: "array", type(None): "null"}
    return kinds.get(type(value), "number")


def _null(text: str) -> None:
    if text.strip().lower() != "null":
        raise ValueError(text)


def _none(text: str) -> None:
    """Read Python's None, which counts if no string is allowed."""
    if text.strip() != "None":
        raise ValueError(text)


def _integer(text: str) -> int:
    """Read an integer, also one with a fraction of zeros or an exponent."""
    try:
        value = Decimal(text.strip())
    except ArithmeticError:
        raise ValueError(text) from None
    if not value.is_finite() or value.adjusted() > MAX_DIGITS or value != value.to_integral_value():
        raise ValueError(text)
    return int(value)


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
        try:
            value = from_json(text)
        except ValueError:
            value = literal_value(text)  # as in {'a': True}
            to_json(value)
        if not isinstance(value, kind):
            raise ValueError(text)
        return value

    return read


_READERS: tuple[tuple[str, Any], ...] = (
    ("null", _null),
    ("integer", _integer),
    ("number", _number),
    ("boolean", _boolean),
    ("object", _json(dict)),
    ("array", _json(list)),
)
