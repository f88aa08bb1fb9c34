"""Bounds of conjunctions: llguidance follows n conjoined regexes through 2^n combinations.

None of its limits counts them: 14 take 0.03 s to compile, 20 take 2 s, 32 do not finish. Patterns
of property names are compared in pairs: 100 take 0.05 s, 300 take 4 s.
"""

import re

from lockstep.errors import RequestError
from lockstep.text.grammars.calendar_formats import PATTERNS
from lockstep.text.grammars.multiples import combines, objects_of_schemas

MAX_CONJOINED = 12
"""Maximum regexes that one text may have to match, or not to match."""
MAX_NAME_PATTERNS = 64
"""Maximum patterns in one patternProperties, or in all of them if schemas are combined."""
LITERAL = re.compile(r'(?://|#)[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/', re.DOTALL)
"""A comment, a string or a regex in Lark. A regex may span lines."""
OPERATOR = re.compile(r"[&~]")
"""Conjunction and negation of terminals in llguidance's Lark."""


def check_conjunctions(source: str, field: str) -> None:
    """Raise RequestError if the schemas of a Lark grammar conjoin too many regexes."""
    for objects in objects_of_schemas(source):
        joined = any(map(combines, objects))
        names = [len(_as_dict(part.get("patternProperties"))) for part in objects]
        # The patterns of dates conjoin no more than the formats that they replace.
        patterns = sum(part.get("pattern", "") not in ("", *PATTERNS.values()) for part in objects)
        where = " in schemas that are combined" if joined else ""
        _check(patterns if joined else 0, MAX_CONJOINED, f"'pattern'{where}", field)
        _check(
            (sum if joined else max)(names), MAX_NAME_PATTERNS, f"'patternProperties'{where}", field
        )


def check_operators(source: str, field: str) -> None:
    """Raise RequestError if terminals that a client wrote conjoin too many regexes."""
    operators = OPERATOR.findall(LITERAL.sub("", source))
    _check(len(operators), MAX_CONJOINED, "the operators & and ~", field)


def _check(count: int, limit: int, what: str, field: str) -> None:
    if count > limit:
        raise RequestError(
            f"{field} has {count} of {what}; allowed: at most {limit}, since the work to obey them "
            "grows exponentially. Use fewer.",
            field,
        )


def _as_dict(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}
