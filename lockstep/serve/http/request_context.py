"""Identity of an HTTP request: its id, and the trace that it belongs to.

Tasks and threads that work for the request inherit REQUEST_CONTEXT.
"""

import re
import uuid
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

MAX_TRACE_CHARACTERS = 512
"""Maximum characters of a trace header; longer ones are ignored."""
TRACE_HEADERS = ("traceparent", "tracestate")
"""Source: https://www.w3.org/TR/trace-context"""
_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}", re.ASCII)
"""Ids that are safe in a log line and in a header."""

Header = tuple[bytes, bytes]


@dataclass(frozen=True)
class RequestContext:
    """Id and trace of a request.

    request_id: value of X-Request-Id if it is valid, else a generated one.
    trace: trace headers by name, as they were sent.
    owner: digest of the API key, set once it is checked; "" without keys.
    """

    request_id: str
    trace: Mapping[str, str]
    owner: str = ""

    @classmethod
    def from_headers(cls, headers: Iterable[Header]) -> "RequestContext":
        """Read the context from a request's headers. A repeated header counts as absent."""
        values: dict[str, list[str]] = {}
        for key, value in headers:
            values.setdefault(key.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        single = {name: texts[0] for name, texts in values.items() if len(texts) == 1}
        sent_id = single.get("x-request-id", "")
        trace = {
            name: single[name]
            for name in TRACE_HEADERS
            if 1 <= len(single.get(name, "")) <= MAX_TRACE_CHARACTERS
        }
        return cls(sent_id if _ID.fullmatch(sent_id) else uuid.uuid4().hex, trace)


REQUEST_CONTEXT: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)
"""Context of the request that the present task or thread works for; None for no request."""


def current_owner() -> str:
    """Return the digest of the API key of the present request; "" without keys."""
    context = REQUEST_CONTEXT.get()
    return "" if context is None else context.owner
