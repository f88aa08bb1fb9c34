"""Tool calls as Llama 3.2 and 4 write them in Python: the answer is [name(key=value, ...), ...]."""

import re
from typing import Any

from lockstep.text.grammars.lark import Rules, Tool, either, literal, sequence
from lockstep.text.parsers.call_parser import CallParser
from lockstep.text.parsers.json_reader import END, FAULT, MAX_DEPTH
from lockstep.text.parsers.literals import literal_value
from lockstep.text.parsers.schema import to_json
from lockstep.text.scan import Markers, Taken

_OPENERS = {"tag": "<|python_start|>"}
_OVER = {"end": "<|python_end|>"}
_NAME = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)
_NAME_SO_FAR = re.compile(r"[\s,]*([A-Za-z_][\w.]*\s*)?", re.ASCII)
_KEY = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_KEY_SO_FAR = re.compile(r"\s*([A-Za-z_]\w*\s*)?", re.ASCII)
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
MAX_NAME = 512
"""Characters of a name, and of a key, with the blanks around them."""
_BOOLEAN = '("True" | "False")'
_QUOTED = r"""/'([^'\\\x00-\x1f]|\\['"\\bfnrt])*'/"""
"""A string as Python prints it."""


class PythonValue:
    """Reads a literal up to the comma or the parenthesis behind it, which is its `closer`."""

    def __init__(self) -> None:
        self.fault = ""
        self.closer = ""
        self.value = ""  # as JSON text, once it is whole
        self._kept: list[str] = []
        self._quote = ""
        self._escaped = False
        self._closers: list[str] = []

    def take(self, text: str, start: int = 0) -> Taken:
        """Text goes on at the closer's end; the value gives no text before it is whole."""
        for at in range(start, len(text)):
            if self._ends(text[at]):
                return Taken("", FAULT if self.fault else END, at + (not self.fault))
        return Taken("", None, len(text))

    def flush(self) -> str:
        """Return no text: a value that does not end is no value."""
        return ""

    def _ends(self, char: str) -> bool:
        """Takes one character; whether the value is over, or at fault."""
        if self._quote:
            self._in_text(char)
        elif not self._closers and char in ",)":
            self.closer = char
            self._read()
            return True
        else:
            self._between(char)
        return bool(self.fault)

    def _in_text(self, char: str) -> None:
        self._kept.append("\\n" if char == "\n" and not self._escaped else char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = ""

    def _between(self, char: str) -> None:
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
            self.fault = "a value that is no literal"


class PythonicParser(CallParser):
    """A Python list of calls; their keyword arguments come one by one, each once it is whole."""

    SIGNS = ("func_name1(params_name1=",)
    OPENERS = _OPENERS
    OVER = _OVER
    MARKERS = {
        "start": Markers({"list": "[", **_OPENERS}),
        "content": Markers(_OPENERS),
        "broken": Markers({**_OPENERS, **_OVER}),
        "tagged": Markers({"list": "[", **_OPENERS, **_OVER}),
        "name": Markers({"open": "(", "close": "]", **_OPENERS, **_OVER}),
        "key": Markers({"equals": "=", "close": ")", **_OPENERS, **_OVER}),
        "after": Markers({**_OPENERS, **_OVER}),
    }
    FIRST = "start"
    AFTER = "after"
    OUTSIDE = ("start", "content", "broken")
    AROUND = ("[", "]")
    BETWEEN = ", "
    BARE = "["

    @classmethod
    def head(cls, name: str) -> str:
        """The name and the parenthesis."""
        return f"{name}("

    @classmethod
    def call(cls, tool: Tool, rules: Rules) -> str:
        """Required parameters come, the others may; all of them in the schema's order."""
        # From the last parameter on: what may come if none stands in front, and if one does.
        first = ""
        later = ""
        for key, schema, required in reversed(list(tool.properties())):
            if not _KEY.fullmatch(key) or len(key) > MAX_NAME:
                why = "no parameter of this name can be written in this model's tool calls"
                tool.refuse(key, "properties", why, "Rename it.")
            own = sequence(literal(f"{key}="), _written(schema, tool, rules))
            alone = sequence(own, later)
            behind = sequence(literal(", "), own, later)
            first = rules.rule(alone if required else either([alone, first or '""']))
            later = rules.rule(behind if required else either([behind, later or '""']))
        if tool.is_open:
            one = sequence("/[A-Za-z_][A-Za-z0-9_]{0,63}=/", _written(tool.more, tool, rules))
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
            self._fail("text that is no list of calls", text, marker)
        elif marker:
            self._look_for_name()

    def _look_for_name(self) -> None:
        self._text.clear()
        self._enter("name")

    def _in_name(self, text: str, marker: str | None) -> None:
        self._text.append(text)
        whole = "".join(self._text)
        name = whole.strip(", \t\r\n")
        if not _so_far(_NAME_SO_FAR, whole):
            self._no_call(text, marker)
        elif marker == "close" and not name and self._index >= 0:
            self._raw.clear()
            self._enter("after")
        elif marker == "open" and _NAME.fullmatch(name):
            self._call(name)
            self._arguments("{")  # at once: empty arguments of a call that is cut would look whole
            self._keys.clear()
            self._look_for_key()
        elif marker is not None:
            self._no_call(text, marker)

    def _no_call(self, text: str, marker: str | None) -> None:
        """A list that holds something else: an answer, unless calls came before."""
        if self._index < 0:
            self._release("content", text, marker)
        else:
            self._fail("a list entry that is no call", text, marker)

    def _look_for_key(self) -> None:
        self._text.clear()
        self._enter("key")

    def _in_key(self, text: str, marker: str | None) -> None:
        self._text.append(text)
        whole = "".join(self._text)
        key = whole.strip()
        if marker == "close" and not key:
            self._end_call()
        elif marker == "equals" and key in self._keys:
            self._fail("an argument that came before")
        elif marker == "equals" and _KEY.fullmatch(key):
            self._key = key
            self._value = PythonValue()
            self._enter("value", self._value)
        elif marker is not None or not _so_far(_KEY_SO_FAR, whole):
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
        elif marker in _OVER:
            self._enter("content")
        elif marker is not None:
            self._begin(marker)


def _written(schema: Any, tool: Tool, rules: Rules) -> str:
    """A value as the grammar writes it: Python's words alone, JSON's inside of lists and dicts."""
    if schema == {"type": "boolean"}:
        return rules.terminal(_BOOLEAN)
    written = rules.json(schema, tool)
    return either([written, rules.terminal(_QUOTED)]) if schema == {"type": "string"} else written


def _so_far(pattern: re.Pattern[str], text: str) -> bool:
    return len(text) <= MAX_NAME and pattern.fullmatch(text) is not None
