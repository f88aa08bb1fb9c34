"""Checks of JSON schemas that clients send: bounded, and refused if a keyword is not enforced.

Unknown keywords are ignored, as JSON Schema says. The REFUSED keywords would change which values
are valid, and llguidance does not enforce them.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lockstep.errors import RequestError, brief
from lockstep.text.grammars.numbers import first_unsupported
from lockstep.text.grammars.rewriting import DEFINITIONS, LISTS, MAPS, NOTES, SINGLE, rewrite
from lockstep.text.parsers.schema import target

MAX_DEPTH = 64
"""Maximum nesting of objects and lists in a schema."""
MAX_REFERENCES = 500
"""Maximum references of a schema: a chain of them is followed by recursion."""
MAX_SEARCHED_PARTS = 64
"""Maximum parts of a schema that are compiled to locate a fault: up to 0.1 s each."""
MAX_TRIED_KEYWORDS = 16
"""Maximum keywords of the faulty part that are removed one by one to name the cause."""
REFUSED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired",
    "dependentSchemas", "dependencies", "propertyNames", "uniqueItems", "unevaluatedItems",
    "unevaluatedProperties", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "extends",
    "disallow", "divisibleBy", "nullable", "x-guidance",
)  # fmt: skip
"""Unsupported keywords of JSON Schema, OpenAPI and llguidance itself."""
FORMATS = frozenset(
    (
        "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname",
        "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template",
        "json-pointer", "relative-json-pointer", "regex",
    )
)  # fmt: skip
"""Formats that JSON Schema defines (2020-12, Validation, 7.3). Others restrict no value."""
UNSUPPORTED_FORMATS = (
    "idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference", "uri-template",
    "json-pointer", "relative-json-pointer", "regex",
)  # fmt: skip
"""Formats of JSON Schema that llguidance does not know."""
UNSUPPORTED_PATTERN = re.compile(r"\(\?<?[=!]|\\[1-9bBck]")
"""Look-around, back-references and other regex syntax that llguidance does not know."""
INEFFECTIVE: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "nullable": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (True, {})),
}
"""Keyword -> values that restrict nothing. Generators of OpenAPI and Zod write them."""
NEEDED = {"minContains": "contains", "maxContains": "contains", "then": "if", "else": "if"}
"""Keyword -> keyword without which it restricts nothing."""
UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
"""Keyword -> keyword with the same meaning where nothing else applies schemas to the value."""
APPLICATORS = (
    "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "contains",
)  # fmt: skip
"""Keywords that apply a schema to the value itself, or to any of its items."""
OVERLAP = (
    "a value may match several of its cases. Write anyOf, or give each case a property with a "
    "distinct const and require it"
)
Json = dict[str, Any]
LocatedSchema = tuple[str, Any]
"""Path of a schema within its root, and the schema."""


def check_depth(value: Any, field: str) -> None:
    """Raise RequestError if objects and lists are nested too deeply."""
    if is_deep(value):
        raise RequestError(
            f"{field} is nested in more than {MAX_DEPTH} levels; allowed: at most {MAX_DEPTH}. "
            "Flatten it.",
            field,
        )


def is_deep(value: Any) -> bool:
    """Return whether objects and lists are nested in more than MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [part for node in level for part in _parts(node)]
        if not level:
            return False
    return True


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list) else []


def schemas_in(schema: Any) -> Iterator[LocatedSchema]:
    """Yield a schema and its subschemas, outer ones first, each with its path."""
    pending: list[LocatedSchema] = [("", schema)]
    while pending:
        path, node = pending.pop()
        yield path, node
        if isinstance(node, dict):
            pending += [(f"{path}.{name}".lstrip("."), part) for name, part in subschemas(node)]


def subschemas(schema: Json) -> Iterator[LocatedSchema]:
    """Yield the schemas directly in a schema, each with its path there."""
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            yield from ((f"{key}.{name}", part) for name, part in value.items())
        elif key in (*LISTS, *SINGLE) and isinstance(value, list):
            yield from ((f"{key}[{index}]", part) for index, part in enumerate(value))
        elif key in SINGLE:
            yield key, value


def check_keywords(schema: Any, field: str) -> None:
    """Raise RequestError for a keyword that would change the answer and is not supported."""
    schemas = list(schemas_in(schema))
    references = sum(isinstance(node, dict) and "$ref" in node for _, node in schemas)
    if references > MAX_REFERENCES:
        raise RequestError(
            f"{field} has {references} references; allowed: at most {MAX_REFERENCES}. Inline "
            "some of them.",
            field,
        )
    for path, node in schemas:
        if isinstance(node, dict) and _is_circular(node, schema):
            raise RequestError(
                f"{field}: the keyword '$ref' at {path or 'the root'} of the schema leads back to "
                "itself. Point it at a schema.",
                field,
            )
        if not isinstance(node, (dict, bool)):
            raise RequestError(
                f"{field}: the schema at {path or 'its root'} is {brief(node)}; allowed: an object "
                "or a boolean. Send one of them.",
                field,
            )
        if isinstance(node, dict):
            _check_shapes(node, path or "the root", field)
        for keyword in REFUSED:
            if isinstance(node, dict) and keyword in node:
                raise RequestError(
                    f"{field}: the keyword {keyword!r} at {path or 'the root'} of the schema is "
                    "not supported, and would change the answer. Remove it, or express it "
                    "with other keywords.",
                    field,
                )


def _is_circular(schema: Json, root: Any) -> bool:
    """Return whether a reference leads only to other references, and so to no schema."""
    visited: set[int] = set()
    node: Any = schema
    while isinstance(node, dict) and "$ref" in node:
        if id(node) in visited:
            return True
        visited.add(id(node))
        node = target(node["$ref"], root if isinstance(root, dict) else {})
    return False


