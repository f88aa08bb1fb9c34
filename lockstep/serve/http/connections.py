"""HTTP connections with limits of time, size and number.

The limits apply to the head of a request, to the time in which a client reads a response, to the
rest of a refused body, and to the number of connections. If there are too many, the one that has
been idle for longest is closed.
"""

import asyncio
import math
import re
from typing import Any

import h11
from pydantic_core import to_json
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from lockstep.serve.http.errors import RETRY_AFTER, error_object

HEAD_SECONDS = 10.0
"""Maximum time in which a request's head must arrive, also the first one of a connection."""
WRITE_SECONDS = 60.0
"""Maximum time in which a client reads too little for more of a response to be sent."""
DROP_SECONDS = 30.0
"""Maximum time for reading and discarding the rest of a body after the response."""
DROP_IDLE_SECONDS = 5.0
"""Maximum pause in the rest of a body."""
MAX_DROPPED_BYTES = 64 << 20
"""Default maximum bytes of the rest of a body."""
MAX_HEAD_BYTES = 16_384
"""Maximum bytes of a request's head."""
LONG_HEAD = f"a head of more than {MAX_HEAD_BYTES} bytes; send fewer or shorter headers"
"""Reason why a request with a larger head is refused."""
MAX_CHUNKS = 16_384
"""Maximum chunks of a body. Each takes about 5 us, however short it is."""
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
_ABSOLUTE_TARGET = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)
"""Pattern of a request target in absolute form: the host with its port, the path with its query."""
_LINE_BYTES = 4
"""Bytes of a header line besides its name and value: the colon, a space, CR and LF."""


class _BoundedConnection(h11.Connection):
    """h11's connection with limits of heads and chunks, and a fast path for chunks of responses.

    fault_status, fault: status and message of the response to an invalid request. is_head: the
    latest request was HEAD, whose response has no body.
    """

    def __init__(self, max_dropped_bytes: int = MAX_DROPPED_BYTES) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._max_dropped_bytes = max_dropped_bytes
        self.fault_status = 400
        self.fault = ""
        self.is_head = False
        self._chunks = 0
        self._dropped_bytes = 0
        self._in_chunks = False

    def next_event(self) -> Any:
        """Return the next event. Raises RemoteProtocolError."""
        in_head = self.their_state is h11.IDLE
        try:
            event = super().next_event()
            self._check(event)
            if isinstance(event, h11.Request):
                event = _in_origin_form(event)
        except h11.RemoteProtocolError as error:
            # Only errors of a head have different statuses: h11 gives an overlong chunk line 431
            # too.
            self.fault_status = error.error_status_hint if in_head else 400
            # h11 does not say what is too long.
            reason = LONG_HEAD if self.fault_status == 431 else error
            self.fault = f"the request cannot be read: {reason}."
            raise
        return event

    def _check(self, event: Any) -> None:
        """Raise RemoteProtocolError for a version, a head or a body that is not allowed."""
        if isinstance(event, h11.Request):
            self.is_head = event.method == b"HEAD"
            self._chunks = 0
            self._dropped_bytes = 0
            if not event.http_version.startswith(b"1."):
                version = event.http_version.decode("ascii")
                raise h11.RemoteProtocolError(
                    f"HTTP of version {version}; allowed: 1.0 and 1.1", 505
                )
            # h11 bounds incomplete heads only: one that comes in a single read may be larger.
            if _head_bytes(event) > MAX_HEAD_BYTES:
                raise h11.RemoteProtocolError(LONG_HEAD, 431)
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            if self._chunks > MAX_CHUNKS:
                raise h11.RemoteProtocolError(f"more than {MAX_CHUNKS} chunks")
            if self.our_state is h11.DONE:  # the response is complete: uvicorn drops the data
                self._dropped_bytes += len(event.data)
                if self._dropped_bytes > self._max_dropped_bytes:
                    raise h11.RemoteProtocolError("too much of a body after its answer")

    def send(self, event: Any) -> Any:
        """Return an event as bytes. Raises LocalProtocolError."""
        # Data of a chunked body change no state of h11, so each event can become a chunk directly.
        # An exact type check: it is faster than isinstance, and h11 has no subclasses.
        if type(event) is h11.Data and self._in_chunks and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        sent = super().send(event)
        if type(event) is h11.Response:
            self._in_chunks = _CHUNKED in sent.lower()
        return sent

    @property
    def may_receive_more(self) -> bool:
        """True if the client may still be sending.

        Closing now could reset the connection, and the client would lose the response.
        """
        unread = self.their_state in (h11.SEND_BODY, h11.ERROR)
        return unread or bool(self.trailing_data[0])


