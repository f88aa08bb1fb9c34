"""Patterns with look-around that libraries write, as equal patterns without it.

llguidance knows no look-around. Zod 4 writes it into the JSON schema of every email and duration,
and so do the tools of many MCP servers.
"""

from typing import Any

from lockstep.text.grammars.rewriting import rewrite

_ATOM = "[A-Za-z0-9_'+-]"
_EMAIL = rf"^(?:{_ATOM}+\.)*{_ATOM}*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{{2,}}$"
_SECONDS = r"[0-9]+(?:[.,][0-9]+)?S"
_TIME = rf"T(?:[0-9]+H(?:[0-9]+M)?(?:{_SECONDS})?|[0-9]+M(?:{_SECONDS})?|{_SECONDS})"
_DATE = "(?:[0-9]+Y(?:[0-9]+M)?(?:[0-9]+D)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
EQUAL_PATTERNS = {
    # z.email() of Zod 4.
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
    r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": _EMAIL,
    # email() of zod-to-json-schema.
    r"^(?!\.)(?!.*\.\.)([a-zA-Z0-9_'+\-\.]*)[a-zA-Z0-9_+-]"
    r"@([a-zA-Z0-9][a-zA-Z0-9\-]*\.)+[a-zA-Z]{2,}$": _EMAIL,
    # z.iso.duration() of Zod 4.
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": f"^P(?:[0-9]+W|{_DATE}(?:{_TIME})?|{_TIME})$",
}
"""Pattern with look-around -> a pattern without it that matches the same texts."""


def replace_lookarounds(schema: Any) -> Any:
    """Return the schema with the equal patterns of EQUAL_PATTERNS."""

    def change(node: dict[str, Any]) -> dict[str, Any]:
        pattern = node.get("pattern")
        if not isinstance(pattern, str) or pattern not in EQUAL_PATTERNS:
            return node
        return {**node, "pattern": EQUAL_PATTERNS[pattern]}

    return rewrite(schema, change)
