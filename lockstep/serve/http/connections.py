"""Connections with bounds on time and size.

The bounds hold for a request's head, for the reading of an answer, for the rest of a refused body,
and for the number of connections: the longest idle one is refused for a new one.
"""

import asyncio
import math
from typing import Any

import h11
from pydantic_core import to_json
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from lockstep.serve.http.errors import RETRY_AFTER, error_object

HEAD_SECONDS = 10.0
"""Time that a request's head may take to arrive, and that a new connection may stay silent."""
WRITE_SECONDS = 60.0
"""Time that a client may read so little of an answer that no more of it can be sent."""
DROP_SECONDS = 30.0
"""Time for which the rest of a body is read and dropped after the answer was sent."""
DROP_IDLE_SECONDS = 5.0
"""Silence after which the rest of a body is not waited for any longer."""
MAX_DROPPED_BYTES = 64 << 20
"""Bytes of a body's rest that are read and dropped after the answer was sent, at least."""
MAX_HEAD_BYTES = 16_384
"""Bytes of a request's head."""
MAX_CHUNKS = 16_384
"""Chunks of a body: each takes some 5 us, however short it is."""
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
_LINE_BYTES = 4
"""Bytes of a header line besides its name and value: the colon, a space, CR and LF."""


class _BoundedConnection(h11.Connection):
    """h11's reader of requests with bounds on heads and chunks, and a short path for the chunks of
    an answer.

    fault_status, fault: the status and the message that answer what the client did wrong.
    """

    def __init__(self, max_dropped_bytes: int = MAX_DROPPED_BYTES) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._max_dropped_bytes = max_dropped_bytes
        self.fault_status = 400
        self.fault = ""
        self._chunks = 0
        self._dropped_bytes = 0
        self._in_chunks = False

    def next_event(self) -> Any:
        """Return the next event. Raises RemoteProtocolError."""
        in_head = self.their_state is h11.IDLE
        try:
            event = super().next_event()
            self._check(event)
        except h11.RemoteProtocolError as error:
            # Only a head has statuses of its own: h11 calls an overlong chunk line 431 as well.
            self.fault_status = error.error_status_hint if in_head else 400
            self.fault = f"the request cannot be read: {error}."
            raise
        return event

    def _check(self, event: Any) -> None:
        """Raise RemoteProtocolError for a version, a head or a body that is not allowed."""
        if isinstance(event, h11.Request):
            self._chunks = 0
            self._dropped_bytes = 0
            if not event.http_version.startswith(b"1."):
                version = event.http_version.decode("ascii")
                raise h11.RemoteProtocolError(
                    f"HTTP of version {version}; allowed: 1.0 and 1.1", 505
                )
            # h11 bounds incomplete heads only: one that comes in a single read may be larger.
            if _head_bytes(event) > MAX_HEAD_BYTES:
                message = (
                    f"a head of more than {MAX_HEAD_BYTES} bytes; send fewer or shorter headers"
                )
                raise h11.RemoteProtocolError(message, 431)
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            if self._chunks > MAX_CHUNKS:
                raise h11.RemoteProtocolError(f"more than {MAX_CHUNKS} chunks")
            if self.our_state is h11.DONE:  # answered already: uvicorn drops the data
                self._dropped_bytes += len(event.data)
                if self._dropped_bytes > self._max_dropped_bytes:
                    raise h11.RemoteProtocolError("too much of a body after its answer")

    def send(self, event: Any) -> Any:
        """Return the event as bytes. Raises LocalProtocolError.

        Data within a chunked body change no state of h11: each event becomes a chunk as it is.
        """
        if type(event) is h11.Data and self._in_chunks and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        sent = super().send(event)
        if type(event) is h11.Response:
            self._in_chunks = _CHUNKED in sent.lower()
        return sent

    @property
    def may_get_more(self) -> bool:
        """Return whether the client may still be sending.

        Closing now could reset the connection, and the client would lose the answer.
        """
        unread = self.their_state in (h11.SEND_BODY, h11.ERROR)
        return unread or bool(self.trailing_data[0])


def _head_bytes(head: h11.Request) -> int:
    """Return about the bytes that a head took on the wire."""
    lines = sum(len(name) + len(value) + _LINE_BYTES for name, value in head.headers)
    return len(head.method) + len(head.target) + lines


