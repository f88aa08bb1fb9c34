"""The bound of `multipleOf`: llguidance divides by it digit by digit, with a state a remainder.

A divisor of 999,983 takes 5 s and 400 MB to compile, one of 2^31 ends the process for want of
memory; 50,000 take 0.13 s and 22 MB. No other limit of llguidance's counts these states.
"""

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from math import lcm
from typing import Any

from lockstep.errors import RequestError
from lockstep.text.grammars.numbers import exact, significant
from lockstep.text.grammars.rewriting import NOTES

MOST_REMAINDERS = 50_000
"""States for all multipleOf of a grammar together."""
SCHEMA = re.compile(r"%json\s*(?=\{)")
COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
ALONE = (*NOTES, "$defs", "definitions", "$schema", "$id", "type")
"""Keywords that bind nothing more in a schema that COMBINING stands in."""
Json = dict[str, Any]


def check_multiples(source: str, field: str) -> None:
    """Raises RequestError where a grammar in llguidance's Lark needs too many remainders."""
    objects = [one for schema in objects_of_schemas(source) for one in schema]
    divisors = [one["multipleOf"] for one in objects if _is_number(one.get("multipleOf"))]
    most = sum(map(_significant, divisors))
    if most <= MOST_REMAINDERS and any(map(combines, objects)):
        most = _common(divisors)
    if most > MOST_REMAINDERS:
        raise RequestError(
            f"{field}: the values of 'multipleOf' are too large: their digits, without zeros at "
            f"the end, may add up to {MOST_REMAINDERS}, and where schemas are combined, so may "
            "their least common multiple. Choose smaller ones, or leave them out.",
            field,
        )


def objects_of_schemas(source: str) -> list[list[Json]]:
    """All objects of each JSON schema in a grammar in llguidance's Lark."""
    return [list(_objects(schema)) for schema in schemas_of(source)]


def schemas_of(source: str) -> Iterator[Json]:
    """The JSON schemas in a grammar; what is no JSON is left to llguidance, which says so."""
    decoder = json.JSONDecoder()
    for place in SCHEMA.finditer(source):
        try:
            yield decoder.raw_decode(source, place.end())[0]
        except (ValueError, RecursionError):
            continue


def _objects(value: Any) -> Iterator[Json]:
    """All objects in a value: a reference may lead to any of them."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and exact(value).is_finite()


def _significant(value: float) -> int:
    """The digits of a number, without zeros at the end, as a whole number."""
    return int(significant(value) or "0")


def combines(schema: Json) -> bool:
    """Whether a value may be bound by this schema and by another one at once."""
    several = schema.get("allOf")
    if isinstance(several, list) and len(several) > 1:
        return True
    bound = [key for key in schema if key not in ALONE]
    return len(bound) > 1 and any(key in schema for key in COMBINING)


def _common(divisors: list[float]) -> int:
    """The numerator of the least common multiple; each divisor's digits are bounded."""
    parts = {Fraction(exact(one)) for one in divisors}
    return lcm(*(part.numerator for part in parts))
