"""Numbers that a JSON schema names: llguidance keeps them as doubles and as 64-bit integers.

One of more than 15 digits, or beyond 2^63, becomes another number there, which alone could come. At
-2^63 the search for a range of digits does not end, and with its stack the process does.
"""

from collections.abc import Iterable, Iterator
from decimal import Decimal
from math import isfinite
from typing import Any

from lockstep.errors import RequestError

MOST_DIGITS = 15
"""Without zeros at either end: a double gives back as many."""
MOST_EXACT = 2**53
"""Whole numbers up to here are doubles."""
LARGEST = 9.2e18
"""A little less than 2^63, beyond which whole numbers are cut off."""
MOST_INTEGER = 2**63 - 1
VALUES = ("const", "enum")
LOWER = ("minimum", "exclusiveMinimum")
UPPER = ("maximum", "exclusiveMaximum")
Json = dict[str, Any]


def check_numbers(objects: Iterable[Json], field: str) -> None:
    """Raises RequestError where one of a schema's objects names a number that is not obeyed."""
    for one in objects:
        for keyword in (*VALUES, *LOWER, *UPPER):
            value = unheld(keyword, one.get(keyword))
            if value is None:
                continue
            raise RequestError(
                f"{field}: the keyword {keyword!r} has the number {str(value)[:40]}, which no "
                f"grammar enforces; allowed: at most {MOST_DIGITS} digits, or whole "
                f"numbers up to 2^53, between -{LARGEST:g} and {LARGEST:g}; upper bounds may be "
                "larger. Use a number in that range, or a text.",
                field,
            )


def unheld(keyword: str, value: Any) -> int | float | None:
    """The first number of a keyword's value that is not obeyed; None where all are."""
    if keyword in VALUES:
        return next((number for number in _numbers(value) if not is_exact(number)), None)
    if keyword not in (*LOWER, *UPPER) or not is_number(value):
        return None
    held = is_exact(value) or (keyword in UPPER and value >= MOST_INTEGER)
    return None if held else value


def is_exact(number: float) -> bool:
    """Whether llguidance keeps the number as it is."""
    if isinstance(number, int) and abs(number) <= MOST_EXACT:
        return True
    return abs(number) < LARGEST and len(significant(number)) <= MOST_DIGITS


def significant(number: float) -> str:
    """The digits of a number, without zeros at the end."""
    return "".join(map(str, exact(number).as_tuple().digits)).rstrip("0")


def exact(number: float) -> Decimal:
    """The number as JSON spells it."""
    return Decimal(repr(number)) if isinstance(number, float) else Decimal(number)


def _numbers(value: Any) -> Iterator[int | float]:
    """All numbers in a value."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif is_number(one):
            yield one


def is_number(value: Any) -> bool:
    """Whether it is a finite number; the compiler says what is wrong with others."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, int) or isfinite(value)
