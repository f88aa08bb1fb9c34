"""Log lines: what a client sent stays within its line, and no client can fill the disk."""

import logging
import time

LOGGERS = ("lockstep", "uvicorn", "uvicorn.error", "uvicorn.access")
SAME_SECONDS = 10.0
"""How long the same line is not written again."""
LONGEST = 2000


def escaped(text: str) -> str:
    """The text on one line: control characters as escapes, at most LONGEST characters."""
    cut = text if len(text) <= LONGEST else text[:LONGEST] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


class OneLine(logging.Filter):
    """Escapes messages, and drops one that was written a moment ago."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        if record.name == "uvicorn.access":
            record.args = tuple(escaped(a) if isinstance(a, str) else a for a in record.args or ())
            return True
        record.msg = escaped(record.getMessage())
        record.args = ()
        now = time.monotonic()
        if now - self._last.get(record.msg, -SAME_SECONDS) < SAME_SECONDS:
            return False
        if len(self._last) >= 100:
            self._last.clear()
        self._last[record.msg] = now
        return True


def quiet_logs() -> None:
    """Puts the filter in front of the server's loggers."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(f, OneLine) for f in logger.filters):
            logger.addFilter(OneLine())