def _in_origin_form(head: h11.Request) -> h11.Request:
    """Return a head whose target is a path: GET http://HOST/PATH becomes GET /PATH of HOST.

    The host of the target replaces the header (RFC 9112, section 3.2.2). Raises
    RemoteProtocolError for a target without a host, and for one with a user (RFC 9110, 4.2).
    """
    match = _ABSOLUTE_TARGET.fullmatch(head.target)
    if match is None:
        return head
    host, path = match.groups()
    if b"@" in host or host.partition(b":")[0] == b"":
        raise h11.RemoteProtocolError("the target names no host, or a user", 400)
    headers = [header for header in head.headers if header[0] != b"host"]
    return h11.Request(
        method=head.method,
        headers=[(b"host", host), *headers],
        target=path if path.startswith(b"/") else b"/" + path,
        http_version=head.http_version,
    )


def _head_bytes(head: h11.Request) -> int:
    """Return the approximate bytes of a head on the wire."""
    lines = sum(len(name) + len(value) + _LINE_BYTES for name, value in head.headers)
    return len(head.method) + len(head.target) + lines


class _Transport:
    """Transport whose close() lets the client read the response first.

    It reads and discards what the client still sends: see BoundedProtocol.
    """

    def __init__(self, transport: asyncio.Transport, protocol: "BoundedProtocol") -> None:
        self._transport = transport
        self._protocol = protocol
        self._closing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Return whether nothing more will be sent."""
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection, after the client has stopped sending."""
        if self.is_closing():
            return
        self._closing = True
        if self._protocol.is_refused or self._protocol.conn.may_receive_more:
            self._protocol.drop_rest()
        else:
            self._transport.close()

    def close_now(self) -> None:
        """Close the connection at once; data that was written is still sent."""
        self._closing = True
        self._transport.close()


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with the limits of this module.

    A subclass sets `max_connections`, and `max_dropped_bytes` where larger bodies are allowed.

    A connection without a request in progress is idle. It is closed when the head of its next
    request is late. A connection beyond `max_connections` replaces the one that has been idle for
    longest; where none is idle, it is refused with a 503. Refused connections do not count, but if
    more than a quarter of `max_connections` are open, the oldest of them is reset.

    A connection that closes while the client is still sending is half-closed, and the rest is read
    and discarded. Closing at once would reset it, and the client would not get the response.
    """

    max_connections = 1000
    head_seconds = HEAD_SECONDS
    write_seconds = WRITE_SECONDS
    drop_seconds = DROP_SECONDS
    drop_idle_seconds = DROP_IDLE_SECONDS
    max_dropped_bytes = MAX_DROPPED_BYTES

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn: _BoundedConnection = _BoundedConnection(self.max_dropped_bytes)
        self.transport: _Transport = None  # type: ignore[assignment]
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._drop_timer: asyncio.TimerHandle | None = None
        self._last_data_time = 0.0
        self._dropped_bytes = 0
        self._is_keep_alive = False
        self.is_refused = False
        self.idle_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or refuse one where there are too many."""
        super().connection_made(_Transport(transport, self))  # type: ignore[arg-type]
        if len(self.connections) > self.max_connections:
            self._refuse_one()
        if not self.is_refused:
            self._wait_for_head(self.head_seconds)

    def data_received(self, data: bytes) -> None:
        """Parse data, or discard them where the connection is closing."""
        if self._drop_timer is not None:
            self._drop(data)
            return
        if self.transport.is_closing():
            return
        if self._is_keep_alive:  # the first bytes of the next head start its time limit
            self._wait_for_head(self.head_seconds)
        super().data_received(data)

    def _should_upgrade(self) -> bool:
        """Return False: an offer of another protocol is ignored.

        Java's HttpClient offers HTTP/2 with its first request. uvicorn would log two warnings, and
        the advice to install a package for WebSockets.
        """
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._stop_head_timer()
        self._stop_write_timer()
        self._stop_dropping()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Parse data, and stop the timer of the head when the head is complete."""
        super().handle_events()
        if self.is_busy:
            self._stop_head_timer()

    def pause_writing(self) -> None:
        """Start the timer of a slow reader: the send buffer is above the high-water mark."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """Stop the timer of a slow reader: the send buffer fell below the low-water mark."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_write_timer()

    def on_response_complete(self) -> None:
        """Wait for the next head, or for the end of a connection that closes."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._wait_for_reader()
        elif not self.is_busy:
            self._wait_for_head(self.head_seconds + self.timeout_keep_alive)
            self._is_keep_alive = True

    def send_400_response(self, msg: str) -> None:
        """Refuse an invalid request, and close the connection.

        No status can be sent if the response to this request has already begun.
        """
        if self.is_busy:
            self.cycle.disconnected = True  # output of its application is discarded from now on
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_error(self.conn.fault_status, self.conn.fault or msg)
        self.transport.close()
        self._wait_for_reader()

    def refuse(self) -> None:
        """Refuse a connection with a 503 and close it, since there are too many.

        Between two requests a connection is closed without a response: the client tries again on a
        new one.
        """
        self.is_refused = True
        may_respond = self.conn.our_state is h11.IDLE and not self._is_keep_alive
        self._stop_head_timer()
        if may_respond:
            self._send_error(
                503,
                f"more than {self.max_connections} connections are open (--limit-concurrency). "
                "Try later.",
                "server_error",
            )
            self.transport.close()
        else:
            self.transport.close_now()
            self._wait_for_reader()

    def _send_error(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        body = to_json(error_object(message, kind))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        if status in RETRY_AFTER:
            headers.append((b"retry-after", RETRY_AFTER[status].encode()))
        head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        # Before the next head is read, our state is IDLE.
        is_head = self.conn.our_state is h11.SEND_RESPONSE and self.conn.is_head
        for event in (head, h11.Data(data=b"" if is_head else body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))

    def drop_rest(self) -> None:
        """Half-close the connection; read and discard the rest of the body within limits."""
        now = self.loop.time()
        self._stop_head_timer()
        self.idle_since = now  # it may be closed in favor of others
        self._last_data_time = now
        if self.transport.can_write_eof():
            self.transport.write_eof()
        # uvicorn pauses reading when the application does not consume the body.
        self.flow.resume_reading()
        self._check_rest(now + self.drop_seconds)

    def _check_rest(self, deadline: float) -> None:
        """Close the connection when the rest takes too long or pauses."""
        now = self.loop.time()
        wait = min(self._last_data_time + self.drop_idle_seconds, deadline) - now
        if wait <= 0:
            self._stop_dropping()
            self.transport.close_now()
            self._wait_for_reader()
        else:
            self._drop_timer = self.loop.call_later(wait, self._check_rest, deadline)

    def _drop(self, data: bytes) -> None:
        self._last_data_time = self.loop.time()
        self._dropped_bytes += len(data)
        if self._dropped_bytes > self.max_dropped_bytes:
            self._stop_dropping()
            self.transport.close_now()

    def _stop_dropping(self) -> None:
        if self._drop_timer is not None:
            self._drop_timer.cancel()
            self._drop_timer = None

    def shutdown(self) -> None:
        """Close an idle connection now, and a busy one after its response."""
        if self.is_busy:
            self.cycle.keep_alive = False
        else:
            self._stop_dropping()
            self.transport.close_now()
            self._wait_for_reader()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for too long after a response."""
        self._stop_head_timer()
        super().timeout_keep_alive_handler()
        self._wait_for_reader()

    @property
    def is_busy(self) -> bool:
        """True while a request is in progress."""
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self, seconds: float) -> None:
        self._stop_head_timer()
        self.idle_since = self.loop.time()
        self._head_timer = self.loop.call_later(seconds, self._head_is_late)

    def _stop_head_timer(self) -> None:
        self._is_keep_alive = False
        self.idle_since = None
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _wait_for_reader(self) -> None:
        """Start the time limit for reading what was written."""
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(self.write_seconds, self.transport.abort)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _head_is_late(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE:
            self.transport.write(
                b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            )
        self.transport.close()
        self._wait_for_reader()

    def _refuse_one(self) -> None:
        """Refuse the connection that has been idle for longest, or this one if none is idle."""
        bounded = [other for other in self.connections if isinstance(other, BoundedProtocol)]
        refused = [other for other in bounded if other.is_refused]
        if len(refused) > self.max_connections // 4:
            min(refused, key=_idle_since).transport.abort()
        if len(bounded) - len(refused) > self.max_connections:
            idle = [
                other for other in bounded if other.idle_since is not None and not other.is_refused
            ]
            min(idle, key=_idle_since, default=self).refuse()


def _idle_since(connection: BoundedProtocol) -> float:
    """Return the time since which a connection is idle; infinity for a busy one."""
    return math.inf if connection.idle_since is None else connection.idle_since
