"""Who asks: the id of an HTTP request, and the trace that it is part of.

All that works for the request finds it in CALLER: the tasks and threads that it starts inherit it.
"""

import re
import uuid
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

MOST_TRACE = 512
"""Characters of a header that names a trace; longer ones are left out."""
TRACE_HEADERS = ("traceparent", "tracestate")
"""https://www.w3.org/TR/trace-context"""
_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}", re.ASCII)
"""What an id may be, so that it can stand in a log line and in a header."""

Header = tuple[bytes, bytes]


@dataclass(frozen=True)
class Caller:
    """request_id: the one of X-Request-Id, or one of ours. trace: the headers of a trace, by their
    names, as they were sent."""

    request_id: str
    trace: Mapping[str, str]

    @classmethod
    def of(cls, headers: Iterable[Header]) -> "Caller":
        """The one that a request's headers tell of. A header that stands twice counts as none."""
        found: dict[str, list[str]] = {}
        for key, value in headers:
            name = key.decode("latin-1").lower()
            found.setdefault(name, []).append(value.decode("latin-1"))
        once = {name: values[0] for name, values in found.items() if len(values) == 1}
        named = once.get("x-request-id", "")
        known = _ID.fullmatch(named) is not None
        trace = {
            name: once[name]
            for name in TRACE_HEADERS
            if len(once.get(name, "")) in range(1, MOST_TRACE + 1)
        }
        return cls(named if known else uuid.uuid4().hex, trace)


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""Of the request that is worked for; None outside of any."""
