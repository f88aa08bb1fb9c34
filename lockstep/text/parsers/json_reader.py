"""JSON that comes piece by piece: where it ends, and what is wrong with it, as soon as that comes.

Readers are used as a Scan is: take() gives the text that is settled, END or FAULT once there is
one, and where to go on. The text at fault is not taken.
"""

import json
import re
from collections.abc import Callable

from lockstep.text.parsers.schema import from_json, to_json
from lockstep.text.scan import Taken

END = "end"
FAULT = "fault"

MAX_DEPTH = 64
MAX_WORD = 400
"""Characters of a number."""
ARGUMENTS = ("arguments", "parameters")
BESIDE = ("id", "type")
"""Keys that a call may have though it has no arguments."""

_BLANK = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_LETTERS = re.compile(r"[-+.\w]*")
_WORD = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_CLOSERS = {"{": "}", "[": "]"}
_TURNS = {"outside": re.compile('"'), "inside": re.compile(r'["\\\n]')}


class JsonValue:
    """Reads one value. A number or a word ends where a character comes that is none of it.

    The text that it gives is the value's as it was written; line ends and other control characters
    in strings, which JSON does not allow, become escapes. `fault` says what is wrong. opener: how
    the value has to begin, where that is not free.
    """

    def __init__(self, opener: str = "") -> None:
        self.fault = ""
        self._opener = opener
        self._state: Callable[[str, int], int] = self._value
        self._closers: list[str] = []
        self._after_text: Callable[[str, int], int] = self._next
        self._digits = 0  # of an escape \uXXXX that are still to come
        self._word: list[str] = []
        self._over = False
        self._out: list[str] = []

    def take(self, text: str, start: int = 0) -> Taken:
        """Return the part of text[start:] that belongs to the value."""
        at = start
        while at < len(text) and not (self._over or self.fault):
            at = self._state(text, at)
        marker = FAULT if self.fault else END if self._over else None
        out = "".join(self._out)
        self._out.clear()
        return Taken(out, marker, at)

    def flush(self) -> str:
        """Return no text, since none is pending."""
        return ""

    def _fail(self, what: str, at: int) -> int:
        self.fault = what
        return at

    def _give(self, text: str) -> None:
        self._out.append(text)

    def _value(self, text: str, at: int) -> int:
        char = text[at]
        if char in _BLANK:
            self._give(char if self._closers else "")
        elif self._opener and not self._closers and char != self._opener:
            return self._fail(f"{char!r} where {self._opener!r} stands", at)
        elif char in _CLOSERS:
            if len(self._closers) >= MAX_DEPTH:
                return self._fail(f"more than {MAX_DEPTH} levels", at)
            self._give(char)
            self._closers.append(_CLOSERS[char])
            self._state = self._first
        elif char == '"':
            self._begin_text(self._next)
        elif char == "-" or char.isalnum():
            self._state = self._in_word
            return at
        else:
            return self._fail(f"{char!r} where a value begins", at)
        return at + 1

    def _first(self, text: str, at: int) -> int:
        """Read a character after an opening bracket."""
        if text[at] == self._closers[-1]:
            return self._next(text, at)
        if text[at] in _BLANK:
            self._give(text[at])
            return at + 1
        self._state = self._key if self._closers[-1] == "}" else self._value
        return at

    def _key(self, text: str, at: int) -> int:
        if text[at] == '"':
            self._begin_text(self._colon)
        elif text[at] in _BLANK:
            self._give(text[at])
        else:
            return self._fail(f"{text[at]!r} where a key begins", at)
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        if text[at] == ":":
            self._state = self._value
        elif text[at] not in _BLANK:
            return self._fail(f"{text[at]!r} where a colon stands", at)
        self._give(text[at])
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
            return self._fail(f"{char!r} behind a value", at)
        self._give(char)
        return at + 1

    def _end_value(self) -> None:
        self._state = self._next
        self._over = not self._closers

    def _begin_text(self, after: Callable[[str, int], int]) -> None:
        self._give('"')
        self._after_text = after
        self._state = self._in_text

    def _in_text(self, text: str, at: int) -> int:
        found = _PLAIN.match(text, at)
        end = found.end() if found else at
        self._give(text[at:end])
        if end == len(text):
            return end
        char = text[end]
        if char == '"':
            self._give(char)
            self._state = self._after_text
            self._over = not self._closers
        elif char == "\\":
            self._state = self._escape
        else:
            self._give(json.dumps(char)[1:-1])
        return end + 1

    def _escape(self, text: str, at: int) -> int:
        char = text[at]
        if char not in '"\\/bfnrtu':
            return self._fail(f"the escape \\{char}", at)
        self._give("\\" + char)
        self._digits = 4 * (char == "u")
        self._state = self._digit if self._digits else self._in_text
        return at + 1

    def _digit(self, text: str, at: int) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            return self._fail(f"{text[at]!r} in an escape", at)
        self._give(text[at])
        self._digits -= 1
        self._state = self._digit if self._digits else self._in_text
        return at + 1

    def _in_word(self, text: str, at: int) -> int:
        """Read a number, true, false or null; the character after it ends it."""
        found = _LETTERS.match(text, at)
        end = found.end() if found else at
        self._word.append(text[at:end])
        if sum(map(len, self._word)) > MAX_WORD:
            return self._fail(f"a number of more than {MAX_WORD} characters", at)
        if end == len(text):
            return end
        word = "".join(self._word)
        self._word.clear()
        if not _WORD.fullmatch(word):
            return self._fail(f"{word[:20]!r} where a value stands", end)
        self._give(word)
        self._end_value()
        return end


