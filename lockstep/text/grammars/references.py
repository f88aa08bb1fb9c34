"""Normal form of JSON schemas for llguidance: references, types and unions.

References and types are resolved as the tool-call parsers do (parsers/schema.py), so that a grammar
allows what the parser reads as the same type. llguidance knows fewer forms.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.errors import RequestError
from lockstep.sampling_params import MAX_GRAMMAR_CHARACTERS
from lockstep.text.grammars.rewriting import DEFINITIONS, NOTES, rewrite
from lockstep.text.parsers.schema import json_type, target

Json = dict[str, Any]
PLAIN = re.compile(r"#/(\$defs|definitions)/[A-Za-z_][A-Za-z0-9_.-]*")
"""References that llguidance resolves from any part of a schema with the definitions."""
HOISTED = "$defs"
COMPANIONS = (*NOTES, HOISTED, "definitions", "$schema", "$id", "$anchor")
"""Keywords that a root may have in addition to a reference."""
UNIONS = ("oneOf", "anyOf")
MAX_CHAIN = 64
"""Maximum length of a chain of references."""
_NAME = r"(?:[^\\^$.|?*+()\[\]{}]|\\[^A-Za-z0-9])*"
NAME_LIST = re.compile(rf"\^(?:({_NAME})|\((?:\?:)?({_NAME}(?:\|{_NAME})*)\))\$")
"""Pattern that matches one text, or each of a list of texts, written without other operators."""
NAME = re.compile(rf"(?:^|\|)({_NAME})")
"""Text of a NAME_LIST, with its escapes."""
COUNTS = frozenset(("minProperties", "maxProperties"))
ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def normalize(schema: Any, field: str) -> Any:
    """Return an equivalent schema in the forms that llguidance reads. Raises RequestError.

    References point to definitions by plain names, types have JSON Schema's names, open objects say
    `true`, and unions whose cases have a tag require that tag. Patterns that list names become
    properties.
    """
    return _Canonical(schema, field).schema() if isinstance(schema, dict) else schema


class _Canonical:
    """Rewriter of one schema. It collects new definitions, each once."""

    def __init__(self, root: Json, field: str) -> None:
        self._root = root
        self._field = field
        self._num_copied_characters = 0
        self._names: dict[tuple[int, str], str] = {}
        self._definitions: Json = {}
        self._pending: list[tuple[str, Callable[[], Any]]] = []
        self._sources: Json = {}  # a new definition's reference -> the part that it is made of

    def schema(self) -> Json:
        """Return the whole schema."""
        schema: Json = self._rewrite(self._root)
        visited = 0
        while visited < len(self._pending):
            name, make = self._pending[visited]
            self._definitions[name] = make()
            visited += 1
        if self._definitions:
            schema = {**schema, HOISTED: {**(schema.get(HOISTED) or {}), **self._definitions}}
        return self._without_reference_at_root(schema)

    def _rewrite(self, part: Any) -> Any:
        return rewrite(part, self._change)

    def _change(self, node: Json) -> Json:
        """Rewrite one object whose parts are rewritten already."""
        changed = dict(node)
        if "$ref" in changed:
            changed["$ref"] = self._reference(changed["$ref"])
        if "type" in changed:
            changed = _with_types(changed)
        more = changed.get("additionalProperties")
        if isinstance(more, dict) and not set(more) - set(NOTES):
            changed["additionalProperties"] = True
        changed = self._with_listed_names(changed)
        for keyword in UNIONS:
            changed = self._tagged(changed, keyword)
        return changed

    def _reference(self, reference: Any) -> Any:
        """Return a reference in plain form; a dangling one is returned unchanged."""
        part = target(reference, self._root)
        plain = isinstance(reference, str) and PLAIN.fullmatch(reference)
        if plain or not isinstance(part, (dict, bool)):
            return reference
        return self._hoisted(part, "", lambda: self._rewrite(_without_definitions(part)))

    def _hoisted(self, part: Any, kind: str, make: Callable[[], Any]) -> str:
        """Return the reference of the definition made from this part, created once."""
        key = (id(part), kind)
        if key not in self._names:
            known = self._root.get(HOISTED)
            taken = {*(known if isinstance(known, dict) else ()), *self._names.values()}
            number = len(self._names)
            while f"ref{number}" in taken:
                number += 1
            self._names[key] = f"ref{number}"
            self._pending.append((f"ref{number}", make))
            self._sources[f"#/{HOISTED}/ref{number}"] = part
        return f"#/{HOISTED}/{self._names[key]}"

    def _with_listed_names(self, node: Json) -> Json:
        """Return an object's schema in which patterns that list names are properties.

        If all names of a pattern are declared, there or in a schema that is combined with this one,
        llguidance would allow a comma before a property of the pattern, and find no name for it.
        """
        patterns = node.get("patternProperties")
        properties = node.get("properties") or {}
        required = node.get("required") or []
        if not isinstance(patterns, dict) or not isinstance(properties, dict):
            return node
        if not isinstance(required, list):
            return node
        # A reference may lead to a part that is no schema, with names of any type.
        declared = {*properties, *(name for name in required if isinstance(name, str))}
        # llguidance counts properties only where none of the named ones is optional.
        is_counted = not COUNTS.isdisjoint(node)
        listed = {pattern: _names_of(pattern) for pattern in patterns}
        moved = {
            pattern: names
            for pattern, names in listed.items()
            if names and (names <= declared or not is_counted)
        }
        if not moved:
            return node
        schemas: dict[str, list[Any]] = {name: [part] for name, part in properties.items()}
        for pattern, names in moved.items():
            part = patterns[pattern]
            self._count_copies(part, len(names) - 1)
            for name in sorted(names):
                parts = schemas.setdefault(name, [])
                if part not in parts:
                    parts.append(part)
        merged = {
            n: parts[0] if len(parts) == 1 else {"allOf": parts} for n, parts in schemas.items()
        }
        remaining = {p: part for p, part in patterns.items() if p not in moved}
        rest = {key: value for key, value in node.items() if key != "patternProperties"}
        kept = {"patternProperties": remaining} if remaining else {}
        return {**rest, "properties": merged, **kept}

    def _count_copies(self, part: Any, num_copies: int) -> None:
        """Count the characters of a part's copies. Raises RequestError past the limit of a schema.

        Copies within copies multiply: three levels of 100 names have a million.
        """
        if not num_copies:
            return
        self._num_copied_characters += num_copies * len(json.dumps(part))
        if self._num_copied_characters > MAX_GRAMMAR_CHARACTERS:
            raise RequestError(
                f"{self._field}: patternProperties list too many names; allowed: at most "
                f"{MAX_GRAMMAR_CHARACTERS} characters with one schema for each name. List fewer.",
                self._field,
            )

    def _tagged(self, node: Json, keyword: str) -> Json:
        """Return a union whose cases require the tag that distinguishes them, if they have one.

        llguidance refuses oneOf whose cases may overlap. With a tag that has a default and is not
        required, they do. With the tag required, each value matches exactly one case.
        """
        cases = node.get(keyword)
        bases = [self._resolved(case) for case in cases] if isinstance(cases, list) else []
        if len(bases) < 2 or not all(isinstance(base, dict) for base in bases):
            return node
        for tag in self._tags(node, keyword, bases):
            values = [self._values(base, tag) for base in bases]
            flat = [value for some in values for value in some]
            rest = {k: v for k, v in node.items() if k not in (keyword, "discriminator")}
            if all(values) and len(flat) == len(set(flat)) and "anyOf" not in rest:
                return {**rest, "anyOf": [self._with_tag(base, tag) for base in bases]}
        return node

    def _tags(self, node: Json, keyword: str, bases: Sequence[Json]) -> list[str]:
        """Return names of properties that may distinguish the cases."""
        discriminator = node.get("discriminator")
        named = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        if isinstance(named, str):
            return [named]
        if keyword == "anyOf":  # its cases may overlap
            return []
        first = bases[0].get("properties")
        return [name for name in first if isinstance(name, str)] if isinstance(first, dict) else []

    def _resolved(self, case: Any) -> Any:
        """Return the schema of a case after following references."""
        for _ in range(MAX_CHAIN):
            if not isinstance(case, dict) or "$ref" not in case:
                return case
            reference = case["$ref"]
            if not isinstance(reference, str):
                break
            case = self._sources.get(reference) or target(reference, self._root)
        return None

    def _values(self, base: Json, tag: str) -> tuple[str, ...]:
        """Return the values that the tag may have in a case; empty if the case does not say."""
        properties = base.get("properties")
        schema = self._resolved(properties.get(tag)) if isinstance(properties, dict) else None
        if isinstance(schema, dict):
            named = [schema["const"]] if "const" in schema else schema.get("enum")
            if isinstance(named, list) and named and all(isinstance(v, str) for v in named):
                return tuple(named)
        return ()

    def _with_tag(self, base: Json, tag: str) -> Json:
        """Return a reference to a case that requires its tag."""
        required = base.get("required")
        names = required if isinstance(required, list) else []

        def make() -> Any:
            return {**self._rewrite(base), "required": list(dict.fromkeys([*names, tag]))}

        return {"$ref": self._hoisted(base, f"tag {tag}", make)}

    def _without_reference_at_root(self, root: Json) -> Json:
        """Inline a root that is only a reference, as pydantic's schemas are."""
        for _ in range(MAX_CHAIN):
            if "$ref" not in root or set(root) - {"$ref", *COMPANIONS}:
                break
            part = target(root["$ref"], root)
            if not isinstance(part, dict):
                break
            root = {**{k: v for k, v in root.items() if k != "$ref"}, **part}
        return root


def _with_types(node: Json) -> Json:
    """Return a schema whose types have JSON Schema's names."""
    named = node["type"]
    if isinstance(named, str):
        named = json_type(named)
    elif isinstance(named, list) and all(isinstance(name, str) for name in named):
        named = list(dict.fromkeys(map(json_type, named)))
        named = "" if "" in named else named
    return {**{k: v for k, v in node.items() if k != "type"}, **({"type": named} if named else {})}


def _names_of(pattern: str) -> set[str]:
    """Return the texts that a pattern matches if it is a list of texts, else none."""
    match = NAME_LIST.fullmatch(pattern)
    if match is None:
        return set()
    names = match[1] if match[2] is None else match[2]
    return {ESCAPE.sub(r"\1", name) for name in NAME.findall(names)}


def _without_definitions(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return {k: v for k, v in part.items() if k not in DEFINITIONS}
