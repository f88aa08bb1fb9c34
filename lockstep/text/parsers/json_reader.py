"""Incremental readers of JSON: they report the end of a value and its faults as early as possible.

Readers are used like a Scan: take() returns the text that is certain, END or FAULT if reached, and
the next index. The text at a fault is not consumed.
"""

import json
import re
from collections.abc import Callable

from lockstep.text.parsers.schema import from_json, to_json
from lockstep.text.scan import Taken

END = "end"
FAULT = "fault"

MAX_DEPTH = 64
MAX_NUMBER_CHARACTERS = 400
"""Maximum characters of a number."""
ARGUMENTS = ("arguments", "parameters")
METADATA_KEYS = ("id", "type")
"""Keys that a call without arguments may have."""

_BLANK = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_LETTERS = re.compile(r"[-+.\w]*")
_WORD = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_CLOSERS = {"{": "}", "[": "]"}
_STRING_EVENTS = {"outside": re.compile('"'), "inside": re.compile(r'["\\\n]')}


class JsonValue:
    """Reader of one value. A number or a word ends at the first character that does not belong to
    it.

    It returns the value's text as written, except that control characters in strings, which JSON
    does not allow, become escapes. `fault` says what is malformed.
    opener: required first character, if any.
    """

    def __init__(self, opener: str = "") -> None:
        self.fault = ""
        self._opener = opener
        self._state: Callable[[str, int], int] = self._value
        self._closers: list[str] = []
        self._after_text: Callable[[str, int], int] = self._next
        self._digits = 0  # missing digits of an escape \uXXXX
        self._word: list[str] = []
        self._complete = False
        self._out: list[str] = []

    def take(self, text: str, start: int = 0) -> Taken:
        """Return the part of text[start:] that belongs to the value."""
        at = start
        while at < len(text) and not (self._complete or self.fault):
            at = self._state(text, at)
        marker = FAULT if self.fault else END if self._complete else None
        out = "".join(self._out)
        self._out.clear()
        return Taken(out, marker, at)

    def flush(self) -> str:
        """Return no text, since none is pending."""
        return ""

    def _fail(self, reason: str, at: int) -> int:
        self.fault = reason
        return at

    def _emit(self, text: str) -> None:
        self._out.append(text)

    def _value(self, text: str, at: int) -> int:
        char = text[at]
        if char in _BLANK:
            self._emit(char if self._closers else "")
        elif self._opener and not self._closers and char != self._opener:
            return self._fail(f"{char!r} instead of {self._opener!r}", at)
        elif char in _CLOSERS:
            if len(self._closers) >= MAX_DEPTH:
                return self._fail(f"more than {MAX_DEPTH} levels", at)
            self._emit(char)
            self._closers.append(_CLOSERS[char])
            self._state = self._first
        elif char == '"':
            self._begin_text(self._next)
        elif char == "-" or char.isalnum():
            self._state = self._in_word
            return at
        else:
            return self._fail(f"{char!r} instead of a value", at)
        return at + 1

    def _first(self, text: str, at: int) -> int:
        """Read a character after an opening bracket."""
        if text[at] == self._closers[-1]:
            return self._next(text, at)
        if text[at] in _BLANK:
            self._emit(text[at])
            return at + 1
        self._state = self._key if self._closers[-1] == "}" else self._value
        return at

    def _key(self, text: str, at: int) -> int:
        if text[at] == '"':
            self._begin_text(self._colon)
        elif text[at] in _BLANK:
            self._emit(text[at])
        else:
            return self._fail(f"{text[at]!r} instead of a key", at)
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        if text[at] == ":":
            self._state = self._value
        elif text[at] not in _BLANK:
            return self._fail(f"{text[at]!r} instead of a colon", at)
        self._emit(text[at])
        return at + 1

    def _next(self, text: str, at: int) -> int:
        """Read a character after a value in brackets."""
        char = text[at]
        if char == self._closers[-1]:
            self._closers.pop()
            self._end_value()
        elif char == ",":
            self._state = self._key if self._closers[-1] == "}" else self._value
        elif char not in _BLANK:
            return self._fail(f"{char!r} after a value", at)
        self._emit(char)
        return at + 1

    def _end_value(self) -> None:
        self._state = self._next
        self._complete = not self._closers

    def _begin_text(self, after: Callable[[str, int], int]) -> None:
        self._emit('"')
        self._after_text = after
        self._state = self._in_text

    def _in_text(self, text: str, at: int) -> int:
        match = _PLAIN.match(text, at)
        end = match.end() if match else at
        self._emit(text[at:end])
        if end == len(text):
            return end
        char = text[end]
        if char == '"':
            self._emit(char)
            self._state = self._after_text
            self._complete = not self._closers
        elif char == "\\":
            self._state = self._escape
        else:
            self._emit(json.dumps(char)[1:-1])
        return end + 1

    def _escape(self, text: str, at: int) -> int:
        char = text[at]
        if char not in '"\\/bfnrtu':
            return self._fail(f"the escape \\{char}", at)
        self._emit("\\" + char)
        self._digits = 4 * (char == "u")
        self._state = self._digit if self._digits else self._in_text
        return at + 1

    def _digit(self, text: str, at: int) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            return self._fail(f"{text[at]!r} in an escape", at)
        self._emit(text[at])
        self._digits -= 1
        self._state = self._digit if self._digits else self._in_text
        return at + 1

    def _in_word(self, text: str, at: int) -> int:
        """Read a number, true, false or null; the character after it ends it."""
        match = _LETTERS.match(text, at)
        end = match.end() if match else at
        self._word.append(text[at:end])
        if sum(map(len, self._word)) > MAX_NUMBER_CHARACTERS:
            return self._fail(f"a number of more than {MAX_NUMBER_CHARACTERS} characters", at)
        if end == len(text):
            return end
        word = "".join(self._word)
        self._word.clear()
        if not _WORD.fullmatch(word):
            return self._fail(f"{word[:20]!r} instead of a value", end)
        self._emit(word)
        self._end_value()
        return end


