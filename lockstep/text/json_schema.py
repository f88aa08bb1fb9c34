"""JSON schemas that clients send: bounded, and refused where a keyword would not be obeyed.

Unknown keywords mean nothing, as JSON Schema says. Those of REFUSED would change what is valid, and
llguidance does not hold answers to them.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lockstep.errors import RequestError, brief
from lockstep.text.numbers import unheld
from lockstep.text.parsers.schema import target
from lockstep.text.rewriting import LISTS, MAPS, NOTES, SINGLE, rewritten

MOST_DEPTH = 64
"""Levels of objects and lists in a schema."""
MOST_REFERENCES = 500
"""Of a schema: a chain of them is followed on the stack."""
MOST_SEARCHED = 64
"""Parts of a schema that are compiled by themselves to find a fault: 0.1 s each at most."""
MOST_TRIED = 16
"""Keywords of the part at fault that are left out in turn, to name the one."""
REFUSED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired",
    "dependentSchemas", "dependencies", "propertyNames", "uniqueItems", "unevaluatedItems",
    "unevaluatedProperties", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "extends",
    "disallow", "divisibleBy", "nullable", "x-guidance",
)  # fmt: skip
"""Keywords of JSON Schema, OpenAPI and llguidance itself that are not supported."""
FORMATS = frozenset(
    (
        "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname",
        "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template",
        "json-pointer", "relative-json-pointer", "regex",
    )
)  # fmt: skip
"""Those that JSON Schema (2020-12, Validation, 7.3) defines; others bind no value."""
UNHELD_FORMATS = (
    "idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference", "uri-template",
    "json-pointer", "relative-json-pointer", "regex",
)  # fmt: skip
"""Of these, what llguidance does not know."""
UNHELD_PATTERN = re.compile(r"\(\?<?[=!]|\\[1-9bBck]")
"""Look-around, back-references and other parts of regexes that llguidance does not know."""
ANY_NAME: tuple[Any, ...] = ({}, {"type": "string"})
"""What propertyNames may say and means nothing."""
OVERLAP = (
    "a value may match several of its cases. Write anyOf, or give each case a property with a "
    "const of its own and require it"
)
Json = dict[str, Any]
Place = tuple[str, Any]
"""Where a schema stands, and the schema."""


def check_depth(value: Any, field: str) -> None:
    """Raises RequestError where objects and lists are nested too deeply."""
    if is_deep(value):
        raise RequestError(
            f"{field} is nested in more than {MOST_DEPTH} levels; allowed: at most {MOST_DEPTH}. "
            "Flatten it.",
            field,
        )


def is_deep(value: Any) -> bool:
    """Whether objects and lists are nested in more than MOST_DEPTH levels."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        level = [part for one in level for part in _parts(one)]
        if not level:
            return False
    return True


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list) else []


def schemas_in(schema: Any) -> Iterator[Place]:
    """A schema and those inside of it, outer ones first, each with where it stands."""
    waiting: list[Place] = [("", schema)]
    while waiting:
        place, one = waiting.pop()
        yield place, one
        if isinstance(one, dict):
            waiting += [(f"{place}.{name}".lstrip("."), part) for name, part in _inner(one)]


def _inner(schema: Json) -> Iterator[tuple[str, Any]]:
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            yield from ((f"{key}.{name}", part) for name, part in value.items())
        elif key in (*LISTS, *SINGLE) and isinstance(value, list):
            yield from ((f"{key}[{index}]", part) for index, part in enumerate(value))
        elif key in SINGLE:
            yield key, value


def check_keywords(schema: Any, field: str) -> None:
    """Raises RequestError for a keyword that would change the answer and is not supported."""
    found = list(schemas_in(schema))
    references = sum(isinstance(one, dict) and "$ref" in one for _, one in found)
    if references > MOST_REFERENCES:
        raise RequestError(
            f"{field} has {references} references; allowed: at most {MOST_REFERENCES}. Write out "
            "what they stand for.",
            field,
        )
    for place, one in found:
        if isinstance(one, dict) and _leads_nowhere(one, schema):
            raise RequestError(
                f"{field}: the keyword '$ref' at {place or 'the root'} of the schema leads back to "
                "itself. Name a schema there.",
                field,
            )
        if not isinstance(one, (dict, bool)):
            raise RequestError(
                f"{field}: the schema at {place or 'its root'} is {brief(one)}; allowed: an object "
                "or a boolean. Write one of them there.",
                field,
            )
        if isinstance(one, dict):
            _check_shapes(one, place or "the root", field)
        for keyword in REFUSED:
            if isinstance(one, dict) and keyword in one:
                raise RequestError(
                    f"{field}: the keyword {keyword!r} at {place or 'the root'} of the schema is "
                    "not supported, and would change the answer. Leave it out, or say it "
                    "otherwise.",
                    field,
                )


