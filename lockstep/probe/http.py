"""HTTP client that does not trust the server: every reply is bounded in bytes, events and time.

A reply that breaks a bound or the protocol becomes a Failure with a kind from a fixed list.
"""

import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lockstep.errors import ConfigError, choice_error

if TYPE_CHECKING:
    import httpx

MAX_BYTES = 16 << 20
"""Maximum bytes of one reply."""
MAX_EVENTS = 50_000
"""Maximum events of one stream; a server that streams more never ends."""
MAX_RETRIES = 3
"""Maximum repeats of a request that got 429 or 503."""
MAX_RETRY_AFTER = 20.0
"""Maximum seconds to wait before a repeat, whatever Retry-After says."""
MIN_SECTION = 60.0
"""Minimum seconds of a section, unless the whole budget ends before."""
EXCERPT = 200
"""Characters of a server's text that a report quotes."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character, which no file, terminal or request can have."""
ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

REFUSED = "refused"
OVERLOADED = "overloaded"
SERVER_ERROR = "server error"
FAULTS = {
    SERVER_ERROR: "the server answers with status 5xx",
    "connection": "the server closes or refuses connections",
    "timeout": "a reply takes longer than --timeout",
    "endless stream": f"a stream has more than {MAX_EVENTS:,} events",
    "too large": f"a reply has more than {MAX_BYTES >> 20} MiB",
    "content type": "a reply has another content type than its API defines",
    "content encoding": "a reply is compressed although the request forbids it",
    "not JSON": "a reply is not a JSON object",
    "broken stream": "an event of a stream is not a JSON object",
    "unfinished stream": "a stream ends without [DONE]",
    "error in a stream": "a stream that began with status 200 reports an error",
    "redirect": "the server redirects API requests",
}
"""Meaning of each kind of failure that is the server's fault."""


class BudgetSpentError(Exception):
    """End of the probe's budget: its text is "requests" or "seconds"."""


class Budget:
    """Requests and seconds that the probe may use. Threads share it."""

    def __init__(self, max_requests: int, seconds: float) -> None:
        self.max_requests = max_requests
        self.used = 0
        self.deadline = time.monotonic() + seconds
        self.section_deadline = self.deadline
        self._lock = threading.Lock()

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the current section must end."""
        return min(self.deadline, self.section_deadline) - time.monotonic()

    def take(self) -> None:
        """Count one request. Raises BudgetSpentError if none is left."""
        with self._lock:
            if self.used >= self.max_requests:
                raise BudgetSpentError("requests")
            if self.seconds_left <= 0:
                raise BudgetSpentError("seconds")
            self.used += 1

    def begin_section(self, share: float) -> None:
        """Give the next section this share of the remaining seconds, or MIN_SECTION of them."""
        now = time.monotonic()
        # A small share would end a section of a slow server before its first answer.
        self.section_deadline = now + max(share * (self.deadline - now), MIN_SECTION)


@dataclass(frozen=True)
class Failure:
    """Reply without an answer. kind: REFUSED, OVERLOADED or a key of FAULTS."""

    kind: str
    detail: str
    status: int | None = None


@dataclass
class Reply:
    """Reply of the server; times in seconds from sending.

    events: JSON objects of the stream, or the only object of a plain reply. event_times: arrival of
    each event. aborted: whether the client closed the stream before its end.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    event_times: list[float] = field(default_factory=list)
    seconds: float = 0.0
    failure: Failure | None = None
    aborted: bool = False


class _ReplyError(Exception):
    """Violation of a bound or of the protocol while a reply is read."""

    def __init__(self, kind: str, detail: str, status: int | None = None) -> None:
        super().__init__(detail)
        self.failure = Failure(kind, detail, status)