def _check_shapes(schema: Json, path: str, field: str) -> None:
    for keyword in (*MAPS, *LISTS, "required"):
        value = schema.get(keyword)
        fits = isinstance(value, dict) if keyword in MAPS else isinstance(value, list)
        if keyword == "required" and fits:
            fits = all(isinstance(name, str) for name in schema[keyword])
        if value is not None and not fits:
            due = "an object" if keyword in MAPS else "a list"
            raise RequestError(
                f"{field}: the keyword {keyword!r} at {path} of the schema is {brief(value)}; "
                f"allowed: {due}. Send {due}.",
                field,
            )


def locate(
    schemas: Iterable[Any], fault: str, fault_of: Callable[[Json], str | None]
) -> tuple[str, str] | None:
    """Return (place, reason) of the innermost schema that fails on its own; None if none is found.

    Its subschemas are left out. At most MAX_SEARCHED_PARTS are tried. A reference that the fault
    names is found by its name. If a single keyword causes the fault, the place names it.

    fault: compiler's message for the whole grammar.
    fault_of: compiles one part and returns its message, or None.
    """
    schemas = list(schemas)
    inner_first = [part for schema in schemas for part in reversed(list(schemas_in(schema)))]
    objects = [(path, node) for path, node in inner_first if isinstance(node, dict)]
    for path, node in objects[:MAX_SEARCHED_PARTS]:
        part = {key: node[key] for key in node if _is_self_contained(key, node[key])}
        reason = fault_of(part)
        if reason is not None:
            return _describe(_keyword_at_fault(part, fault_of), path), reason
    for path, node in objects[:MAX_SEARCHED_PARTS] if "oneOf" in fault else ():
        if "oneOf" in node:
            part = {**definitions_of(schemas), "oneOf": node["oneOf"]}
            if "oneOf" in (fault_of(part) or ""):
                return _describe("oneOf", path), OVERLAP
    for path, node in objects:
        reference = node.get("$ref")
        if isinstance(reference, str) and reference.strip("#") and reference.strip("#") in fault:
            return _describe("$ref", path), fault
    return None


def definitions_of(schemas: Iterable[Any]) -> Json:
    """Return the definitions at the roots of the schemas."""
    definitions: Json = {}
    for schema in schemas:
        for name in DEFINITIONS:
            part = schema.get(name) if isinstance(schema, dict) else None
            if isinstance(part, dict):
                definitions[name] = {**definitions.get(name, {}), **part}
    return definitions


def _describe(keyword: str | None, path: str) -> str:
    where = f"at {path or 'the root'} of the schema"
    return where if keyword is None else f"the keyword {keyword!r} {where}"


def _keyword_at_fault(part: Json, fault_of: Callable[[Json], str | None]) -> str | None:
    """Return the first keyword whose removal mends the part; `type` is tried last, as others need
    it."""
    keywords = sorted((key for key in part if key not in NOTES), key=lambda key: key == "type")
    for key in keywords[:MAX_TRIED_KEYWORDS]:
        if fault_of({other: part[other] for other in part if other != key}) is None:
            return key
    return None


def _is_self_contained(key: str, value: Any) -> bool:
    """Return whether a keyword can be compiled without subschemas and sibling keywords."""
    if key in ("$ref", "required", "minProperties", "maxProperties"):
        return False
    return not (key in (*MAPS, *LISTS, *SINGLE) and isinstance(value, (dict, list)))


def close_objects(schema: Any) -> Any:
    """Return the schema with additionalProperties forbidden in objects that name properties."""

    def change(node: Json) -> Json:
        names = "properties" in node or "patternProperties" in node
        return {"additionalProperties": False, **node} if names else node

    return rewrite(schema, change)


def drop_ineffective(schema: Any) -> Any:
    """Return the schema without keywords that restrict no value.

    These are formats that JSON Schema does not define, such as OpenAPI's int64, keywords with a
    value of INEFFECTIVE, and those that need another keyword.
    """

    def binds(node: Json, key: str, value: Any) -> bool:
        if key == "format":
            return not isinstance(value, str) or value in FORMATS
        if key in NEEDED and NEEDED[key] not in node:
            return False
        unbound = INEFFECTIVE.get(key, ())
        return not any(type(value) is type(other) and value == other for other in unbound)

    return rewrite(schema, lambda node: {k: v for k, v in node.items() if binds(node, k, v)})


def replace_unevaluated(schema: Any) -> Any:
    """Return the schema with the plain keywords for unevaluatedProperties and unevaluatedItems.

    They differ only where other keywords apply further schemas to the same value.
    """

    def change(node: Json) -> Json:
        if any(name in node for name in APPLICATORS) or isinstance(node.get("items"), list):
            return node
        replaced = {key: value for key, value in node.items() if key not in UNEVALUATED}
        for keyword in node:
            if keyword in UNEVALUATED:
                replaced.setdefault(UNEVALUATED[keyword], node[keyword])
        return replaced

    return rewrite(schema, change)


def drop_refused(schema: Any) -> Any:
    """Return the schema without keywords, or values of keywords, that are not supported."""

    def supported(key: str, value: Any) -> bool:
        if key == "pattern" and isinstance(value, str) and UNSUPPORTED_PATTERN.search(value):
            return False
        if key == "format" and value in UNSUPPORTED_FORMATS:
            return False
        return key not in REFUSED and first_unsupported(key, value) is None

    return rewrite(schema, lambda node: {k: v for k, v in node.items() if supported(k, v)})


def drop_annotations(schema: Any) -> Any:
    """Return the schema without annotations."""
    return rewrite(schema, lambda node: {k: v for k, v in node.items() if k not in NOTES})
