"""Finding markers in text that arrives piece by piece, holding back what may become one."""

import re
from typing import NamedTuple


class Taken(NamedTuple):
    """What a scan settled: text before the marker (or safe so far), its name, what is left."""

    text: str
    marker: str | None
    rest: str


class Markers:
    """Named markers. With `loose`, a blank in a pattern stands for any run of whitespace."""

    def __init__(self, patterns: dict[str, str], loose: bool = False) -> None:
        units = {
            name: [r"\s*" if loose and char == " " else re.escape(char) for char in pattern]
            for name, pattern in patterns.items()
        }
        self._find = re.compile("|".join(f"(?P<{n}>{''.join(u)})" for n, u in units.items()))
        self._hold = re.compile("|".join(_beginning(u) + r"\Z" for u in units.values()))

    def take(self, buffer: str, final: bool = False) -> Taken:
        """Cuts at the first marker; without one, keeps a possible beginning of one as rest."""
        if found := self._find.search(buffer):
            return Taken(buffer[: found.start()], found.lastgroup, buffer[found.end() :])
        held = None if final else self._hold.search(buffer)
        cut = held.start() if held else len(buffer)
        return Taken(buffer[:cut], None, buffer[cut:])


def _beginning(units: list[str]) -> str:
    """A pattern for any beginning of the units but the empty one."""
    pattern = units[-1]
    for unit in reversed(units[:-1]):
        pattern = f"{unit}(?:{pattern})?"
    return pattern
