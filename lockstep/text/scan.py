"""Finding markers in text that arrives piece by piece, holding back what may become one."""

import itertools
import re
from bisect import bisect_left
from collections import deque
from typing import NamedTuple


class Markers:
    """Named strings to look for. With `loose`, a blank in one stands for any run of whitespace.

    A loose marker is looked for with each of its blanks and without it, in text whose runs of
    whitespace count as one blank.
    """

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
        """Whether a marker begins with this text."""
        place = bisect_left(self.spellings, text)
        return place < len(self.spellings) and self.spellings[place].startswith(text)


class Taken(NamedTuple):
    """What a scan settled: text before the marker (or safe so far), its name, where to go on.

    written: the marker as it stands in the text.
    """

    text: str
    marker: str | None
    end: int
    written: str = ""


class Scan:
    """One pass over a text for markers. The first to be complete counts; of several, the longest.

    Held back is the longest ending of the text with which a marker begins. The work is linear in
    the text, and no result depends on how it was cut.
    """

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._held: list[str] = []
        self._settled = 0  # characters given back
        self._seen = 0  # characters looked at
        # The ending of the text with which a marker begins, and where each of its symbols stands.
        self._ending = ""
        self._places: deque[int] = deque()

    def take(self, text: str, start: int = 0) -> Taken:
        """Looks at text[start:] up to the first marker, after which the scan begins anew."""
        at = start
        while at < len(text):
            if not self._ending:
                found = self._markers.first.search(text, at)
                if found is None:
                    break
                at = found.start()
            self._step(text[at], self._seen + at - start)
            at += 1
            if self._ending.endswith(self._markers.spellings):
                return self._found(text[start:at], at)
        self._seen += len(text) - start
        until = self._places[0] if self._places else self._seen
        return Taken(self._settle(text[start:], until), None, len(text))

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        return self._settle("", self._seen)

    def _step(self, char: str, place: int) -> None:
        if self._markers.loose and char.isspace():
            char = " "
            if self._ending.endswith(char):
                return
        self._ending += char
        self._places.append(place)
        while self._ending and not self._markers.begins(self._ending):
            self._ending = self._ending[1:]
            self._places.popleft()

    def _found(self, text: str, end: int) -> Taken:
        spelling = max(filter(self._ending.endswith, self._markers.spellings), key=len)
        before = self._settle(text, self._places[-len(spelling)])
        written = "".join(self._held)
        self._held.clear()
        self._settled = 0
        self._seen = 0
        self._ending = ""
        self._places.clear()
        return Taken(before, self._markers.names[spelling], end, written)

    def _settle(self, text: str, until: int) -> str:
        """Held text and this one, up to the place `until`; what comes after is held."""
        if until == self._settled:
            self._held.append(text)
            return ""
        whole = "".join(self._held) + text
        cut = until - self._settled
        self._held = [whole[cut:]]
        self._settled = until
        return whole[:cut]


class Tail:
    """Text whose last characters wait as long as they are whitespace (or `chars`)."""

    def __init__(self, chars: str | None = None) -> None:
        self._chars = chars
        self._held: list[str] = []

    def take(self, text: str) -> str:
        """What more text settles."""
        shown = text.rstrip(self._chars)
        if not shown:
            self._held.append(text)
            return ""
        settled = self.flush() + shown
        self._held = [text[len(shown) :]]
        return settled

    def flush(self) -> str:
        """What was held back; nothing is afterwards."""
        held = "".join(self._held)
        self._held = []
        return held
