"""Tool calls as DeepSeek-V3 and R1 write them: a kind, NAME, and JSON in a code block, in tags."""

from lockstep.text.parsers.deepseek_v31 import AROUND, CALL, CALLS, OPENERS, OVER, SEPARATOR, TAGS
from lockstep.text.parsers.named_calls import NamedCalls

_BLOCK = "```json"
_KIND = f"function{SEPARATOR}"


class DeepSeekV3Parser(NamedCalls):
    """The name stands between the separator and the block."""

    SIGNS = (SEPARATOR, _BLOCK)
    OPENERS = OPENERS
    OVER = OVER
    ENDS_REASONING = (CALLS, CALL)
    SEPARATOR = _BLOCK
    FILLER = "`} \t\r\n"
    AROUND = AROUND
    TAGS = TAGS
    LEAD = _KIND
    TRAIL = f"\n{_BLOCK}\n"
    LAST = "\n```"

    def _named(self, header: str) -> tuple[str, str | None]:
        return header.partition(SEPARATOR)[2].strip(), None

    @classmethod
    def texts(cls) -> set[str]:
        """The separator is read too."""
        return {SEPARATOR, *super().texts()}
