"""Tool calls of Llama 3.2 and 4 in Python: the answer is [name(key=value, ...), ...]."""

import re
from typing import Any

from lockstep.text.grammars.lark import Rules, Tool, either, literal, sequence
from lockstep.text.parsers.call_parser import CallParser
from lockstep.text.parsers.json_reader import END, FAULT, MAX_DEPTH
from lockstep.text.parsers.literals import literal_value
from lockstep.text.parsers.schema import to_json
from lockstep.text.scan import Markers, Taken

_OPENERS = {"tag": "<|python_start|>"}
_CLOSING_TAGS = {"end": "<|python_end|>"}
_NAME = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)
_NAME_SO_FAR = re.compile(r"[\s,]*([A-Za-z_][\w.]*\s*)?", re.ASCII)
_KEY = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_KEY_SO_FAR = re.compile(r"\s*([A-Za-z_]\w*\s*)?", re.ASCII)
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
MAX_NAME_CHARACTERS = 512
"""Maximum characters of a name or a key, with surrounding blanks."""
_BOOLEAN = '("True" | "False")'
_QUOTED = r"""/'([^'\\\x00-\x1f]|\\['"\\bfnrt])*'/"""
"""String as Python prints it."""


class PythonValue:
    """Reader of a literal up to the comma or parenthesis after it, which becomes its `closer`."""

    def __init__(self) -> None:
        self.fault = ""
        self.closer = ""
        self.value = ""  # JSON text of the complete value
        self._kept: list[str] = []
        self._quote = ""
        self._escaped = False
        self._closers: list[str] = []

    def take(self, text: str, start: int = 0) -> Taken:
        """Return END and the index after the closer, FAULT, or None if more text is needed."""
        for at in range(start, len(text)):
            if self._ends(text[at]):
                return Taken("", FAULT if self.fault else END, at + (not self.fault))
        return Taken("", None, len(text))

    def flush(self) -> str:
        """Return no text: an incomplete value is dropped."""
        return ""

    def _ends(self, char: str) -> bool:
        """Read one character; return whether the value is complete or malformed."""
        if self._quote:
            self._in_text(char)
        elif not self._closers and char in ",)":
            self.closer = char
            self._read()
            return True
        else:
            self._outside_text(char)
        return bool(self.fault)

    def _in_text(self, char: str) -> None:
        self._kept.append("\\n" if char == "\n" and not self._escaped else char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = ""

    def _outside_text(self, char: str) -> None:
        self._kept.append(char)
        if char in "'\"":
            self._quote = char
        elif char in _CLOSERS:
            self._closers.append(_CLOSERS[char])
            if len(self._closers) > MAX_DEPTH:
                self.fault = f"more than {MAX_DEPTH} levels"
        elif char in _CLOSERS.values():
            if not self._closers or self._closers.pop() != char:
                self.fault = f"{char!r} in a value"

    def _read(self) -> None:
        try:
            self.value = to_json(literal_value("".join(self._kept)))
        except ValueError:
            self.fault = "a value that is not a literal"


class PythonicParser(CallParser):
    """Parser of a Python list of calls; keyword arguments are emitted one by one, once complete."""

    SIGNS = ("func_name1(params_name1=",)
    OPENERS = _OPENERS
    CLOSERS = _CLOSING_TAGS
    MARKERS = {
        "start": Markers({"list": "[", **_OPENERS}),
        "content": Markers(_OPENERS),
        "broken": Markers({**_OPENERS, **_CLOSING_TAGS}),
        "tagged": Markers({"list": "[", **_OPENERS, **_CLOSING_TAGS}),
        "name": Markers({"open": "(", "close": "]", **_OPENERS, **_CLOSING_TAGS}),
        "key": Markers({"equals": "=", "close": ")", **_OPENERS, **_CLOSING_TAGS}),
        "after": Markers({**_OPENERS, **_CLOSING_TAGS}),
    }
    FIRST = "start"
    AFTER = "after"
    OUTSIDE = ("start", "content", "broken")
    AROUND = ("[", "]")
    BETWEEN = ", "
    BARE = "["

    @classmethod
    def head(cls, name: str) -> str:
        """Return the name and the parenthesis."""
        return f"{name}("

    @classmethod
    def call(cls, tool: Tool, rules: Rules) -> str:
        """Return the call: required parameters must be written, others may, in the schema's
        order."""
        # Built from the last parameter backwards: the rest without and with a parameter before it.
        first = ""
        later = ""
        for key, schema, required in reversed(list(tool.properties())):
            if not _KEY.fullmatch(key) or len(key) > MAX_NAME_CHARACTERS:
                why = "no parameter of this name can be written in this model's tool calls"
                tool.refuse(key, "properties", why, "Rename it.")
            argument = sequence(literal(f"{key}="), _value_rule(schema, tool, rules))
            leading = sequence(argument, later)
            following = sequence(literal(", "), argument, later)
            first = rules.rule(leading if required else either([leading, first or '""']))
            later = rules.rule(following if required else either([following, later or '""']))
        if tool.is_open:
            one = sequence("/[A-Za-z_][A-Za-z0-9_]{0,63}=/", _value_rule(tool.more, tool, rules))
            first = f"({one} ({literal(', ')} {one})*)?"
        return sequence(rules.text(cls.head(tool.name)), first, literal(")"))

    def __init__(self, tools: Any) -> None:
        super().__init__(tools)
        self._text: list[str] = []  # of a name or a key
        self._keys: set[str] = set()  # of the call's arguments

    def _bare(self) -> None:
        self._look_for_name()

    def _opened(self, marker: str) -> None:
        self._enter("tagged")

    def _in_tagged(self, text: str, marker: str | None) -> None:
        """Read text after a tag."""
        if text.strip() or marker not in (None, "list"):
            self._fail("text that is not a list of calls", text, marker)
        elif marker:
            self._look_for_name()

    def _look_for_name(self) -> None:
        self._text.clear()
        self._enter("name")

    def _in_name(self, text: str, marker: str | None) -> None:
        self._text.append(text)
        name_text = "".join(self._text)
        name = name_text.strip(", \t\r\n")
        if not _is_prefix(_NAME_SO_FAR, name_text):
            self._not_a_call(text, marker)
        elif marker == "close" and not name and self._index >= 0:
            self._raw.clear()
            self._enter("after")
        elif marker == "open" and _NAME.fullmatch(name):
            self._call(name)
            # Now, not with the first argument: a cut call must not have the arguments {}.
            self._arguments("{")
            self._keys.clear()
            self._look_for_key()
        elif marker is not None:
            self._not_a_call(text, marker)

    def _not_a_call(self, text: str, marker: str | None) -> None:
        """Handle a list that has other entries: it is an answer unless calls were read before."""
        if self._index < 0:
            self._release("content", text, marker)
        else:
            self._fail("a list entry that is not a call", text, marker)

    def _look_for_key(self) -> None:
        self._text.clear()
        self._enter("key")

    def _in_key(self, text: str, marker: str | None) -> None:
        self._text.append(text)
        key_text = "".join(self._text)
        key = key_text.strip()
        if marker == "close" and not key:
            self._end_call()
        elif marker == "equals" and key in self._keys:
            self._fail("a repeated argument")
        elif marker == "equals" and _KEY.fullmatch(key):
            self._key = key
            self._value = PythonValue()
            self._enter("value", self._value)
        elif marker is not None or not _is_prefix(_KEY_SO_FAR, key_text):
            self._fail("an argument without a name", text, marker)

    def _in_value(self, text: str, marker: str | None) -> None:
        if marker == FAULT:
            self._fail(self._value.fault)
        elif marker == END:
            head = ", " if self._keys else ""
            self._arguments(f"{head}{to_json(self._key)}: {self._value.value}")
            self._keys.add(self._key)
            if self._value.closer == ",":
                self._look_for_key()
            else:
                self._end_call()

    def _end_call(self) -> None:
        self._arguments("}")
        self._closed()
        self._look_for_name()

    def _in_after(self, text: str, marker: str | None) -> None:
        """Read text after the list."""
        if text.strip():
            self._release("content", text, marker)
        elif marker in _CLOSING_TAGS:
            self._enter("content")
        elif marker is not None:
            self._begin(marker)


def _value_rule(schema: Any, tool: Tool, rules: Rules) -> str:
    """Return a value in Python's or JSON's spelling; inside of lists and dicts JSON's only."""
    if schema == {"type": "boolean"}:
        return rules.terminal(_BOOLEAN)
    written = rules.json(schema, tool)
    return either([written, rules.terminal(_QUOTED)]) if schema == {"type": "string"} else written


def _is_prefix(pattern: re.Pattern[str], text: str) -> bool:
    return len(text) <= MAX_NAME_CHARACTERS and pattern.fullmatch(text) is not None
