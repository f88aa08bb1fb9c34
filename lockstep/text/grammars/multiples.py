"""Bounds of `multipleOf`: llguidance divides digit by digit and keeps one state per remainder.

A divisor of 999,983 takes 5 s and 400 MB to compile, and 2^31 exhausts the memory; 50,000 takes
0.13 s and 22 MB. No limit of llguidance counts these states.
"""

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from math import lcm
from typing import Any

from lockstep.errors import RequestError
from lockstep.text.grammars.numbers import significant_digits, to_decimal
from lockstep.text.grammars.rewriting import NOTES

MAX_REMAINDERS = 50_000
"""Maximum states of all multipleOf of one grammar."""
SCHEMA = re.compile(r"%json\s*(?=\{)")
"""A JSON schema in a grammar."""
COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
"""Keywords that add the constraints of other schemas."""
ALONE = (*NOTES, "$defs", "definitions", "$schema", "$id", "type")
"""Keywords that add no constraint to a schema with a COMBINING keyword."""
Json = dict[str, Any]


def check_multiples(source: str, field: str) -> None:
    """Raise RequestError if a Lark grammar needs too many remainder states."""
    objects = [part for schema in objects_of_schemas(source) for part in schema]
    divisors = [part["multipleOf"] for part in objects if _is_number(part.get("multipleOf"))]
    remainders = sum(map(_digits_value, divisors))
    if remainders <= MAX_REMAINDERS and any(map(combines, objects)):
        remainders = _common_multiple(divisors)
    if remainders > MAX_REMAINDERS:
        raise RequestError(
            f"{field}: the values of 'multipleOf' are too large: their digits, without zeros at "
            f"the end, may add up to {MAX_REMAINDERS}, and where schemas are combined, so may "
            "their least common multiple. Choose smaller ones, or leave them out.",
            field,
        )


def objects_of_schemas(source: str) -> list[list[Json]]:
    """Return the objects of each JSON schema in a Lark grammar."""
    return [list(objects_in(schema)) for schema in schemas_of(source)]


def schemas_of(source: str) -> Iterator[Json]:
    """Yield the JSON schemas in a grammar. Invalid JSON is reported by llguidance."""
    decoder = json.JSONDecoder()
    for match in SCHEMA.finditer(source):
        try:
            yield decoder.raw_decode(source, match.end())[0]
        except (ValueError, RecursionError):
            continue


def objects_in(value: Any) -> Iterator[Json]:
    """Yield all objects in a value; a reference may point to any of them."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            yield part
            pending += part.values()
        elif isinstance(part, list):
            pending += part


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and to_decimal(value).is_finite()


def _digits_value(value: float) -> int:
    """Return the significant digits of a number as an integer."""
    return int(significant_digits(value) or "0")


def combines(schema: Json) -> bool:
    """Return whether a value can be constrained by this schema and another one at once."""
    schemas = schema.get("allOf")
    if isinstance(schemas, list) and len(schemas) > 1:
        return True
    constraints = [key for key in schema if key not in ALONE]
    return len(constraints) > 1 and any(key in schema for key in COMBINING)


def _common_multiple(divisors: list[float]) -> int:
    """Return the numerator of the least common multiple. Each divisor's digits are bounded."""
    parts = {Fraction(to_decimal(divisor)) for divisor in divisors}
    return lcm(*(part.numerator for part in parts))
