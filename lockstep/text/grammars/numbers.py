"""Bounds of the numbers in a JSON schema: llguidance stores them as doubles and 64-bit integers.

A number of more than 15 digits, or beyond 2^63, is rounded there, so that the grammar would allow
another number. At -2^63 the range search of llguidance recurses until the process runs out of
stack.
"""

from collections.abc import Iterable, Iterator
from decimal import Decimal
from math import isfinite
from typing import Any

from lockstep.errors import RequestError

MAX_DIGITS = 15
"""Maximum significant digits: a double reproduces this many."""
MAX_EXACT_INTEGER = 2**53
"""Maximum integer up to which every integer is a double."""
MAX_MAGNITUDE = 9.2e18
"""Maximum magnitude, a little below 2^63: larger integers are truncated."""
MAX_INT64 = 2**63 - 1
VALUES = ("const", "enum")
LOWER = ("minimum", "exclusiveMinimum")
UPPER = ("maximum", "exclusiveMaximum")
Json = dict[str, Any]


def check_numbers(objects: Iterable[Json], field: str) -> None:
    """Raise RequestError if an object of a schema names a bound or value that is not enforced."""
    for part in objects:
        for keyword in (*VALUES, *LOWER, *UPPER):
            value = first_unsupported(keyword, part.get(keyword))
            if value is None:
                continue
            raise RequestError(
                f"{field}: the keyword {keyword!r} has the number {str(value)[:40]}, which a "
                f"grammar cannot enforce; allowed: at most {MAX_DIGITS} digits, or whole "
                f"numbers up to 2^53, between -{MAX_MAGNITUDE:g} and {MAX_MAGNITUDE:g}; upper "
                "bounds may be larger. Use a number of fewer digits, or a string.",
                field,
            )


def first_unsupported(keyword: str, value: Any) -> int | float | None:
    """Return the first number of a keyword's value that is not enforced; None if there is none."""
    if keyword in VALUES:
        return next((number for number in _numbers(value) if not is_exact(number)), None)
    if keyword not in (*LOWER, *UPPER) or not is_number(value):
        return None
    supported = is_exact(value) or (keyword in UPPER and value >= MAX_INT64)
    return None if supported else value


def is_exact(number: float) -> bool:
    """Return whether llguidance keeps the number unchanged."""
    if isinstance(number, int) and abs(number) <= MAX_EXACT_INTEGER:
        return True
    return abs(number) < MAX_MAGNITUDE and len(significant_digits(number)) <= MAX_DIGITS


def significant_digits(number: float) -> str:
    """Return the digits of a number without trailing zeros."""
    return "".join(map(str, to_decimal(number).as_tuple().digits)).rstrip("0")


def to_decimal(number: float) -> Decimal:
    """Return the number as JSON spells it."""
    return Decimal(repr(number)) if isinstance(number, float) else Decimal(number)


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield all numbers in a value."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            pending += part.values()
        elif isinstance(part, list):
            pending += part
        elif is_number(part):
            yield part


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number; the compiler reports others."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, int) or isfinite(value)
