"""Add bounds to integers and multiples that a JSON schema leaves unbounded.

Readers with 64-bit integers fail at larger values, Python at 4,300 digits, and a model that repeats
a digit would fill its answer with it. Other numbers are not bounded here: llguidance 1.9.1 writes
no exponent within bounds, so that 6e23 could not be generated. Their digits are limited by
number_limits.py instead. That is no way for multiples, which cannot end at an arbitrary digit.
"""

import json
from typing import Any

from lockstep.text.grammars.numbers import LOWER, UPPER, is_number, significant_digits
from lockstep.text.grammars.rewriting import NOTES, rewrite

LIMIT = 9 * 10**18
"""Exclusive limit of the magnitude of integers. It is a little below 2^63 and has one significant
digit, so that the regex of the range is short."""
MULTIPLE = "multipleOf"
MAX_DIVISOR = 100
"""Maximum divisor whose multiples get bounds, compared by its significant digits (0.25 is 25, 3600
is 36). llguidance tracks a range and a divisor together, in one state for each remainder and digit:
a divisor of 10,000 exceeds its limit."""
_READ = frozenset(("type", MULTIPLE, *LOWER, *UPPER, *NOTES))
"""Keywords of the schemas that get bounds."""
_DEFINITIONS = "$defs"
_COMPANIONS = (_DEFINITIONS, "definitions", "$schema", "$id", "$anchor")
"""Root keywords that restrict no value. The bounds of a root stay in the root."""
Json = dict[str, Any]


def add_integer_bounds(schema: Json) -> Json:
    """Return the schema with bounds for each integer and multiple that lacks one.

    Equal schemas become references to one definition: llguidance compiles a range each time it is
    written, and 200 of them exceed its limit.
    """
    used_names = schema.get(_DEFINITIONS)
    used_names = used_names if isinstance(used_names, dict) else {}
    names: dict[str, str] = {}

    def name_of(integer: Json) -> str:
        """Return a name for the definition that the schema does not use itself."""
        text = json.dumps(integer, sort_keys=True)
        name = names.get(text, f"bounded-integer-{len(names)}")
        while text not in names and name in used_names:
            name += "-"
        return names.setdefault(text, name)

    def change(one: Json) -> Json:
        """Replace an unbounded integer or multiple with a reference to its bounded definition."""
        integer = _with_bounds(one)
        return one if integer is None else {"$ref": f"#/{_DEFINITIONS}/{name_of(integer)}"}

    root = {key: value for key, value in schema.items() if key not in _COMPANIONS}
    changed: Json = rewrite({**schema, **(_with_bounds(root) or {})}, change)
    if not names:
        return changed
    added = {name: json.loads(text) for text, name in names.items()}
    # Definitions of the schema and new ones share one object.
    return {**changed, _DEFINITIONS: {**(changed.get(_DEFINITIONS) or {}), **added}}


def _with_bounds(schema: Json) -> Json | None:
    """Return the schema of an integer or a multiple with bounds; None if it needs none.

    Bounds restrict numbers only, so the schema may allow other types too.
    """
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    divisor = schema.get(MULTIPLE)
    if divisor is None:
        numeric = "integer" in kinds and "number" not in kinds
    else:
        small = is_number(divisor) and int(significant_digits(divisor) or "0") <= MAX_DIVISOR
        numeric = small and not {"integer", "number"}.isdisjoint(kinds)
    if not numeric or not _READ.issuperset(schema):
        return None
    bounds = {key: schema[key] for key in (*LOWER, *UPPER) if schema.get(key) is not None}
    if not all(is_number(value) and abs(value) < LIMIT for value in bounds.values()):
        return None
    missing = {
        keywords[1]: limit
        for keywords, limit in ((LOWER, -LIMIT), (UPPER, LIMIT))
        if not any(key in bounds for key in keywords)
    }
    if not missing:
        return None
    multiple = {} if divisor is None else {MULTIPLE: divisor}
    return {"type": schema["type"], **multiple, **bounds, **missing}