class Quotes:
    """Follows a text that may be JSON, to tell whether it stops inside of a string.

    What does not begin as an object or a list is none, and a line end in a string ends being one.
    """

    def __init__(self) -> None:
        self._state = "begin"

    @property
    def inside(self) -> bool:
        """Return whether the text so far ends inside of a string."""
        return self._state in ("inside", "escape")

    def take(self, text: str) -> None:
        """Takes more of the text."""
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
        found = _TURNS[self._state].search(text, at)
        if found is None:
            return len(text)
        turns = {'"': "outside" if self.inside else "inside", "\\": "escape", "\n": "none"}
        self._state = turns[found[0]]
        return found.end()


class JsonCall:
    """Reader of {"name": ..., "arguments": {...}} after its first brace.

    It returns the text of the arguments, once `name` is known. Arguments may be called parameters,
    be a text that contains the object, be null, or be left out; then no other key is allowed.
    """

    def __init__(self) -> None:
        self.name = ""
        self.fault = ""
        self._state = "first"
        self._key = ""
        self._reader: JsonValue | None = None
        self._kept: list[str] = []  # text of a key, or of a value that counts as a whole
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
        """Return no text: a call that does not end is no call."""
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
        """A value begins with this character."""
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
        """A piece of a key or of a value."""
        assert self._reader is not None
        found = self._reader.take(text, at)
        (self._arguments if self._state == "object" else self._kept).append(found.text)
        if found.marker == FAULT:
            self.fault = self._reader.fault
        elif found.marker == END:
            self._reader = None
            self._ended()
        return found.end

    def _ended(self) -> None:
        """A key or a value is whole."""
        state = self._state
        self._state = "colon" if state == "key text" else "next"
        if state in ("object", "ignored"):
            return
        try:
            value = from_json("".join(self._kept))
            if state == "arguments" and value is not None:
                value = from_json(value)
        except ValueError:
            self.fault = f"a {state} that is no JSON"
            return
        if state == "key text":
            self._key = value
        elif state == "arguments":
            self._whole_arguments({} if value is None else value)
        elif value.strip():
            self.name = value
        else:
            self.fault = "an empty name"

    def _whole_arguments(self, value: object) -> None:
        if isinstance(value, dict):
            self._arguments.append(to_json(value))
        else:
            self.fault = "arguments that are no object"

    def _end(self) -> None:
        """The call's closing brace."""
        self._state = END
        if not self.name:
            self.fault = "no name"
        elif "arguments" in self._seen:
            return
        elif strange := sorted(self._seen.difference(("name", *BESIDE))):
            self.fault = f"no arguments, but {strange[0][:40]!r}"
        else:
            self._arguments.append("{}")
