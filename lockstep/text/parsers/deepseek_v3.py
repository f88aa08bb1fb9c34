"""Tool calls of DeepSeek-V3 and R1: a kind, NAME, and JSON in a code block, in tags."""

from lockstep.text.parsers.deepseek_v31 import (
    AROUND,
    CALL,
    CALLS,
    CLOSERS,
    OPENERS,
    SEPARATOR,
    TAGS,
)
from lockstep.text.parsers.named_calls import NamedCalls

_BLOCK = "```json"
_KIND = f"function{SEPARATOR}"


class DeepSeekV3Parser(NamedCalls):
    """Parser of calls whose name is between the separator and the code block."""

    SIGNS = (SEPARATOR, _BLOCK)
    OPENERS = OPENERS
    CLOSERS = CLOSERS
    ENDS_REASONING = (CALLS, CALL)
    SEPARATOR = _BLOCK
    FILLER = "`} \t\r\n"
    AROUND = AROUND
    TAGS = TAGS
    LEAD = _KIND
    TRAIL = f"\n{_BLOCK}\n"
    LAST = "\n```"

    def _parse_header(self, header: str) -> tuple[str, str | None]:
        return header.partition(SEPARATOR)[2].strip(), None

    @classmethod
    def texts(cls) -> set[str]:
        """Return the tags and the separator."""
        return {SEPARATOR, *super().texts()}