def _leads_nowhere(schema: Json, root: Any) -> bool:
    """Whether a reference leads to others alone, and so to no schema."""
    visited: set[int] = set()
    one: Any = schema
    while isinstance(one, dict) and "$ref" in one:
        if id(one) in visited:
            return True
        visited.add(id(one))
        one = target(one["$ref"], root if isinstance(root, dict) else {})
    return False


def _check_shapes(schema: Json, place: str, field: str) -> None:
    for keyword in (*MAPS, *LISTS, "required"):
        value = schema.get(keyword)
        fits = isinstance(value, dict) if keyword in MAPS else isinstance(value, list)
        if keyword == "required" and fits:
            fits = all(isinstance(name, str) for name in schema[keyword])
        if value is not None and not fits:
            due = "an object" if keyword in MAPS else "a list"
            raise RequestError(
                f"{field}: the keyword {keyword!r} at {place} of the schema is {brief(value)}; "
                f"allowed: {due}. Send {due} there.",
                field,
            )


def locate(
    schemas: Iterable[Any], fault: str, fault_of: Callable[[Json], str | None]
) -> tuple[str, str] | None:
    """(where, why) of the innermost schema that fails without those inside of it, if any of the
    first MOST_SEARCHED does, or of the reference that the fault names. Where one keyword is at
    fault, it is named.

    fault: why all of them together cannot be compiled. fault_of: why one cannot be, or None.
    """
    schemas = list(schemas)
    inner_first = [part for schema in schemas for part in reversed(list(schemas_in(schema)))]
    objects = [(place, one) for place, one in inner_first if isinstance(one, dict)]
    for place, one in objects[:MOST_SEARCHED]:
        own = {key: one[key] for key in one if _stands_alone(key, one[key])}
        why = fault_of(own)
        if why is not None:
            return _named(_keyword_at_fault(own, fault_of), place), why
    for place, one in objects[:MOST_SEARCHED] if "oneOf" in fault else ():
        if "oneOf" in one:
            own = {**definitions_of(schemas), "oneOf": one["oneOf"]}
            if "oneOf" in (fault_of(own) or ""):
                return _named("oneOf", place), OVERLAP
    for place, one in objects:
        reference = one.get("$ref")
        if isinstance(reference, str) and reference.strip("#") and reference.strip("#") in fault:
            return _named("$ref", place), fault
    return None


def definitions_of(schemas: Iterable[Any]) -> Json:
    """Return the definitions that schemas bear at their roots."""
    found: Json = {}
    for schema in schemas:
        for name in ("$defs", "definitions"):
            part = schema.get(name) if isinstance(schema, dict) else None
            if isinstance(part, dict):
                found[name] = {**found.get(name, {}), **part}
    return found


def _named(keyword: str | None, place: str) -> str:
    where = f"at {place or 'the root'} of the schema"
    return where if keyword is None else f"the keyword {keyword!r} {where}"


def _keyword_at_fault(own: Json, fault_of: Callable[[Json], str | None]) -> str | None:
    """The first keyword without which nothing is wrong, the type last: others may need it."""
    others = sorted((key for key in own if key not in NOTES), key=lambda key: key == "type")
    for key in others[:MOST_TRIED]:
        if fault_of({other: own[other] for other in own if other != key}) is None:
            return key
    return None


def _stands_alone(key: str, value: Any) -> bool:
    """Whether a keyword can be judged without the schemas inside and beside its own."""
    if key in ("$ref", "required", "minProperties", "maxProperties"):
        return False
    return not (key in (*MAPS, *LISTS, *SINGLE) and isinstance(value, (dict, list)))


def closed(schema: Any) -> Any:
    """The schema, its objects without properties that they do not name."""

    def change(one: Json) -> Json:
        names = "properties" in one or "patternProperties" in one
        return {"additionalProperties": False, **one} if names else one

    return rewritten(schema, change)


def without_void(schema: Any) -> Any:
    """The schema without keywords that bind no value: formats that JSON Schema does not define, as
    OpenAPI's int64, and names of properties that may be any text, as zod writes them."""

    def binds(key: str, value: Any) -> bool:
        if key == "format":
            return not isinstance(value, str) or value in FORMATS
        return key != "propertyNames" or not (value is True or value in ANY_NAME)

    return rewritten(schema, lambda one: {k: v for k, v in one.items() if binds(k, v)})


def without_refused(schema: Any) -> Any:
    """The schema without keywords that are not supported, or whose value is not."""

    def held(key: str, value: Any) -> bool:
        if key == "pattern" and isinstance(value, str) and UNHELD_PATTERN.search(value):
            return False
        if key == "format" and value in UNHELD_FORMATS:
            return False
        return key not in REFUSED and unheld(key, value) is None

    return rewritten(schema, lambda one: {k: v for k, v in one.items() if held(k, v)})


def without_notes(schema: Any) -> Any:
    """The schema without what says nothing of which values are valid."""
    return rewritten(schema, lambda one: {k: v for k, v in one.items() if k not in NOTES})
