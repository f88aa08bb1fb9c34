"""Forms of written tool calls, as parsers declare them for grammars.

Rules are text of llguidance's Lark. Raises RequestError, which names the tool, for what would not
be obeyed.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from lockstep.errors import RequestError
from lockstep.text.grammars.integer_bounds import with_bounded_integers

Json = dict[str, Any]
BLANK = r"[\s\x1c-\x1f]"
"""Regex of the characters that str.strip removes."""
ANY = r"/(.|\n)*/"
NAMED = ("$defs", "definitions")
"""Keywords under which a schema defines those that it refers to."""
UNKEYED = (
    "patternProperties", "minProperties", "maxProperties", "anyOf", "oneOf", "allOf", "$ref",
    "enum", "const",
)  # fmt: skip
"""Keywords of a tool's parameters that are not obeyed where a call writes them one by one."""
ESCAPES = '"\\bfnrt'
"""Characters that may come after a backslash in JSON."""
LARK = "x-lark"
"""Keyword of a schema: the Lark grammar that a text must match. It constrains a call only in
families that write texts without quotes."""
WHOLE = re.compile(r"\^\(\?:(.*)\)\$", re.DOTALL)
"""Pattern that a whole text matches."""
SPACING: Json = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as json.dumps writes it."""


@dataclass(frozen=True)
class Tool:
    """A tool that may be called: its schema, and where in the request that stands. strict: bounds
    of values that its calls cannot be held to are refused, not left out."""

    name: str
    schema: Json
    field: str
    strict: bool

    def refuse(self, keyword: str, place: str, why: str, remedy: str = "Leave it out.") -> NoReturn:
        """Raises RequestError for a keyword that would not be obeyed."""
        raise RequestError(
            f"{self.field}: the keyword {keyword!r} at {place} is not supported, since {why}. "
            f"{remedy}",
            self.field,
        )

    def properties(self) -> Iterator[tuple[str, Any, bool]]:
        """Name, schema and whether it must come, of each parameter, for calls that write them one
        by one. Where the schema names none there are none, and any may come: see is_open."""
        for keyword in UNKEYED:
            if keyword in self.schema:
                why = "this model's tool calls write parameters one by one"
                self.refuse(keyword, "the root", why)
        named: Json = self.schema.get("properties") or {}
        required = self.schema.get("required") or []
        more = self.schema.get("additionalProperties", True)
        unnamed = [key for key in required if key not in named]
        if unnamed and more is False:
            self.refuse("required", "the root", f"{unnamed[0][:60]!r} is no property", "Add it.")
        for key, schema in {**named, **dict.fromkeys(unnamed, {})}.items():
            if schema is False:
                why = "a parameter that never comes is none"
                self.refuse(key, "properties", why)
            yield key, schema, key in required

    @property
    def more(self) -> Any:
        """The schema of parameters that are not named, where any may come: see is_open."""
        more = self.schema.get("additionalProperties", True)
        return {} if more is True else more

    @property
    def is_open(self) -> bool:
        """Return whether parameters may come that the schema does not name: it names none."""
        named = self.schema.get("properties") or self.schema.get("required")
        return not named and self.schema.get("additionalProperties", True) is not False


class Rules:
    """The rules of one grammar, each body once.

    tokens: the tags that the model writes as one special token -> its id. Others are text.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._names: dict[str, str] = {}

    def rule(self, body: str) -> str:
        """The name of a rule with this body."""
        return self._names.setdefault(body, f"r{len(self._names)}")

    def terminal(self, body: str) -> str:
        """The name of a terminal with this body."""
        return self._names.setdefault(body, f"T{len(self._names)}")

    def parts(self, text: str) -> list[str]:
        """A text in Lark, cut at the tags that are tokens."""
        found = []
        for part in re.split(f"({alternatives(self._tokens)})", text) if self._tokens else [text]:
            if part in self._tokens:
                found.append(f"<[{self._tokens[part]}]>")
            elif part:
                found.append(literal(part))
        return found

    def text(self, text: str) -> str:
        """The same as one expression."""
        return " ".join(self.parts(text))

    def plain(self, *without: str) -> str:
        """A terminal of any text that matches none of these regexes as a whole."""
        body = " & ".join([ANY, *(f"~/{regex}/" for regex in without)])
        return self.terminal(body)

    def lark(self, source: str) -> str:
        """Return a rule that matches what a complete Lark grammar matches."""
        return self.rule(f"%lark {{\n{source}\n}}")

    def json(self, schema: Any, tool: Tool, **options: Any) -> str:
        """A rule of JSON of a part of the tool's schema."""
        spelled = dict(schema) if isinstance(schema, dict) else {}
        own = {name: tool.schema[name] for name in NAMED if name in tool.schema}
        options = {"json_allowed_escapes": escapes_of([own, spelled]), **SPACING, **options}
        limited = with_bounded_integers({**own, **spelled})
        written = json.dumps({**limited, "x-guidance": options})
        return self.rule(f"%json {written}")

    def arguments(self, tool: Tool) -> str:
        """A JSON object of the tool's parameters, without others than the schema names, unless it
        says so itself."""
        closed: Json = {"additionalProperties": False} if tool.schema.get("properties") else {}
        return self.json({**closed, **tool.schema, "type": "object"}, tool)

    def __len__(self) -> int:
        return len(self._names)

    def source(self, start: str) -> str:
        """The grammar."""
        lines = [f"{name}: {body}\n" for body, name in self._names.items()]
        return f"start: {start}\n{''.join(lines)}"


def escapes_of(schema: Any) -> str:
    """Return the escapes that JSON of a schema may hold, for llguidance.

    An escape by number is one of them only where the schema names a control character: it could
    spell a key that the schema names, of which llguidance then knows nothing.
    """
    text = json.dumps(schema, ensure_ascii=False)
    return ESCAPES + ("u" if "\\u00" in text or "\x7f" in text else "")


def literal(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text, ensure_ascii=False)


def sequence(*parts: str) -> str:
    """Return the expressions in a sequence, without empty ones."""
    return " ".join(filter(None, parts))


def either(parts: Iterable[str]) -> str:
    """Return the alternative of several expressions."""
    return f"({' | '.join(parts)})"


def alternatives(texts: Iterable[str]) -> str:
    """A regex of these texts, in Python and in Rust: all but letters and digits by their codes."""
    return "|".join("".join(map(_coded, text)) for text in texts)


def containing(texts: Iterable[str]) -> str:
    """Return the regex of a text that contains one of these."""
    return rf"(.|\n)*({alternatives(texts)})(.|\n)*"


def _coded(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\U{ord(char):08x}"
