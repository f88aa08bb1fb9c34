"""Connections: no head may come slowly, no answer be read slowly, and when there are too many
connections the idlest one makes room."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""How long a request's head may take to come, and a new connection may say nothing."""
WRITE_SECONDS = 60.0
"""How long a client may take too little of an answer for more of it to be sent."""

MOST_HEAD = 16_384
"""Bytes of a head that is not complete, as h11 has it."""
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
MOST_CHUNKS = 16_384
"""Chunks of a body: each takes some 5 us, however short it is."""


class _BoundedConnection(h11.Connection):
    """h11's reader of requests, with a bound on the chunks of a body, and a short way out for the
    chunks of an answer."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MOST_HEAD)
        self._chunks = 0
        self._in_chunks = False

    def next_event(self) -> Any:
        """The next event. Raises RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            if self._chunks > MOST_CHUNKS:
                raise h11.RemoteProtocolError(f"more than {MOST_CHUNKS} chunks")
        return event

    def send(self, event: Any) -> Any:
        """The event as bytes. Raises LocalProtocolError.

        Within a body in chunks, data change no state of h11's: each becomes a chunk as it is.
        """
        if type(event) is h11.Data and self._in_chunks and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        sent = super().send(event)
        if type(event) is h11.Response:
            self._in_chunks = _CHUNKED in sent.lower()
        return sent


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with bounds on connections, on the time that a head takes, and on the time in which
    nothing of an answer can be sent.

    A subclass sets `most`. A connection that has no request in progress is idle: it is closed when
    its head is late, and, the longest idle first, where a new one finds no room.
    """

    most = 1000
    head_seconds = HEAD_SECONDS
    write_seconds = WRITE_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _BoundedConnection()
        self._head_alarm: asyncio.TimerHandle | None = None
        self._write_alarm: asyncio.TimerHandle | None = None
        self.idle_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there: it gets a place, or is turned away."""
        super().connection_made(transport)
        if len(self.connections) > self.most and not self._make_room():
            transport.abort()
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop_waiting()
        self._stop_write_alarm()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Data came: from the moment that the head is complete, nobody waits for it."""
        super().handle_events()
        if self._busy:
            self._stop_waiting()

    def pause_writing(self) -> None:
        """The client is behind: what was sent waits to be read."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """Most of what was sent was read."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_write_alarm()

    def on_response_complete(self) -> None:
        """An answer was sent: the connection is idle until the next head, or closes."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._wait_for_reader()
        elif not self._busy:
            self._wait_for_head()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came after an answer."""
        self._stop_waiting()
        super().timeout_keep_alive_handler()
        self._wait_for_reader()

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self.idle_since = self.loop.time()
        wait = self.head_seconds + self.timeout_keep_alive * (self.cycle is not None)
        self._head_alarm = self.loop.call_later(wait, self._head_is_late)

    def _stop_waiting(self) -> None:
        self.idle_since = None
        if self._head_alarm is not None:
            self._head_alarm.cancel()
            self._head_alarm = None

    def _wait_for_reader(self) -> None:
        """What was written may still be read, for a while."""
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

    def _make_room(self) -> bool:
        """Closes the connection that has been idle for longest; False if all of them are busy."""
        idle = [
            connection
            for connection in self.connections
            if isinstance(connection, BoundedProtocol) and connection.idle_since is not None
        ]
        if not idle:
            return False
        min(idle, key=lambda connection: connection.idle_since or 0.0).transport.abort()
        return True
