"""Log lines on stderr, as text or JSON, with the id of their request.

Text of a client cannot begin a new line, and no client can fill the disk with repeated lines.
"""

import json
import logging
import time
from typing import Any, Literal

from lockstep.serve.http.request_context import REQUEST_CONTEXT
from lockstep.serve.telemetry.request_record import RequestRecord
from lockstep.serve.telemetry.throughput import THROUGHPUT_LOGGER

LogFormat = Literal["text", "json"]

LOGGERS = ("lockstep", "uvicorn", "opentelemetry")
"""Loggers whose lines are written, with those of their children."""
REQUEST_LOGGER = "lockstep.requests"
"""Logger of requests that have ended, one line each."""
UNFILTERED_LOGGERS = (REQUEST_LOGGER, THROUGHPUT_LOGGER, "uvicorn.access")
"""Loggers that may repeat a line."""
REPEAT_SECONDS = 10.0
"""Time for which the other loggers drop a repeated line."""
MAX_LINES = 100
"""Maximum different lines of a level in that time."""
MAX_CHARACTERS = 2000
"""Maximum characters of a message."""
MAX_TRACEBACK_CHARACTERS = 20_000
LATENCY_DIGITS = 6
"""Decimal places of seconds."""


def escape_line(text: str) -> str:
    """Return a text on one line: at most MAX_CHARACTERS, with control characters as escapes."""
    cut = text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


class LineFilter(logging.Filter):
    """Filter that escapes messages, adds the request's id, and drops repeated lines.

    It also drops lines of a level after the first MAX_LINES of a period.
    """

    def __init__(self) -> None:
        super().__init__()
        self._period_start = -REPEAT_SECONDS
        self._written: dict[int, set[str]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        record.msg = escape_line(record.getMessage())
        record.args = ()
        context = REQUEST_CONTEXT.get()
        record.request_id = None if context is None else context.request_id
        return record.name in UNFILTERED_LOGGERS or self._is_new(record)

    def _is_new(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._period_start >= REPEAT_SECONDS:
            self._period_start = now
            self._written.clear()
        written = self._written.setdefault(record.levelno, set())
        if record.msg in written or len(written) >= MAX_LINES:
            return False
        written.add(record.msg)
        if len(written) == MAX_LINES:
            record.msg += f" (no more lines of this level for {REPEAT_SECONDS:g} s)"
        return True


def _extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a line besides its message: the request's id, and the record's own."""
    request_id = getattr(record, "request_id", None)
    fields = {} if request_id is None else {"request_id": request_id}
    return fields | getattr(record, "fields", {})


class _UtcFormatter(logging.Formatter):
    """Formatter with times in UTC, in milliseconds."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


class TextFormatter(_UtcFormatter):
    """Formatter of text lines. A traceback is indented, so that it cannot look like log lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without a traceback."""
        head = f"{self.formatTime(record)} {record.levelname} {record.name}: {record.message}"
        fields = _extra_fields(record)
        return " ".join([head, *(f"{name}={value}" for name, value in fields.items())])

    def formatException(self, ei: Any) -> str:
        """Return the traceback."""
        text = super().formatException(ei)[-MAX_TRACEBACK_CHARACTERS:]
        return "\n".join(f"    {line}" for line in text.splitlines())


class JsonFormatter(_UtcFormatter):
    """Formatter of JSON lines: time, level, logger, message, request_id and further fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _extra_fields(record)
        if record.exc_info:
            traceback = self.formatException(record.exc_info)
            line["exception"] = traceback[-MAX_TRACEBACK_CHARACTERS:]
        return json.dumps(line, default=str)


FORMATTERS: dict[LogFormat, type[logging.Formatter]] = {
    "text": TextFormatter,
    "json": JsonFormatter,
}


def configure_logs(log_format: LogFormat = "text", log_requests: bool = False) -> None:
    """Write the lines of LOGGERS to stderr. log_requests: also those of REQUEST_LOGGER."""
    handler = logging.StreamHandler()
    handler.addFilter(LineFilter())
    handler.setFormatter(FORMATTERS[log_format]())
    for name in LOGGERS:
        logging.getLogger(name).handlers = [handler]
    logging.getLogger(REQUEST_LOGGER).setLevel(logging.INFO if log_requests else logging.WARNING)
    logging.getLogger(THROUGHPUT_LOGGER).setLevel(logging.INFO)


def log_request(record: RequestRecord) -> None:
    """Log a request that has ended. The line has lengths, but no text of prompt or answer."""
    log = logging.getLogger(REQUEST_LOGGER)
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
        f"{name}_seconds": round(seconds, LATENCY_DIGITS)
        for name, seconds in record.latencies.items()
    }
    log.info(
        "ended" if record.error is None else "ended early: %s",
        *(() if record.error is None else (record.error,)),
        extra={"fields": fields},
    )
