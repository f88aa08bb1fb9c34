"""Values that stand in a call as plain text, without quotes, for grammars of them.

The text of a value says by itself of which of its schema's types it is (schema.coerce). So a text
that reads as a number is none where the schema allows numbers too, and the number is written.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

from lockstep.text.parsers.schema import coerce, target, types_of
from lockstep.text.parsers.writing import (
    BLANK,
    LARK,
    WHOLE,
    Json,
    Rules,
    Tool,
    containing,
    either,
    literal,
)

BOUNDS = ("minLength", "maxLength", "pattern", "format")
"""Keywords for texts that the grammar does not obey."""
NUMBER_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
CHOICES = ("anyOf", "oneOf", "allOf", "$ref")
"""Keywords whose schemas say of which kind a value is."""
BESIDE = ("type", "enum", "const", *BOUNDS, *NUMBER_BOUNDS, "properties", "items", *CHOICES)
"""Keywords that say more than such a one."""
TYPED = {"type", "enum", "const"}
INTEGER = "/-?(0|[1-9][0-9]*)/"
NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/"
WRITTEN = {
    "null": '"null"',
    "boolean": '("true" | "false")',
    "integer": INTEGER,
    "number": NUMBER,
}
"""Regexes of values that have no parts."""
DIGITS = rf"({BLANK}|[+\-_.eE])*\d({BLANK}|[+\-_.eE\d])*"
LOOKS = {
    "null": rf"{BLANK}*(?i:null){BLANK}*",
    "boolean": rf"{BLANK}*(?i:true|false|0|1){BLANK}*",
    "integer": DIGITS,
    "number": DIGITS,
    "object": rf"{BLANK}*\{{(.|\n)*",
    "array": rf"{BLANK}*\[(.|\n)*",
}
"""Texts that would be read as another type, and perhaps some more."""


@dataclass(frozen=True)
class PlainValues:
    """The values of a tool's parameters. end: what is written behind each; marks: what ends one
    wherever it stands in a text."""

    tool: Tool
    rules: Rules
    end: str
    marks: Sequence[str]

    def value(self, key: str, schema: Any) -> str:
        """A parameter's value and its end, as one expression."""
        bound = self._bound_text(schema) if isinstance(schema, dict) else None
        if bound is not None:
            return bound
        types = types_of(schema, self.tool.schema)
        if types and "string" not in types and not self._is_open(schema):
            return f"{self.rules.json(schema, self.tool)} {literal(self.end)}"
        leaves = list(self._leaves(key, schema))
        texts = [leaf for leaf in leaves if _has(leaf, "string")]
        others = sorted(types - {"string"})
        found = self._options(key, leaves, types)
        if any(_options(leaf) is None for leaf in texts):
            found = [self.text([LOOKS[kind] for kind in others if kind in LOOKS])]
        for leaf in texts:
            self._bound(key, leaf, BOUNDS, "texts stand in this model's tool calls as they are")
        found += [self._other(key, leaves, kind) for kind in others if _plain(leaves, kind)]
        if not found:
            self.tool.refuse(
                "$ref", f"properties.{key}", "it leads to no schema", "Point it to a schema."
            )
        return either(found)

    def text(self, without: Sequence[str] = ()) -> str:
        """Any text, and the end of it, but for texts that match these regexes."""
        plain = self.rules.plain(containing(self.marks), *without)
        return self.rules.terminal(f"{plain} {literal(self.end)}")

    def _bound_text(self, schema: Json) -> str | None:
        """Return a text that matches its schema's grammar or pattern, and the end of it.

        None for a schema without a grammar, and for one that allows other values than texts.
        """
        if LARK in schema:
            return f"{self.rules.lark(schema[LARK])} {literal(self.end)}"
        pattern = WHOLE.fullmatch(str(schema.get("pattern")))
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
        waiting = [schema]
        visited: set[int] = set()
        while waiting:
            part = waiting.pop()
            if part is True:
                return True
            if not isinstance(part, dict) or id(part) in visited or TYPED & part.keys():
                continue
            visited.add(id(part))
            inner = [one for name in CHOICES[:-1] for one in part.get(name, ())]
            inner += [target(part["$ref"], self.tool.schema)] if "$ref" in part else []
            if not inner:
                return True
            waiting += inner
        return False

    def _leaves(self, key: str, schema: Any) -> Iterator[Json]:
        """The schemas of which a value matches one."""
        waiting = [schema]
        visited: set[int] = set()
        while waiting:
            part = waiting.pop(0)
            if not isinstance(part, dict) or id(part) in visited:
                yield from [{}] * (part is True)
                continue
            visited.add(id(part))
            choice = next((name for name in CHOICES if name in part), None)
            if choice is None:
                yield part
                continue
            why = "it stands beside another that chooses among texts and other values"
            self._refuse(key, part, [name for name in BESIDE if name != choice], why)
            if choice == "$ref":
                waiting.append(target(part["$ref"], self.tool.schema))
            elif choice == "allOf" and len(part["allOf"]) > 1:
                self._refuse(key, part, CHOICES, "it is of several schemas, and allows texts")
            else:
                waiting += part[choice]

    def _options(self, key: str, leaves: Sequence[Json], types: set[str]) -> list[str]:
        """The values that enums and consts name, and their end."""
        found = []
        for option in [option for leaf in leaves for option in _options(leaf) or ()]:
            written = option if isinstance(option, str) else json.dumps(option)
            read = coerce(written, types)
            same = read == option and isinstance(read, bool) == isinstance(option, bool)
            if not same or any(mark in written for mark in self.marks):
                why = f"the value {written[:60]!r} would be read as another"
                self.tool.refuse("enum", f"properties.{key}", why, "Leave that value out.")
            found.append(literal(written))
        if not found:
            return []
        return [self.rules.terminal(f"{either(found)} {literal(self.end)}")]

    def _other(self, key: str, leaves: Sequence[Json], kind: str) -> str:
        """Values of a type beside text, and their end."""
        own = [leaf for leaf in leaves if _has(leaf, kind) and _options(leaf) is None]
        if kind in WRITTEN:
            for leaf in own:
                self._bound(key, leaf, NUMBER_BOUNDS, "texts are allowed beside numbers")
            return self.rules.terminal(f"{WRITTEN[kind]} {literal(self.end)}")
        schema = {"anyOf": [{**leaf, "type": kind} for leaf in own]}
        return f"{self.rules.json(schema, self.tool)} {literal(self.end)}"

    def _bound(self, key: str, schema: Json, keywords: Sequence[str], why: str) -> None:
        """Raises RequestError where a strict tool has one of these bounds."""
        if self.tool.strict:
            self._refuse(key, schema, keywords, why)

    def _refuse(self, key: str, schema: Json, keywords: Sequence[str], why: str) -> None:
        """Raises RequestError where a schema has one of these keywords."""
        for keyword in keywords:
            if keyword in schema:
                self.tool.refuse(keyword, f"properties.{key}", why)


def _options(schema: Json) -> list[Any] | None:
    """The values of a const or an enum; None without one."""
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return found if isinstance(found, list) else None


def _has(schema: Json, kind: str) -> bool:
    """Return whether a schema allows values of a type."""
    named = schema.get("type")
    if _options(schema) is not None or named is None:
        return kind == "string"
    return kind in (named if isinstance(named, list) else [named])


def _plain(leaves: Sequence[Json], kind: str) -> bool:
    """Return whether values of a type are allowed that no enum lists."""
    return any(_has(leaf, kind) and _options(leaf) is None for leaf in leaves)
