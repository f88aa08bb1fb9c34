"""Recursive schemas that no finite value matches."""

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import RequestError
from lockstep.text.grammars.endless_schemas import check_finite, drop_endless
from lockstep.text.grammars.structured_output import schema_of
from lockstep.text.parsers.schema import target

SELF = {"$ref": "#"}
NODE = {"$ref": "#/$defs/N"}
INTEGER = {"type": "integer"}


def requiring(part: Any, **more: Any) -> dict[str, Any]:
    """Return the schema of an object with a required property."""
    return {"type": "object", "properties": {"a": part}, "required": ["a"], **more}


def node(schema: Any) -> dict[str, Any]:
    """Return definitions with a schema of the name N."""
    return {"$defs": {"N": schema}}


ENDLESS: list[tuple[dict[str, Any], str]] = [
    (requiring(SELF), "the root"),
    ({**requiring(SELF), "type": ["dict"]}, "the root"),
    (requiring({"anyOf": [SELF, SELF]}), "the root"),
    (requiring({"allOf": [INTEGER, SELF]}), "the root"),
    ({"type": "array", "items": SELF, "minItems": 1}, "the root"),
    ({"type": "array", "prefixItems": [INTEGER, SELF], "minItems": 2}, "the root"),
    ({"type": "array", "items": [INTEGER], "additionalItems": SELF, "minItems": 2}, "the root"),
    ({"type": "object", "additionalProperties": SELF, "minProperties": 1}, "the root"),
    ({"type": "object", "additionalProperties": SELF, "required": ["x"]}, "the root"),
    ({"properties": {"b": NODE}, **node(requiring(NODE))}, "$defs.N"),
    ({"anyOf": [INTEGER, NODE], **node(requiring({"oneOf": [NODE]}))}, "$defs.N"),
    (
        requiring(NODE, **{"$defs": {"N": requiring({"$ref": "#/$defs/M"}), "M": requiring(NODE)}}),
        "$defs.N",
    ),
    (requiring(requiring({"$ref": "#/properties/a"})), "properties.a"),
    (
        requiring(
            {"$ref": "#n"}, **{"$defs": {"N": requiring({"$ref": "#n"}, **{"$anchor": "n"})}}
        ),
        "n",
    ),
]
FINITE: list[Any] = [
    True,
    requiring({"anyOf": [SELF, {"type": "null"}]}),
    {"type": "object", "properties": {"a": SELF}},
    {"properties": {"a": SELF}, "required": ["a"]},
    {**requiring(SELF), "type": ["object", "null"]},
    {"type": "array", "items": SELF},
    {"type": "array", "prefixItems": [INTEGER, SELF], "minItems": 1},
    {"type": "object", "additionalProperties": SELF},
    requiring({"type": "array", "items": SELF}),
    requiring(INTEGER, **node(requiring(NODE))),
    requiring({"$ref": "#/$defs/missing"}),
    requiring({"$ref": "#/x"}, x={"type": "object", "properties": 5, "required": [[5], {}]}),
    {"$ref": "#/$ref", "type": "object"},
    {
        "type": "object",
        "patternProperties": {"x": {}},
        "additionalProperties": SELF,
        "required": ["x"],
    },
]


@pytest.mark.parametrize(("schema", "path"), ENDLESS)
def test_schema_without_a_finite_value_is_refused(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(RequestError, match="no finite value matches") as raised:
        schema_of(schema, "tools[0].parameters")
    assert f"tools[0].parameters: no finite value matches the part at {path} of" in str(
        raised.value
    )
    assert raised.value.field == "tools[0].parameters"


@pytest.mark.parametrize("schema", FINITE)
def test_schema_with_a_finite_value_is_allowed(schema: Any) -> None:
    check_finite(schema, "json")
    assert drop_endless(schema) is schema


@pytest.mark.parametrize(("schema", "path"), ENDLESS)
def test_tools_that_are_not_strict_lose_the_reference(schema: dict[str, Any], path: str) -> None:
    check_finite(schema_of(schema, "json", strict=False), "json")


def fits(part: Any, root: dict[str, Any], depth: int) -> bool:
    """Return whether a value that nests at most `depth` schemas matches. Only for SCHEMAS."""
    if not depth:
        return False
    if "$ref" in part:
        return fits(target(part["$ref"], root), root, depth - 1)
    if "anyOf" in part:
        return any(fits(case, root, depth - 1) for case in part["anyOf"])
    if part["type"] == "object":
        return all(fits(part["properties"][name], root, depth - 1) for name in part["required"])
    if part["type"] == "array":
        return part["minItems"] == 0 or fits(part["items"], root, depth - 1)
    return True


NAMES = "ABC"
SCHEMAS = st.recursive(
    st.sampled_from([INTEGER, *({"$ref": f"#/$defs/{name}"} for name in NAMES)]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=2).map(lambda cases: {"anyOf": cases}),
        inner.map(requiring),
        inner.map(lambda part: {"type": "object", "properties": {"a": part}, "required": []}),
        st.tuples(inner, st.integers(0, 1)).map(
            lambda pair: {"type": "array", "items": pair[0], "minItems": pair[1]}
        ),
    ),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(st.tuples(SCHEMAS, SCHEMAS, SCHEMAS))
def test_schemas_with_values_are_found(definitions: tuple[Any, ...]) -> None:
    """Whatever leads to whatever. A value of a used schema nests each definition at most once."""
    root: dict[str, Any] = {"$defs": dict(zip(NAMES, definitions, strict=True)), "anyOf": []}
    for name in NAMES:
        root["anyOf"] = [{"$ref": f"#/$defs/{name}"}]
        used = {name}
        while True:
            text = "".join(str(root["$defs"][one]) for one in used)
            more = {one for one in NAMES if f"#/$defs/{one}" in text}
            if more <= used:
                break
            used |= more
        try:
            check_finite(root, "json")
            is_finite = True
        except RequestError:
            is_finite = False
        # Parts of a definition are used as well: each of them must have a value.
        parts = [part for one in used for part in all_parts(root["$defs"][one])]
        assert is_finite == all(fits(part, root, 24) for part in parts)


def all_parts(part: Any) -> list[Any]:
    """Return a schema and those inside of it. Only for SCHEMAS."""
    inner = [*part.get("anyOf", ()), *part.get("properties", {}).values()]
    inner += [part["items"]] if "items" in part else []
    return [part, *(one for each in inner for one in all_parts(each))]


def test_search_takes_linear_time() -> None:
    """The largest schemas, with chains of references in the order that is slowest to resolve."""
    count = 450
    chain = {f"d{i}": requiring({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    chain[f"d{count}"] = {"type": "object"}
    wide = {f"p{i}": {"$ref": "#/$defs/d0"} for i in range(40)}
    root = {"$defs": chain, "type": "object", "properties": wide, "required": list(wide) * 20}
    begun = time.process_time()
    check_finite(root, "json")
    assert time.process_time() - begun < 0.5
