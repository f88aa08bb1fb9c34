"""The log on stderr, as text or JSON, with the id of the request that a line is about.

What a client sent stays within its line, and no client can fill the disk.
"""

import json
import logging
import time
from typing import Any, Literal

from lockstep.serve.http.request_context import CALLER
from lockstep.serve.telemetry.request_record import Record
from lockstep.serve.telemetry.throughput import THROUGHPUT

LogFormat = Literal["text", "json"]

LOGGERS = ("lockstep", "uvicorn", "opentelemetry")
"""Those whose lines, and those of all below them, are written."""
REQUESTS = "lockstep.requests"
"""The logger of requests that have ended, a line each."""
EVERY_LINE = (REQUESTS, THROUGHPUT, "uvicorn.access")
"""Loggers of which the same line may come again and again."""
SAME_SECONDS = 10.0
"""How long the same line of another logger is not written again."""
MOST_LINES = 100
"""Different lines of a level in so many seconds."""
LONGEST = 2000
"""Characters of a message."""
LONGEST_TRACEBACK = 20_000
DIGITS = 6
"""Of seconds, behind the point."""


def escaped(text: str) -> str:
    """The text on one line: control characters as escapes, at most LONGEST characters."""
    cut = text if len(text) <= LONGEST else text[:LONGEST] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


class OneLine(logging.Filter):
    """Escapes messages, notes whose request they are about, and drops one that was written a moment
    ago, or that comes after too many others of its level."""

    def __init__(self) -> None:
        super().__init__()
        self._since = -SAME_SECONDS
        self._written: dict[int, set[str]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        record.msg = escaped(record.getMessage())
        record.args = ()
        caller = CALLER.get()
        record.request_id = None if caller is None else caller.request_id
        return record.name in EVERY_LINE or self._is_new(record)

    def _is_new(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._since >= SAME_SECONDS:
            self._since = now
            self._written.clear()
        written = self._written.setdefault(record.levelno, set())
        if record.msg in written or len(written) >= MOST_LINES:
            return False
        written.add(record.msg)
        if len(written) == MOST_LINES:
            record.msg += f" (no more lines of this level for {SAME_SECONDS:g} s)"
        return True


def _told(record: logging.LogRecord) -> dict[str, Any]:
    """What a line says beside its message: the request's id, and fields of its own."""
    request_id = getattr(record, "request_id", None)
    named = {} if request_id is None else {"request_id": request_id}
    return named | getattr(record, "fields", {})


class _Lines(logging.Formatter):
    """Times in UTC, to a millisecond."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


class TextLines(_Lines):
    """A line of text; a traceback behind it is indented, so that it cannot be taken for lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        head = f"{self.formatTime(record)} {record.levelname} {record.name}: {record.message}"
        return " ".join([head, *(f"{name}={value}" for name, value in _told(record).items())])

    def formatException(self, ei: Any) -> str:
        """The traceback."""
        text = super().formatException(ei)[-LONGEST_TRACEBACK:]
        return "\n".join(f"    {line}" for line in text.splitlines())


class JsonLines(_Lines):
    """A JSON object a line: time, level, logger, message, request_id, and what belongs to it."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        said: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        said |= _told(record)
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)[-LONGEST_TRACEBACK:]
        return json.dumps(said, default=str)


FORMATTERS: dict[LogFormat, type[logging.Formatter]] = {"text": TextLines, "json": JsonLines}


def write_logs(form: LogFormat = "text", requests: bool = False) -> None:
    """Sends the lines of LOGGERS to stderr. requests: those of requests that have ended, too."""
    handler = logging.StreamHandler()
    handler.addFilter(OneLine())
    handler.setFormatter(FORMATTERS[form]())
    for name in LOGGERS:
        logging.getLogger(name).handlers = [handler]
    logging.getLogger(REQUESTS).setLevel(logging.INFO if requests else logging.WARNING)
    logging.getLogger(THROUGHPUT).setLevel(logging.INFO)


def log_request(record: Record) -> None:
    """Writes the line of a request that has ended. Of what was said it tells lengths alone."""
    log = logging.getLogger(REQUESTS)
    if not log.isEnabledFor(logging.INFO):
        return
    fields: dict[str, Any] = {
        "id": record.id,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "draft_tokens": record.draft_tokens,
        "accepted_tokens": record.accepted_tokens,
        "finish_reasons": ",".join(record.finish_reasons),
    }
    fields |= {
        f"{name}_seconds": round(seconds, DIGITS) for name, seconds in record.latencies.items()
    }
    log.info(
        "ended" if record.error is None else "ended early: %s",
        *(() if record.error is None else (record.error,)),
        extra={"fields": fields},
    )
