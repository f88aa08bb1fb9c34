"""Formats of dates and times as patterns: llguidance 1.9.1 allows days that do not exist.

Its grammar of `date` and `date-time` allows February 29 in every year, that of `time` and
`date-time` the second 60 in every minute. Clients that parse such an answer fail. Leap seconds are
left out: they are announced only months ahead, and Python's datetime has none.
"""

from typing import Any

from lockstep.text.grammars.rewriting import rewrite

# Years that 4 divides but not 100, and years that 400 divides.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:"
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_HOUR_AND_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_HOUR_AND_MINUTE})"
PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
}
"""Format -> pattern of its texts (RFC 3339) without leap seconds."""
LOCAL_TIME = r"^(?:[01]\d|2[0-3]):[0-5]\d"
"""Beginning of the pattern that Zod writes with the format `time`. Its times have no time zone, so
that no text would match both."""
Json = dict[str, Any]


def replace_calendar_formats(schema: Json) -> Json:
    """Return the schema with patterns instead of the formats of PATTERNS."""

    def change(node: Json) -> Json:
        form = node.get("format")
        if not isinstance(form, str) or form not in PATTERNS:
            return node
        remaining = {key: value for key, value in node.items() if key != "format"}
        if form == "time" and str(node.get("pattern")).startswith(LOCAL_TIME):
            return remaining
        pattern = {"pattern": PATTERNS[form]}
        if "pattern" not in remaining:
            return remaining | pattern
        return {**remaining, "allOf": [*remaining.get("allOf", ()), pattern]}

    changed: Json = rewrite(schema, change)
    return changed
