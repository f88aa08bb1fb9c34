"""Limits of the numbers in an answer that is JSON, kept by masks.

Readers of JSON fail at numbers beyond all doubles (1e999) and at thousands of digits (Python at
4,300), and a model that repeats a digit would fill its answer with it. llguidance 1.9.1 bounds the
digits of a number only together with its value, and then allows no exponent, so that 6e23 could not
be written. So the bytes of an answer are read as JSON, and where a number is near a limit its masks
lose the tokens that would cross the limit. Text in strings is not limited.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

MAX_DIGITS = 100
"""Maximum digits of a number in front of its exponent."""
MAX_EXPONENT_DIGITS = 2
"""Maximum digits of an exponent. With MAX_DIGITS numbers lie below 1e199 in magnitude, and those
that are not 0 above 1e-199: they are finite, normal doubles."""
MAX_KNOWN = 1 << 15
"""Maximum number of (state, token) pairs whose next state a reader caches."""

TEXT = "text"
VALUE = "value"
WORD = "word"
STRING = "string"
ESCAPE = "escape"
INTEGER = "integer"
POINT = "point"
FRACTION = "fraction"
EXPONENT = "exponent"
"""Values of JsonState.part. VALUE: between parts of JSON. WORD: true, null or a name. ESCAPE: after
a backslash in a string. POINT: after the decimal point, before a digit."""
NUMBER = {
    INTEGER: MAX_DIGITS,
    # At least one digit must come after a decimal point.
    POINT: MAX_DIGITS - 1,
    FRACTION: MAX_DIGITS,
    EXPONENT: MAX_EXPONENT_DIGITS,
}
"""Parts of a number, with their maximum digits."""

_DIGITS = frozenset(b"0123456789")
_WORD = frozenset([*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1), *b"_.+-"])
_OPEN = frozenset(b"{[")
_CLOSE = frozenset(b"}]")
_QUOTE, _BACKSLASH, _MINUS, _POINT = b'"\\-.'
_CONTINUES = frozenset(bytes([byte]) for byte in b"0123456789.eE+-")
"""First bytes of the tokens that may continue a number."""
_SIGNIFICAND = re.compile(rb"[0-9.]+")
_LONG = re.compile(rb"[0-9][eE][+-]?[0-9]{%d}|[0-9.]{%d}" % (MAX_EXPONENT_DIGITS + 1, MAX_DIGITS))
"""Pattern of tokens that may have a number beyond a limit, wherever in a number they begin."""


class JsonState(NamedTuple):
    """Position in an answer, after its bytes so far.

    part: TEXT outside of JSON, VALUE between the parts of JSON, or the part that has begun.
    digits: of the exponent in EXPONENT, else of the number so far. depth: open brackets, counted
    where free text may follow. tail: last bytes of the free text in TEXT.
    """

    part: str = VALUE
    digits: int = 0
    depth: int = 0
    tail: bytes = b""

    @property
    def too_long(self) -> bool:
        """Return whether a number has crossed a limit, or will with the next digit it needs."""
        return self.part in NUMBER and self.digits > NUMBER[self.part]


class JsonReader:
    """Reader of the JSON in an answer, byte by byte. Answers of the same openers share one reader.

    openers: texts that introduce JSON of objects or lists within free text; empty where the whole
    answer is JSON, None where all of it is free text.
    """

    def __init__(self, openers: Sequence[str] | None = ()) -> None:
        self._openers = tuple(opener.encode() for opener in openers or ())
        self._tail = max(map(len, self._openers), default=0)
        self.start = JsonState(TEXT if openers or openers is None else VALUE)
        # A step reads a few tokens for each answer, most of them for the same states.
        self._read = lru_cache(MAX_KNOWN)(self._read_bytes)

    def read(self, state: JsonState, data: bytes) -> JsonState:
        """Return the state after the bytes of a token."""
        return self._read_text(state, data) if state.part == TEXT else self._read(state, data)

    def _read_text(self, state: JsonState, data: bytes) -> JsonState:
        """Return the state after bytes that follow free text."""
        text = state.tail + data
        ends = [at + len(opener) for opener in self._openers if (at := text.find(opener)) >= 0]
        if ends:
            return self._read(JsonState(), text[min(ends) :])
        return JsonState(TEXT, tail=text[max(len(text) - self._tail, 0) :])

    def _read_bytes(self, state: JsonState, data: bytes) -> JsonState:
        """Return the state after bytes that follow JSON."""
        for index, byte in enumerate(data):
            state = self._next(state, byte)
            if state.part == TEXT:
                return self._read_text(state, data[index + 1 :])
        return state

    def _next(self, state: JsonState, byte: int) -> JsonState:
        if state.part == STRING:
            if byte == _QUOTE:
                return state._replace(part=VALUE)
            return state._replace(part=ESCAPE) if byte == _BACKSLASH else state
        if state.part == ESCAPE:
            return state._replace(part=STRING)
        if state.part in NUMBER:
            number = _number(state, byte)
            if number is not None:
                return number
        return self._structure(state, byte)

    def _structure(self, state: JsonState, byte: int) -> JsonState:
        """Return the state after a byte that is in no string and continues no number."""
        depth = state.depth
        if byte == _QUOTE:
            return JsonState(STRING, depth=depth)
        if byte in _OPEN:
            return JsonState(depth=depth + 1 if self._openers else 0)
        if byte in _CLOSE:
            return JsonState(depth=depth - 1) if depth > 1 else self.start
        if byte in _DIGITS or byte == _MINUS:
            # Digits of a word, such as a tool's name, are no number.
            return state if state.part == WORD else JsonState(INTEGER, int(byte != _MINUS), depth)
        return JsonState(WORD if byte in _WORD or byte >= 0x80 else VALUE, depth=depth)


def _number(state: JsonState, byte: int) -> JsonState | None:
    """Return the state after a byte that continues a number; None where it ends the number."""
    if byte in _DIGITS:
        part = FRACTION if state.part == POINT else state.part
        return state._replace(part=part, digits=state.digits + 1)
    if state.part == INTEGER and byte == _POINT:
        return state._replace(part=POINT)
    if state.part in (INTEGER, FRACTION) and byte in b"eE":
        return state._replace(part=EXPONENT, digits=0)
    if state.part == EXPONENT and state.digits == 0 and byte in b"+-":
        return state
    return None


class NumberLimit:
    """Sets of the tokens that would make a number too long, for one vocabulary.

    tokens: bytes of each token.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._size = -(-len(tokens) // 8)
        self._reader = JsonReader()
        self._long = {token: data for token, data in enumerate(tokens) if _LONG.search(data)}
        leading = {token: data for token, data in enumerate(tokens) if data[:1] in _CONTINUES}
        self._continuing = {**leading, **self._long}
        matches = map(_SIGNIFICAND.match, leading.values())
        longest = max((match.end() for match in matches if match), default=0)
        # From fewer digits no token reaches the limit by the digits with which it begins.
        self._free_digits = max(MAX_DIGITS - longest, 1)
        self._forbidden: dict[tuple[str, int], int] = {}

    def forbidden(self, state: JsonState) -> int:
        """Return the forbidden next tokens as a mask: bit i is token i."""
        part, digits = state.part, state.digits
        if part not in NUMBER and (part == TEXT or not self._long):
            return 0
        if part == EXPONENT:
            digits = min(digits, MAX_EXPONENT_DIGITS + 1)
        elif part in NUMBER:
            digits = min(max(digits, self._free_digits), MAX_DIGITS + 1)
        mask = self._forbidden.get((part, digits))
        if mask is None:
            mask = self._forbidden[part, digits] = self._crossing(JsonState(part, digits))
        return mask

    def _crossing(self, state: JsonState) -> int:
        """Return the mask of the tokens that cross a limit after a state."""
        bits = bytearray(self._size)
        tokens = self._continuing if state.part in NUMBER else self._long
        for token, data in tokens.items():
            if self._crosses(state, data):
                bits[token // 8] |= 1 << token % 8
        return int.from_bytes(bits, "little")

    def _crosses(self, state: JsonState, data: bytes) -> bool:
        for index in range(len(data)):
            after = self._reader.read(state, data[index : index + 1])
            # A number beyond the limit already may end, and another must not begin so.
            if after.too_long and after != state:
                return True
            state = after
        return False
