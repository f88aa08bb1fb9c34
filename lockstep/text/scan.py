"""Incremental search for marker strings, holding back text that may become a marker."""

import itertools
import re
from bisect import bisect_left
from collections import deque
from typing import NamedTuple


class Markers:
    """Named strings to search for. With `loose`, a blank in one matches any run of whitespace or
    none."""

    def __init__(self, patterns: dict[str, str], loose: bool = False) -> None:
        self.loose = loose
        self.names: dict[str, str] = {}
        for name, pattern in patterns.items():
            choices = [(" ", "") if loose and char == " " else (char,) for char in pattern]
            for spelling in itertools.product(*choices):
                self.names.setdefault("".join(spelling), name)
        self.spellings = tuple(sorted(self.names))
        firsts = {spelling[0] for spelling in self.spellings}
        self.first = re.compile("|".join(map(re.escape, sorted(firsts))))

    def begins(self, text: str) -> bool:
        """Return whether a marker begins with this text."""
        index = bisect_left(self.spellings, text)
        return index < len(self.spellings) and self.spellings[index].startswith(text)


class Taken(NamedTuple):
    """Result of a scan step.

    text: text before the marker, or text that is certain to belong to none.
    marker: name of the marker; None if there is none.
    end: index after the consumed characters.
    written: the marker as spelled in the text.
    """

    text: str
    marker: str | None
    end: int
    written: str = ""


class Scan:
    """Single pass over a text for markers. The first complete marker wins; of several, the longest.

    The longest suffix that is a prefix of a marker is delayed. The work is linear in the text,
    and results do not depend on how the text is cut into parts.
    """

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._pending: list[str] = []
        self._returned = 0  # characters returned
        self._seen = 0  # characters read
        # Suffix of the text that is a prefix of a marker, and the index of each of its characters.
        self._suffix = ""
        self._indices: deque[int] = deque()

    def take(self, text: str, start: int = 0) -> Taken:
        """Search text[start:] up to the first marker, after which the scan starts over."""
        at = start
        while at < len(text):
            if not self._suffix:
                match = self._markers.first.search(text, at)
                if match is None:
                    break
                at = match.start()
            self._step(text[at], self._seen + at - start)
            at += 1
            if self._suffix.endswith(self._markers.spellings):
                return self._matched(text[start:at], at)
        self._seen += len(text) - start
        until = self._indices[0] if self._indices else self._seen
        return Taken(self._release(text[start:], until), None, len(text))

    def flush(self) -> str:
        """Return the pending text, after the last part."""
        return self._release("", self._seen)

    def _step(self, char: str, index: int) -> None:
        if self._markers.loose and char.isspace():
            char = " "
            if self._suffix.endswith(char):
                return
        self._suffix += char
        self._indices.append(index)
        while self._suffix and not self._markers.begins(self._suffix):
            self._suffix = self._suffix[1:]
            self._indices.popleft()

    def _matched(self, text: str, end: int) -> Taken:
        spelling = max(filter(self._suffix.endswith, self._markers.spellings), key=len)
        before = self._release(text, self._indices[-len(spelling)])
        written = "".join(self._pending)
        self._pending.clear()
        self._returned = 0
        self._seen = 0
        self._suffix = ""
        self._indices.clear()
        return Taken(before, self._markers.names[spelling], end, written)

    def _release(self, text: str, until: int) -> str:
        """Return pending text and `text` up to the index `until`; the rest becomes pending."""
        if until == self._returned:
            self._pending.append(text)
            return ""
        available = "".join(self._pending) + text
        cut = until - self._returned
        self._pending = [available[cut:]]
        self._returned = until
        return available[:cut]


class Tail:
    """Filter that delays trailing whitespace (or `chars`) until other text follows."""

    def __init__(self, chars: str | None = None) -> None:
        self._chars = chars
        self._pending: list[str] = []

    def take(self, text: str) -> str:
        """Append text and return what no longer is trailing."""
        kept = text.rstrip(self._chars)
        if not kept:
            self._pending.append(text)
            return ""
        released = self.flush() + kept
        self._pending = [text[len(kept) :]]
        return released

    def flush(self) -> str:
        """Return the delayed characters and clear them."""
        delayed = "".join(self._pending)
        self._pending = []
        return delayed