class Server:
    """Address of a server, and the httpx client that all threads share.

    timeout: maximum seconds of one request, from sending to the last byte.
    """

    def __init__(self, url: str, key: str | None, timeout: float, budget: Budget) -> None:
        import httpx

        parts = urlsplit(url)
        url_error = choice_error(
            ConfigError,
            "url",
            _without_password(url),
            "http://host:port or https://host, with /v1 or without",
            "Pass the server's address; a key goes into --api-key.",
        )
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise url_error
        if key is not None and not (key and key.isascii() and key.isprintable()):
            raise ConfigError(
                "api_key is empty or has characters that a header cannot contain; allowed: "
                "printable ASCII. Pass the server's key."
            )
        self.root = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self.url = self.root + "/v1"
        self.budget = budget
        self._timeout = timeout
        self._key = key
        self._headers = {"Accept-Encoding": "identity"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        try:
            self._client = httpx.Client(
                headers=self._headers,
                # A kept connection that the server closes meanwhile would look like a fault.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                verify=ssl.create_default_context(),
                trust_env=False,
                follow_redirects=False,
            )
            httpx.URL(self.url)
        except (httpx.InvalidURL, ValueError):
            raise url_error from None

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def redact(self, text: str) -> str:
        """Return a text of the server without the API key, which it may echo."""
        return text.replace(self._key, "[API key]") if self._key else text

    def get(self, path: str) -> Reply:
        """Get a JSON object below /v1."""
        return self._request("GET", self.url + path, None, None)

    def get_text(self, path: str) -> str | None:
        """Return a text outside of /v1 such as /metrics, or None if the server has none."""
        import httpx

        try:
            self.budget.take()
            with self._client.stream("GET", self.root + path, timeout=10.0) as response:
                if response.status_code != 200:
                    return None
                return self._body(response, time.monotonic() + 10.0).decode(errors="replace")
        except (httpx.HTTPError, _ReplyError):
            return None

    def post(
        self,
        path: str,
        body: dict[str, Any],
        keep: Callable[[int], bool] | None = None,
    ) -> Reply:
        """Post JSON below /v1, and read the reply or its stream.

        keep: called with the number of events; the stream is closed once it returns False.
        Raises BudgetSpentError.
        """
        return self._request("POST", self.url + path, body, keep)

    def _request(
        self,
        method: str,
        url: str,
        body: dict[str, Any] | None,
        keep: Callable[[int], bool] | None,
    ) -> Reply:
        for retry in range(MAX_RETRIES + 1):
            self.budget.take()
            reply, wait = self._send(method, url, body, keep)
            if wait is None or retry == MAX_RETRIES or wait > self.budget.seconds_left:
                return reply
            time.sleep(wait)
        return reply

    def _send(
        self,
        method: str,
        url: str,
        body: dict[str, Any] | None,
        keep: Callable[[int], bool] | None,
    ) -> tuple[Reply, float | None]:
        """Send once. The second value is the wait in seconds before a repeat, if one is due."""
        import httpx

        started = time.monotonic()
        limit = min(self._timeout, max(self.budget.seconds_left, 0.1))
        reply = Reply()
        wait = None
        try:
            timeout = httpx.Timeout(limit, connect=min(limit, 10.0))
            with self._client.stream(method, url, json=body, timeout=timeout) as response:
                wait = _retry_wait(response)
                is_stream = bool(body and body.get("stream"))
                self._read(response, reply, started, limit, is_stream, keep)
        except _ReplyError as error:
            reply.failure = error.failure
        except httpx.TimeoutException:
            reply.failure = Failure("timeout", f"no complete reply within {limit:.0f} s")
        except (httpx.HTTPError, OSError) as error:
            text = self.redact(f"{type(error).__name__}: {error}"[:EXCERPT])
            reply.failure = Failure("connection", text)
        reply.seconds = time.monotonic() - started
        timed_out = reply.failure is not None and reply.failure.kind == "timeout"
        if timed_out and limit < self._timeout:
            # The budget ended the request, not the server.
            raise BudgetSpentError("seconds")
        return reply, wait

    def _read(
        self,
        response: "httpx.Response",
        reply: Reply,
        started: float,
        limit: float,
        is_stream: bool,
        keep: Callable[[int], bool] | None,
    ) -> None:
        """Read a response into the reply. Raises _ReplyError."""
        status = response.status_code
        content_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if response.headers.get("content-encoding", "identity").lower() not in ("identity", ""):
            raise _ReplyError("content encoding", response.headers["content-encoding"][:EXCERPT])
        if status != 200:
            self._raise_status(response, started + limit, content_type)
        expected = "text/event-stream" if is_stream else "application/json"
        if content_type != expected:
            text = self.redact(self._body(response, started + limit).decode(errors="replace"))
            raise _ReplyError(
                "content type", f"{content_type or 'none'} instead of {expected}: {text[:EXCERPT]}"
            )
        if not is_stream:
            reply.events.append(self._object(self._body(response, started + limit), "not JSON"))
            reply.event_times.append(time.monotonic() - started)
            return
        for data in _events(self._chunks(response, started + limit)):
            if data == b"[DONE]":
                return
            event = self._object(data, "broken stream")
            if "error" in event and event["error"]:
                text = self.redact(_json_text(event["error"]))[:EXCERPT]
                raise _ReplyError("error in a stream", text)
            reply.events.append(event)
            reply.event_times.append(time.monotonic() - started)
            if len(reply.events) > MAX_EVENTS:
                raise _ReplyError("endless stream", f"{MAX_EVENTS:,} events and no end")
            if keep is not None and not keep(len(reply.events)):
                reply.aborted = True
                return
        raise _ReplyError("unfinished stream", f"{len(reply.events)} events, then the end")

    def _raise_status(self, response: "httpx.Response", deadline: float, content_type: str) -> None:
        """Raise _ReplyError for a status other than 200."""
        status = response.status_code
        text = self.redact(self._body(response, deadline).decode(errors="replace"))
        if 300 <= status < 400:
            raise _ReplyError("redirect", f"status {status}", status)
        message = _error_message(text) or f"{content_type or 'no content type'}: {text}"
        kind = REFUSED
        if status in (429, 503):
            kind = OVERLOADED
        elif status >= 500:
            kind = SERVER_ERROR
        raise _ReplyError(kind, f"status {status}: {message[:EXCERPT]}", status)

    def _body(self, response: "httpx.Response", deadline: float) -> bytes:
        return b"".join(self._chunks(response, deadline))

    def _chunks(self, response: "httpx.Response", deadline: float) -> Iterator[bytes]:
        """Yield the bytes of a response. Raises _ReplyError beyond MAX_BYTES or the deadline."""
        size = 0
        for chunk in response.iter_raw():
            size += len(chunk)
            if size > MAX_BYTES:
                raise _ReplyError("too large", f"more than {MAX_BYTES >> 20} MiB")
            # A read timeout alone would let a server drip one byte at a time.
            if time.monotonic() > deadline:
                raise _ReplyError("timeout", "bytes still arrived at the end of the time limit")
            yield chunk

    def _object(self, data: bytes, kind: str) -> dict[str, Any]:
        try:
            value = json.loads(data, parse_constant=_no_constant)
            if ESCAPED_SURROGATE.search(data):
                value = json.loads(_without_surrogates(json.dumps(value, ensure_ascii=False)))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            text = self.redact(data[: 4 * EXCERPT].decode(errors="replace"))
            raise _ReplyError(kind, text[:EXCERPT] or "empty")
        return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _without_password(url: str) -> str:
    """Return a URL without its user and password."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}...@{rest.rpartition('@')[2]}" if "@" in rest else url


def _retry_wait(response: "httpx.Response") -> float | None:
    """Return the seconds to wait before a repeat, or None if the request is not to be repeated."""
    if response.status_code not in (429, 503):
        return None
    try:
        wait = float(response.headers.get("retry-after", "1"))
    except ValueError:
        # An HTTP date: the server's clock is not trusted.
        wait = 1.0
    return min(max(wait, 0.0), MAX_RETRY_AFTER) if wait == wait else 1.0


def _error_message(text: str) -> str | None:
    """Return the message of an error object, in any of the usual forms."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    while isinstance(value, dict):
        inner = value.get("error", value.get("message", value.get("detail")))
        if inner is None:
            return None
        value = inner
    return _without_surrogates(value) if isinstance(value, str) else _json_text(value)


def _without_surrogates(text: str) -> str:
    """Return a text with U+FFFD for each lone surrogate, which JSON can escape."""
    return SURROGATE.sub("\ufffd", text)


def _json_text(value: Any) -> str:
    """Return a JSON value as text. A value that could be parsed may be too deep to be written."""
    try:
        return json.dumps(value)
    except RecursionError:
        return "nested too deeply"


def _events(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the data of server-sent events; comments and other fields are skipped."""
    data: list[bytes] = []
    for line in _lines(chunks):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            yield b"\n".join(data).strip()
            data = []
    if data:
        yield b"\n".join(data).strip()


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield lines without their ends. The last one need not end."""
    # Appended to: a line of many small chunks is not copied again for each of them.
    line = bytearray()
    for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line += end
            yield bytes(line).rstrip(b"\r")
            line.clear()
        line += rest
    if line:
        yield bytes(line).rstrip(b"\r")
