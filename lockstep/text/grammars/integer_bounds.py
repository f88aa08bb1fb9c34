"""Bounds of integers and of multiples that a JSON schema leaves unbounded.

Readers with 64-bit integers fail at larger ones and Python at 4,300 digits, and a model that
repeats a digit would fill its answer with it. Other numbers that may have a fraction are not
bounded: llguidance 1.9.1 writes no exponent within bounds, so that 6e23 could not come. Their
digits are limited (see number_limits.py). That would not do for a multiple, which cannot end at any
digit.
"""

import json
from typing import Any

from lockstep.text.grammars.numbers import LOWER, UPPER, is_number, significant
from lockstep.text.grammars.rewriting import NOTES, rewritten

LIMIT = 9 * 10**18
"""Integers have a smaller magnitude: a little below 2^63, and of few digits, so that the regular
expression of the range is short."""
MULTIPLE = "multipleOf"
MAX_DIVISOR = 100
"""Maximum of a divisor whose multiples get bounds, as the whole number of its digits without zeros
at the end (0.25 is 25, 3600 is 36). llguidance follows a range and a divisor together, in a state
for each remainder and digit: for 10,000 they are more than it allows."""
_READ = frozenset(("type", MULTIPLE, *LOWER, *UPPER, *NOTES))
_DEFINITIONS = "$defs"
_COMPANIONS = (_DEFINITIONS, "definitions", "$schema", "$id", "$anchor")
"""Keywords of a root that restrict no value. The bounds of a root stay in the root."""
Json = dict[str, Any]


def with_bounded_integers(schema: Json) -> Json:
    """Return the schema with bounds for each integer and multiple that lacks one.

    Equal ones become references to one definition: llguidance compiles a range for each place
    where it is written, and 200 of them take more than it allows.
    """
    taken = schema.get(_DEFINITIONS)
    taken = taken if isinstance(taken, dict) else {}
    names: dict[str, str] = {}

    def name_of(integer: Json) -> str:
        """Return the name of a definition that no other schema has."""
        text = json.dumps(integer, sort_keys=True)
        name = names.get(text, f"bounded-integer-{len(names)}")
        while text not in names and name in taken:
            name += "-"
        return names.setdefault(text, name)

    def change(one: Json) -> Json:
        integer = _bounded(one)
        return one if integer is None else {"$ref": f"#/{_DEFINITIONS}/{name_of(integer)}"}

    root = {key: value for key, value in schema.items() if key not in _COMPANIONS}
    changed: Json = rewritten({**schema, **(_bounded(root) or {})}, change)
    if not names:
        return changed
    added = {name: json.loads(text) for text, name in names.items()}
    # Definitions of the schema and new ones share one object.
    return {**changed, _DEFINITIONS: {**(changed.get(_DEFINITIONS) or {}), **added}}


def _bounded(schema: Json) -> Json | None:
    """Return the schema of an integer or a multiple with bounds; None where it needs none.

    Bounds restrict numbers alone, so that the schema may allow other types too.
    """
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    divisor = schema.get(MULTIPLE)
    if divisor is None:
        numeric = "integer" in kinds and "number" not in kinds
    else:
        small = is_number(divisor) and int(significant(divisor) or "0") <= MAX_DIVISOR
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
    own = {} if divisor is None else {MULTIPLE: divisor}
    return {"type": schema["type"], **own, **bounds, **missing}
