"""The bound of what must match together: llguidance follows a conjunction of n regexes through 2^n
combinations, and no limit of its own counts them.

14 take 0.03 s to compile, 20 take 2 s, 32 do not end. Patterns of the names of properties are told
apart pair by pair: 100 take 0.05 s, 300 take 4 s.
"""

import re

from lockstep.errors import RequestError
from lockstep.text.grammars.multiples import combines, objects_of_schemas

MOST_TOGETHER = 12
"""Regexes that one text may have to match, or not to match."""
MOST_NAMES = 64
"""Patterns in a patternProperties, and all of them where schemas are combined."""
LITERAL = re.compile(r'(?://|#)[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/', re.DOTALL)
"""A comment, a text or a regex in Lark; a regex may go over several lines."""
OPERATOR = re.compile(r"[&~]")
"""And, and not, of terminals in llguidance's Lark."""


def check_conjunctions(source: str, field: str) -> None:
    """Raises RequestError where schemas of a grammar in llguidance's Lark join too many regexes."""
    for objects in objects_of_schemas(source):
        joined = any(map(combines, objects))
        names = [len(_named(one.get("patternProperties"))) for one in objects]
        patterns = sum("pattern" in one for one in objects)
        where = " in schemas that are combined" if joined else ""
        _check(patterns if joined else 0, MOST_TOGETHER, f"'pattern'{where}", field)
        _check((sum if joined else max)(names), MOST_NAMES, f"'patternProperties'{where}", field)


def check_operators(source: str, field: str) -> None:
    """Raises RequestError where terminals that a client wrote join too many regexes."""
    operators = OPERATOR.findall(LITERAL.sub("", source))
    _check(len(operators), MOST_TOGETHER, "the operators & and ~", field)


def _check(count: int, most: int, what: str, field: str) -> None:
    if count > most:
        raise RequestError(
            f"{field} has {count} of {what}; allowed: at most {most}, since the work to obey them "
            "grows exponentially. Write fewer.",
            field,
        )


def _named(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}
