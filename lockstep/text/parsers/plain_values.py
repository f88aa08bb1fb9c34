"""Grammars of values that are written in a call as plain text, without quotes.

The text of a value itself decides its type among those of its schema (schema.coerce). If the schema
allows both strings and numbers, text that reads as a number is therefore a number.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

from lockstep.text.grammars.lark import (
    ANCHORED,
    BLANK,
    LARK,
    Json,
    Rules,
    Tool,
    containing,
    either,
    literal,
)
from lockstep.text.parsers.schema import coerce, target, types_of

BOUNDS = ("minLength", "maxLength", "pattern", "format")
"""Keywords of strings that the grammar does not enforce."""
NUMBER_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
CHOICES = ("anyOf", "oneOf", "allOf", "$ref")
"""Keywords whose subschemas decide the type of a value."""
CONSTRAINTS = ("type", "enum", "const", *BOUNDS, *NUMBER_BOUNDS, "properties", "items", *CHOICES)
"""Keywords that constrain a value in addition to one of CHOICES."""
TYPED = {"type", "enum", "const"}
INTEGER = "/-?(0|[1-9][0-9]*)/"
NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/"
SCALARS = {
    "null": '"null"',
    "boolean": '("true" | "false")',
    "integer": INTEGER,
    "number": NUMBER,
}
"""Lark terminals of values without parts."""
DIGITS = rf"({BLANK}|[+\-_.eE])*\d({BLANK}|[+\-_.eE\d])*"
AMBIGUOUS = {
    "null": rf"{BLANK}*(?i:null){BLANK}*",
    "boolean": rf"{BLANK}*(?i:true|false|0|1){BLANK}*",
    "integer": DIGITS,
    "number": DIGITS,
    "object": rf"{BLANK}*\{{(.|\n)*",
    "array": rf"{BLANK}*\[(.|\n)*",
}
"""Regexes of texts that would be read as another type, and possibly of more texts."""


@dataclass(frozen=True)
class PlainValues:
    """Grammars of the values of a tool's parameters.

    end: text after each value.
    marks: texts that end a value wherever they occur in it.
    """

    tool: Tool
    rules: Rules
    end: str
    marks: Sequence[str]

    def value(self, key: str, schema: Any) -> str:
        """Return the expression of a parameter's value with its end."""
        bounded_text = self._constrained_text(schema) if isinstance(schema, dict) else None
        if bounded_text is not None:
            return bounded_text
        types = types_of(schema, self.tool.schema)
        if types and "string" not in types and not self._is_open(schema):
            return f"{self.rules.json(schema, self.tool)} {literal(self.end)}"
        leaves = list(self._leaves(key, schema))
        texts = [leaf for leaf in leaves if _allows(leaf, "string")]
        other_types = sorted(types - {"string"})
        choices = self._options(key, leaves, types)
        if any(_options(leaf) is None for leaf in texts):
            choices = [self.text([AMBIGUOUS[kind] for kind in other_types if kind in AMBIGUOUS])]
        for leaf in texts:
            self._check_strict(
                key, leaf, BOUNDS, "this model's tool calls write texts without quotes"
            )
        choices += [
            self._other_type(key, leaves, kind) for kind in other_types if _is_free(leaves, kind)
        ]
        if not choices:
            self.tool.refuse("$ref", f"properties.{key}", "it leads to no schema", "Correct it.")
        return either(choices)

    def text(self, excluded: Sequence[str] = ()) -> str:
        """Return a terminal of any text with its end, except texts that match these regexes."""
        plain = self.rules.plain(containing(self.marks), *excluded)
        return self.rules.terminal(f"{plain} {literal(self.end)}")

    def _constrained_text(self, schema: Json) -> str | None:
        """Return a text that matches its schema's grammar or pattern, with its end.

        None for a schema without a grammar or pattern, and for one that allows other values than
        texts.
        """
        if LARK in schema:
            return f"{self.rules.lark(schema[LARK])} {literal(self.end)}"
        pattern = ANCHORED.fullmatch(str(schema.get("pattern")))
        if pattern is None or schema.keys() - {"type", "pattern", "description", "title"}:
            return None
        if schema.get("type") != "string":
            return None
        regex = self.rules.terminal(f"/{regex_to_lark(pattern[1], use_ascii='')}/")
        plain = self.rules.plain(containing(self.marks))
        both = self.rules.terminal(f"{plain} & {regex}")
        return self.rules.terminal(f"{both} {literal(self.end)}")

    def _is_open(self, schema: Any) -> bool:
        """Return whether one of the schemas that a value may match has no type."""
        pending = [schema]
        visited: set[int] = set()
        while pending:
            part = pending.pop()
            if part is True:
                return True
            if not isinstance(part, dict) or id(part) in visited or TYPED & part.keys():
                continue
            visited.add(id(part))
            inner = [option for name in CHOICES[:-1] for option in part.get(name, ())]
            inner += [target(part["$ref"], self.tool.schema)] if "$ref" in part else []
            if not inner:
                return True
            pending += inner
        return False

    def _leaves(self, key: str, schema: Any) -> Iterator[Json]:
        """Yield the schemas one of which a value matches."""
        pending = [schema]
        visited: set[int] = set()
        while pending:
            part = pending.pop(0)
            if not isinstance(part, dict) or id(part) in visited:
                yield from [{}] * (part is True)
                continue
            visited.add(id(part))
            choice = next((name for name in CHOICES if name in part), None)
            if choice is None:
                yield part
                continue
            why = "it is combined with a choice among texts and other values"
            self._refuse(key, part, [name for name in CONSTRAINTS if name != choice], why)
            if choice == "$ref":
                pending.append(target(part["$ref"], self.tool.schema))
            elif choice == "allOf" and len(part["allOf"]) > 1:
                self._refuse(key, part, CHOICES, "it has several schemas, and allows texts")
            else:
                pending += part[choice]

    def _options(self, key: str, leaves: Sequence[Json], types: set[str]) -> list[str]:
        """Return terminals of the values that enums and consts list, with their end."""
        literals = []
        for option in [option for leaf in leaves for option in _options(leaf) or ()]:
            written = option if isinstance(option, str) else json.dumps(option)
            read = coerce(written, types)
            same = read == option and isinstance(read, bool) == isinstance(option, bool)
            if not same or any(mark in written for mark in self.marks):
                why = f"the value {written[:60]!r} would be read as another"
                self.tool.refuse("enum", f"properties.{key}", why, "Remove that value.")
            literals.append(literal(written))
        if not literals:
            return []
        return [self.rules.terminal(f"{either(literals)} {literal(self.end)}")]

    def _other_type(self, key: str, leaves: Sequence[Json], kind: str) -> str:
        """Return values of a type other than string, with their end."""
        typed_leaves = [leaf for leaf in leaves if _allows(leaf, kind) and _options(leaf) is None]
        if kind in SCALARS:
            for leaf in typed_leaves:
                self._check_strict(key, leaf, NUMBER_BOUNDS, "texts are allowed as well as numbers")
            return self.rules.terminal(f"{SCALARS[kind]} {literal(self.end)}")
        schema = {"anyOf": [{**leaf, "type": kind} for leaf in typed_leaves]}
        return f"{self.rules.json(schema, self.tool)} {literal(self.end)}"

    def _check_strict(self, key: str, schema: Json, keywords: Sequence[str], why: str) -> None:
        """Raise RequestError if a strict tool has one of these keywords."""
        if self.tool.strict:
            self._refuse(key, schema, keywords, why)

    def _refuse(self, key: str, schema: Json, keywords: Sequence[str], why: str) -> None:
        """Raise RequestError if a schema has one of these keywords."""
        for keyword in keywords:
            if keyword in schema:
                self.tool.refuse(keyword, f"properties.{key}", why)


def _options(schema: Json) -> list[Any] | None:
    """Return the values of a const or an enum; None without one."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _allows(schema: Json, kind: str) -> bool:
    """Return whether a schema allows values of a type."""
    named = schema.get("type")
    if _options(schema) is not None or named is None:
        return kind == "string"
    return kind in (named if isinstance(named, list) else [named])


def _is_free(leaves: Sequence[Json], kind: str) -> bool:
    """Return whether values of a type are allowed that no enum lists."""
    return any(_allows(leaf, kind) and _options(leaf) is None for leaf in leaves)
