"""Builder of Lark rules for written tool calls; the parsers declare their syntax with it.

RequestErrors name the tool whose schema is not enforced.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from lockstep.errors import RequestError
from lockstep.text.grammars.exclusive_bounds import move_whole_bounds
from lockstep.text.grammars.integer_bounds import add_integer_bounds
from lockstep.text.grammars.rewriting import DEFINITIONS

Json = dict[str, Any]
BLANK = r"[\s\x1c-\x1f]"
"""Regex of the characters that str.strip removes."""
ANY = r"/(.|\n)*/"
UNSUPPORTED_PER_PARAMETER = (
    "patternProperties", "minProperties", "maxProperties", "anyOf", "oneOf", "allOf", "$ref",
    "enum", "const",
)  # fmt: skip
"""Keywords of a tool's parameters that are not enforced if a call writes parameters one by one."""
ESCAPES = '"\\bfnrt'
"""Characters that may follow a backslash in JSON."""
LARK = "x-lark"
"""Schema keyword: Lark grammar that a text must match. It constrains calls only in families that
write strings without quotes."""
ANCHORED = re.compile(r"\^\(\?:(.*)\)\$", re.DOTALL)
"""Pattern that is anchored at both ends."""
SPACING: Json = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON separators of json.dumps."""


@dataclass(frozen=True)
class Tool:
    """Tool that may be called.

    field: place of its schema in the request, for messages.
    strict: refuse bounds of values that are not enforced instead of dropping them.
    """

    name: str
    schema: Json
    field: str
    strict: bool

    def refuse(self, keyword: str, location: str, why: str, remedy: str = "Remove it.") -> NoReturn:
        """Raise RequestError for a keyword that is not enforced."""
        raise RequestError(
            f"{self.field}: the keyword {keyword!r} at {location} is not supported, since {why}. "
            f"{remedy}",
            self.field,
        )

    def properties(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield (name, schema, is required) of each parameter, for calls that write them one by
        one.

        If the schema names no parameter, none is yielded and any may be written: see is_open.
        """
        for keyword in UNSUPPORTED_PER_PARAMETER:
            if keyword in self.schema:
                why = "this model's tool calls write parameters one by one"
                self.refuse(keyword, "the root", why)
        named: Json = self.schema.get("properties") or {}
        required = self.schema.get("required") or []
        more = self.schema.get("additionalProperties", True)
        undeclared = [key for key in required if key not in named]
        if undeclared and more is False:
            self.refuse("required", "the root", f"{undeclared[0][:60]!r} is no property", "Add it.")
        for key, schema in {**named, **dict.fromkeys(undeclared, {})}.items():
            if schema is False:
                why = "its schema is false, which no value matches"
                self.refuse(key, "properties", why)
            yield key, schema, key in required

    @property
    def more(self) -> Any:
        """Return the schema of undeclared parameters, if any may be written: see is_open."""
        more = self.schema.get("additionalProperties", True)
        return {} if more is True else more

    @property
    def is_open(self) -> bool:
        """Return whether undeclared parameters are allowed because the schema declares none."""
        named = self.schema.get("properties") or self.schema.get("required")
        return not named and self.schema.get("additionalProperties", True) is not False


class Rules:
    """Rules of one grammar; equal bodies share a rule.

    tokens: tags that are one special token of the model -> token id. Other tags are text.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._names: dict[str, str] = {}

    def rule(self, body: str) -> str:
        """Return the name of the rule with this body."""
        return self._names.setdefault(body, f"r{len(self._names)}")

    def terminal(self, body: str) -> str:
        """Return the name of the terminal with this body."""
        return self._names.setdefault(body, f"T{len(self._names)}")

    def parts(self, text: str) -> list[str]:
        """Return a text as Lark literals, split at the tags that are tokens."""
        expressions = []
        for part in re.split(f"({alternatives(self._tokens)})", text) if self._tokens else [text]:
            if part in self._tokens:
                expressions.append(f"<[{self._tokens[part]}]>")
            elif part:
                expressions.append(literal(part))
        return expressions

    def text(self, text: str) -> str:
        """Return a text as one Lark expression."""
        return " ".join(self.parts(text))

    def plain(self, *excluded: str) -> str:
        """Return a terminal of any text that matches none of these regexes entirely."""
        body = " & ".join([ANY, *(f"~/{regex}/" for regex in excluded)])
        return self.terminal(body)

    def lark(self, source: str) -> str:
        """Return a rule that matches what a complete Lark grammar matches."""
        return self.rule(f"%lark {{\n{source}\n}}")

    def json(self, schema: Any, tool: Tool, **options: Any) -> str:
        """Return a rule of JSON that matches a part of the tool's schema."""
        part = dict(schema) if isinstance(schema, dict) else {}
        definitions = {name: tool.schema[name] for name in DEFINITIONS if name in tool.schema}
        options = {"json_allowed_escapes": escapes_of([definitions, part]), **SPACING, **options}
        limited = add_integer_bounds(move_whole_bounds({**definitions, **part}))
        written = json.dumps({**limited, "x-guidance": options})
        return self.rule(f"%json {written}")

    def arguments(self, tool: Tool) -> str:
        """Return a rule of a JSON object of the tool's parameters.

        Undeclared parameters are forbidden unless the schema allows them.
        """
        close_objects: Json = (
            {"additionalProperties": False} if tool.schema.get("properties") else {}
        )
        return self.json({**close_objects, **tool.schema, "type": "object"}, tool)

    def __len__(self) -> int:
        return len(self._names)

    def source(self, start: str) -> str:
        """Return the Lark source of the grammar."""
        lines = [f"{name}: {body}\n" for body, name in self._names.items()]
        return f"start: {start}\n{''.join(lines)}"


def escapes_of(schema: Any) -> str:
    """Return the escapes that JSON of a schema may contain, for llguidance.

    \\u escapes are allowed only if the schema contains a control character: such an escape could
    spell a key of the schema, which llguidance would not recognise.
    """
    text = json.dumps(schema, ensure_ascii=False)
    return ESCAPES + ("u" if "\\u00" in text or "\x7f" in text else "")


def literal(text: str) -> str:
    """Return a text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def sequence(*parts: str) -> str:
    """Return the sequence of the expressions; empty ones are dropped."""
    return " ".join(filter(None, parts))


def either(parts: Iterable[str]) -> str:
    """Return the alternation of the expressions."""
    return f"({' | '.join(parts)})"


def alternatives(texts: Iterable[str]) -> str:
    """Return a regex of these texts for Python and Rust; all but letters and digits become code
    points."""
    return "|".join("".join(map(_escape, text)) for text in texts)


def containing(texts: Iterable[str]) -> str:
    """Return the regex of a text that contains one of these."""
    return rf"(.|\n)*({alternatives(texts)})(.|\n)*"


def _escape(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\U{ord(char):08x}"