class _Transport:
    """A connection's transport whose close() lets the client read the answer first: what it still
    sends is read and dropped for a while (see BoundedProtocol)."""

    def __init__(self, transport: asyncio.Transport, protocol: "BoundedProtocol") -> None:
        self._transport = transport
        self._protocol = protocol
        self._closing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Return whether nothing more is to be sent."""
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection once the client has sent what it is sending, or at once."""
        if self.is_closing():
            return
        self._closing = True
        if self._protocol.is_refused or self._protocol.conn.may_get_more:
            self._protocol.drop_rest()
        else:
            self._transport.close()

    def close_now(self) -> None:
        """Close the connection; what was written is still sent."""
        self._closing = True
        self._transport.close()


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with bounds on connections, on the time that a head takes, on the time in which
    nothing of an answer can be sent, and on what is read after an answer.

    A subclass sets `most`, and `max_dropped_bytes` where larger bodies are allowed. A connection
    that has no request in progress is idle: it is closed when its head is late. A connection beyond
    `most` takes the place of the one that has been idle for longest; where none is idle, it is
    refused. Refused connections get a 503 and do not count; if more than a quarter of `most` are
    open, the oldest is reset. A connection that closes while the client is still sending is
    half-closed, and the rest is read and dropped: closing at once would reset it, and the client
    would see a reset instead of the answer.
    """

    most = 1000
    head_seconds = HEAD_SECONDS
    write_seconds = WRITE_SECONDS
    drop_seconds = DROP_SECONDS
    drop_idle_seconds = DROP_IDLE_SECONDS
    max_dropped_bytes = MAX_DROPPED_BYTES

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn: _BoundedConnection = _BoundedConnection(self.max_dropped_bytes)
        self.transport: _Transport = None  # type: ignore[assignment]
        self._head_alarm: asyncio.TimerHandle | None = None
        self._write_alarm: asyncio.TimerHandle | None = None
        self._drop_alarm: asyncio.TimerHandle | None = None
        self._heard_at = 0.0
        self._dropped_bytes = 0
        self._is_resting = False
        self.is_refused = False
        self.idle_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a new connection, or refuse one where there are too many."""
        super().connection_made(_Transport(transport, self))  # type: ignore[arg-type]
        if len(self.connections) > self.most:
            self._make_room()
        if not self.is_refused:
            self._wait_for_head(self.head_seconds)

    def data_received(self, data: bytes) -> None:
        """Read what came, or drop it where the connection is closing."""
        if self._drop_alarm is not None:
            self._drop(data)
            return
        if self.transport.is_closing():
            return
        if self._is_resting:  # the first bytes of the next head: it gets a head's time from here
            self._wait_for_head(self.head_seconds)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client, which is gone."""
        self._stop_waiting()
        self._stop_write_alarm()
        self._stop_dropping()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Read data; stop the timer of the head once the head is complete."""
        super().handle_events()
        if self.is_busy:
            self._stop_waiting()

    def pause_writing(self) -> None:
        """Start the timer of a client that reads more slowly than the answer is sent."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """Most of what was sent was read."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_write_alarm()

    def on_response_complete(self) -> None:
        """Wait for the next head after an answer, or for the end of a connection that closes."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._wait_for_reader()
        elif not self.is_busy:
            self._wait_for_head(self.head_seconds + self.timeout_keep_alive)
            self._is_resting = True

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP as it is supported, and close.

        Where an answer to this request has begun, none can follow it.
        """
        if self.is_busy:
            self.cycle.disconnected = True  # its application writes to nobody from here on
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_error(self.conn.fault_status, self.conn.fault or msg)
        self.transport.close()
        self._wait_for_reader()

    def refuse(self) -> None:
        """Answer with a 503 and close, for there are too many connections.

        A client that waits between two requests gets no answer: it asks again on a new connection.
        """
        self.is_refused = True
        may_answer = self.conn.our_state is h11.IDLE and not self._is_resting
        self._stop_waiting()
        if may_answer:
            self._send_error(
                503,
                f"more than {self.most} connections are open (--limit-concurrency). Try later.",
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
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))

    def drop_rest(self) -> None:
        """Send no more, and read and drop what the client still sends, within bounds."""
        now = self.loop.time()
        self._stop_waiting()
        self.idle_since = now  # it makes room for others
        self._heard_at = now
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._watch_rest(now + self.drop_seconds)

    def _watch_rest(self, deadline: float) -> None:
        """Close when the rest takes too long as a whole, or when nothing of it comes any more."""
        now = self.loop.time()
        wait = min(self._heard_at + self.drop_idle_seconds, deadline) - now
        if wait <= 0:
            self._stop_dropping()
            self.transport.close_now()
            self._wait_for_reader()
        else:
            self._drop_alarm = self.loop.call_later(wait, self._watch_rest, deadline)

    def _drop(self, data: bytes) -> None:
        self._heard_at = self.loop.time()
        self._dropped_bytes += len(data)
        if self._dropped_bytes > self.max_dropped_bytes:
            self._stop_dropping()
            self.transport.close_now()

    def _stop_dropping(self) -> None:
        if self._drop_alarm is not None:
            self._drop_alarm.cancel()
            self._drop_alarm = None

    def shutdown(self) -> None:
        """Close an idle connection now, and a busy one after its answer."""
        if self.is_busy:
            self.cycle.keep_alive = False
        else:
            self._stop_dropping()
            self.transport.close_now()
            self._wait_for_reader()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for too long after an answer."""
        self._stop_waiting()
        super().timeout_keep_alive_handler()
        self._wait_for_reader()

    @property
    def is_busy(self) -> bool:
        """Return whether a request is in progress."""
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self, seconds: float) -> None:
        self._stop_waiting()
        self.idle_since = self.loop.time()
        self._head_alarm = self.loop.call_later(seconds, self._head_is_late)

    def _stop_waiting(self) -> None:
        self._is_resting = False
        self.idle_since = None
        if self._head_alarm is not None:
            self._head_alarm.cancel()
            self._head_alarm = None

    def _wait_for_reader(self) -> None:
        """Give the client a while to read what was written."""
        self._stop_write_alarm()
        self._write_alarm = self.loop.call_later(self.write_seconds, self.transport.abort)

    def _stop_write_alarm(self) -> None:
        if self._write_alarm is not None:
            self._write_alarm.cancel()
            self._write_alarm = None

    def _head_is_late(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE:
            self.transport.write(
                b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            )
        self.transport.close()
        self._wait_for_reader()

    def _make_room(self) -> None:
        """Refuse the connection that has been idle for longest, or this one if none is idle."""
        mine = [one for one in self.connections if isinstance(one, BoundedProtocol)]
        refused = [one for one in mine if one.is_refused]
        if len(refused) > self.most // 4:
            min(refused, key=_idle_since).transport.abort()
        if len(mine) - len(refused) > self.most:
            idle = [one for one in mine if one.idle_since is not None and not one.is_refused]
            min(idle, key=_idle_since, default=self).refuse()


def _idle_since(connection: BoundedProtocol) -> float:
    """Return since when a connection is idle; one that is busy comes last."""
    return math.inf if connection.idle_since is None else connection.idle_since
