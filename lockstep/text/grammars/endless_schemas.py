"""Search for recursive JSON schemas that no finite value matches.

An example is an object that requires a property of its schema: no answer could complete it.
A requirement of a schema lists schemas of which at least one must have a finite value. A schema has
a finite value if all of its requirements are met. The search takes a time linear in the schema, and
walks through it once more for each anchor that a reference names.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from lockstep.errors import RequestError
from lockstep.text.grammars.json_schema import subschemas
from lockstep.text.grammars.rewriting import DEFINITIONS, rewrite
from lockstep.text.parsers.schema import json_type, target

Json = dict[str, Any]


def check_finite(schema: Any, field: str) -> None:
    """Raise RequestError for a schema, or a used part of it, without a finite value."""
    path = _Search(schema).endless_path() if isinstance(schema, dict) else None
    if path is not None:
        raise RequestError(
            f"{field}: no finite value matches the part at {path or 'the root'} of the schema, "
            "since what it requires leads back to it. Make that optional, or allow null.",
            field,
        )


def drop_endless(schema: Any) -> Any:
    """Return the schema without references to parts that have no finite value."""
    endless = _Search(schema).endless_references() if isinstance(schema, dict) else set()
    if not endless:
        return schema

    def change(node: Json) -> Json:
        reference = node.get("$ref")
        if not isinstance(reference, str) or reference not in endless:
            return node
        return {key: value for key, value in node.items() if key != "$ref"}

    return rewrite(schema, change)


class _Search:
    """Schemas that are used by a root, by their identity, and those that have a finite value."""

    def __init__(self, root: Json) -> None:
        self._root = root
        # A schema -> the schema that uses it, and its name there; a reference starts a new path.
        self._origins: dict[int, tuple[int | None, str]] = {id(root): (None, "")}
        self._requirements: dict[int, list[list[int]]] = {}
        self._targets: dict[str, Any] = {}
        pending = [root]
        while pending:
            node = pending.pop()
            for name, part in self._used(node):
                if id(part) not in self._origins:
                    is_reference = name == node.get("$ref")
                    self._origins[id(part)] = (None if is_reference else id(node), name)
                    pending.append(part)
            self._requirements[id(node)] = [
                [*map(id, parts)] for parts in self._required(node) if all(map(_is_object, parts))
            ]
        self._finite = self._with_finite_value()

    def endless_path(self) -> str | None:
        """Return the path of a schema that requires itself; None if there is none."""
        node = next((key for key in self._origins if key not in self._finite), None)
        visited: set[int] = set()
        while node is not None and node not in visited:
            visited.add(node)
            # A schema without a finite value has a requirement that no schema meets.
            node = next(
                parts[0]
                for parts in self._requirements[node]
                if not any(part in self._finite for part in parts)
            )
        return None if node is None else self._path(node)

    def _path(self, node: int) -> str:
        """Return the path of a schema from the root or from the reference that leads to it."""
        names: list[str] = []
        origin: int | None = node
        while origin is not None:
            origin, name = self._origins[origin]
            names.append(name)
        first = names.pop().strip("#/").replace("/", ".")
        return ".".join(filter(None, [first, *reversed(names)]))

    def endless_references(self) -> set[str]:
        """Return the references to schemas without a finite value."""
        return {
            reference
            for reference, part in self._targets.items()
            if isinstance(part, dict) and id(part) not in self._finite
        }

    def _used(self, node: Json) -> Iterator[tuple[str, Json]]:
        """Yield the schemas that a schema uses, each with its name or reference."""
        used = {key: value for key, value in node.items() if key not in DEFINITIONS}
        parts = [*subschemas(used)]
        if isinstance(node.get("$ref"), str):
            parts.append((node["$ref"], self._target(node)))
        yield from ((name, part) for name, part in parts if isinstance(part, dict))

    def _target(self, node: Json) -> Any:
        """Return the schema that a reference names; each is searched for once."""
        reference = node["$ref"]
        if not isinstance(reference, str):
            return None
        if reference not in self._targets:
            self._targets[reference] = target(reference, self._root)
        return self._targets[reference]

    def _required(self, node: Json) -> Iterator[list[Any]]:
        """Yield the requirements of a schema."""
        if "$ref" in node:
            yield [self._target(node)]
        yield from ([part] for part in _list(node.get("allOf")))
        yield from (cases for key in ("anyOf", "oneOf") if (cases := _list(node.get(key))))
        named = node.get("type")
        named = named[0] if isinstance(named, list) and len(named) == 1 else named
        kind = json_type(named) if isinstance(named, str) else ""
        if kind == "object":
            yield from _properties(node)
        elif kind == "array":
            yield from _items(node)

    def _with_finite_value(self) -> set[int]:
        """Return the schemas that have a finite value."""
        users: dict[int, list[tuple[int, int]]] = defaultdict(list)
        num_unmet: dict[int, int] = {}
        for key, requirements in self._requirements.items():
            num_unmet[key] = len(requirements)
            for number, parts in enumerate(requirements):
                for part in parts:
                    users[part].append((key, number))
        met: set[tuple[int, int]] = set()
        pending = [key for key, count in num_unmet.items() if not count]
        finite = set(pending)
        while pending:
            for requirement in users[pending.pop()]:
                if requirement in met:
                    continue
                met.add(requirement)
                key = requirement[0]
                num_unmet[key] -= 1
                if not num_unmet[key]:
                    finite.add(key)
                    pending.append(key)
        return finite


def _properties(node: Json) -> Iterator[list[Any]]:
    """Yield the schemas of the properties that an object must have."""
    properties = node.get("properties")
    known = properties if isinstance(properties, dict) else {}
    additional = None if node.get("patternProperties") else node.get("additionalProperties")
    # A reference may lead to a part that is no schema, with names of any type.
    names = (name for name in _list(node.get("required")) if isinstance(name, str))
    yield from ([known.get(name, additional)] for name in names)
    minimum = node.get("minProperties")
    if isinstance(minimum, int) and minimum > 0 and not known:
        yield [additional]


def _items(node: Json) -> Iterator[list[Any]]:
    """Yield the schemas of the items that an array must have."""
    minimum = node.get("minItems")
    if not isinstance(minimum, int) or minimum < 1:
        return
    items = node.get("items")
    first = _list(items) or _list(node.get("prefixItems"))
    yield from ([part] for part in first[:minimum])
    if minimum > len(first):
        yield [node.get("additionalItems") if isinstance(items, list) else items]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)