class Quotes:
    """Tracker of whether text that may be JSON ends inside of a string.

    Text that does not begin as an object or a list is not JSON; a line end in a string disproves
    it.
    """

    def __init__(self) -> None:
        self._state = "begin"

    @property
    def inside(self) -> bool:
        """Return whether the text so far ends inside of a string."""
        return self._state in ("inside", "escape")

    def take(self, text: str) -> None:
        """Read more of the text."""
        at = 0
        if self._state == "begin":
            at = len(text) - len(text.lstrip())
            if at < len(text):
                self._state = "outside" if text[at] in _CLOSERS else "none"
        while at < len(text) and self._state != "none":
            at = self._step(text, at)

    def _step(self, text: str, at: int) -> int:
        if self._state == "escape":
            self._state = "inside"
            return at + 1
        match = _STRING_EVENTS[self._state].search(text, at)
        if match is None:
            return len(text)
        next_states = {'"': "outside" if self.inside else "inside", "\\": "escape", "\n": "none"}
        self._state = next_states[match[0]]
        return match.end()


class JsonCall:
    """Reader of {"name": ..., "arguments": {...}} after its first brace.

    It returns the text of the arguments once `name` is known. Arguments may be named parameters, be
    a string with the object, be null, or be missing; then no other key is allowed.
    """

    def __init__(self) -> None:
        self.name = ""
        self.fault = ""
        self._state = "first"
        self._key = ""
        self._reader: JsonValue | None = None
        self._kept: list[str] = []  # text of a key, or of a value that does not stream
        self._arguments: list[str] = []
        self._seen: set[str] = set()

    def take(self, text: str, start: int = 0) -> Taken:
        """Return the part of text[start:] that belongs to the call."""
        at = start
        while at < len(text) and self._state != END and not self.fault:
            at = self._step(text, at) if self._reader is None else self._read(text, at)
        marker = FAULT if self.fault else END if self._state == END else None
        if not self.name:
            return Taken("", marker, at)
        out = "".join(self._arguments)
        self._arguments.clear()
        return Taken(out, marker, at)

    def flush(self) -> str:
        """Return no text: an incomplete call is dropped."""
        return ""

    def _step(self, text: str, at: int) -> int:
        """Read one character between keys and values."""
        char = text[at]
        if char in _BLANK:
            return at + 1
        match self._state, char:
            case ("first" | "key", '"'):
                self._begin("key text")
                return at
            case ("first" | "next", "}"):
                self._end()
            case ("colon", ":"):
                self._state = "value"
            case ("value", _):
                self._value(char)
                return at
            case ("next", ","):
                self._state = "key"
            case _:
                self.fault = f"{char!r} between keys and values"
                return at
        return at + 1

    def _begin(self, state: str) -> None:
        self._state = state
        self._reader = JsonValue()
        self._kept.clear()

    def _value(self, char: str) -> None:
        """Begin a value at this character."""
        role = "arguments" if self._key in ARGUMENTS else self._key
        allowed = {"name": '"', "arguments": '{"n'}.get(role)
        if allowed is None:
            self._begin("ignored")
        elif role in self._seen:
            self.fault = f"{role} twice"
        elif char not in allowed:
            self.fault = f"{role} cannot begin with {char!r}"
        else:
            self._begin("object" if char == "{" else role)
        self._seen.add(role)

    def _read(self, text: str, at: int) -> int:
        """Read a part of a key or a value."""
        assert self._reader is not None
        taken = self._reader.take(text, at)
        (self._arguments if self._state == "object" else self._kept).append(taken.text)
        if taken.marker == FAULT:
            self.fault = self._reader.fault
        elif taken.marker == END:
            self._reader = None
            self._ended()
        return taken.end

    def _ended(self) -> None:
        """Handle a complete key or value."""
        state = self._state
        self._state = "colon" if state == "key text" else "next"
        if state in ("object", "ignored"):
            return
        try:
            value = from_json("".join(self._kept))
            if state == "arguments" and value is not None:
                value = from_json(value)
        except ValueError:
            self.fault = f"{state}: not valid JSON"
            return
        if state == "key text":
            self._key = value
        elif state == "arguments":
            self._set_arguments({} if value is None else value)
        elif value.strip():
            self.name = value
        else:
            self.fault = "an empty name"

    def _set_arguments(self, value: object) -> None:
        if isinstance(value, dict):
            self._arguments.append(to_json(value))
        else:
            self.fault = "arguments that are not an object"

    def _end(self) -> None:
        """End the call at its closing brace."""
        self._state = END
        if not self.name:
            self.fault = "no name"
        elif "arguments" in self._seen:
            return
        elif unknown := sorted(self._seen.difference(("name", *METADATA_KEYS))):
            self.fault = f"no arguments, but {unknown[0][:40]!r}"
        else:
            self._arguments.append("{}")
