"""Responses as streams of server-sent events, and work that ends when its client goes away."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from fastapi.responses import StreamingResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from lockstep.serve.http.errors import MAX_SHOWN_CHARACTERS
from lockstep.serve.http.head_requests import ONLY_HEAD
from lockstep.serve.http.request_id import SEND_BODY

Event = Mapping[str, object]
"""JSON object that is sent as one event, or as a response."""
IGNORED_FIELDS_HEADER = "X-Lockstep-Ignored-Fields"
"""Header of a response that names the request's fields without effect."""
KEEP_ALIVE_SECONDS = 15.0
"""Interval of checks whether a stream was silent. A proxy closes one that is silent for 50 s or
more, and a long prompt or the queue may take longer."""
COMMENT = b":\n\n"
COMMENT_BETWEEN_IDS = b":\n"
"""Comment in a stream whose events have ids. OpenAI's and Anthropic's libraries take an empty line
after an id for an event without data."""
_FIELD_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
"""Names of fields that are safe in a header."""
Result = TypeVar("Result")
BODY = "http.response.body"


class EventSource(Protocol):
    """Object whose events are streamed.

    NAMED_EVENTS: events have their type as their SSE name; otherwise [DONE] ends the stream.
    ignored_fields: names of sent fields that have no effect.
    """

    NAMED_EVENTS: ClassVar[bool]
    ignored_fields: Sequence[str]

    def stream(self) -> AsyncIterator[list[Event]]:
        """Yield the events; those that are ready at the same time come in one list."""
        ...

    def close(self) -> None:
        """Release the resources of the source."""
        ...


def ignored_fields_header(names: Iterable[str]) -> dict[str, str]:
    """Return the header that names fields without effect, without names that no header can hold."""
    text = ", ".join(name for name in names if _FIELD_NAME.fullmatch(name))
    return {IGNORED_FIELDS_HEADER: text[:MAX_SHOWN_CHARACTERS]} if text else {}


class EventStream(StreamingResponse):
    """Response that streams events.

    events: JSON objects, or what encode_event() made of them. named_events: see EventSource.
    close: called at the end of the stream, whatever ends it.
    """

    def __init__(
        self,
        events: AsyncIterator[list[Event]] | AsyncIterator[list[bytes]],
        named_events: bool,
        close: Callable[[], None] = lambda: None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # X-Accel-Buffering keeps nginx from collecting events.
        fixed = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__((), media_type="text/event-stream", headers={**fixed, **(headers or {})})
        self._events = events
        self._named_events = named_events
        self._close = close
        self._was_silent = True
        self._has_ids = False

    @classmethod
    def from_source(cls, source: EventSource) -> "EventStream":
        """Return the stream of a source, which is closed at the stream's end."""
        headers = ignored_fields_header(source.ignored_fields)
        return cls(source.stream(), source.NAMED_EVENTS, source.close, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, or only the head."""
        try:
            if scope.get(ONLY_HEAD):
                await self._send_head(send)
                await send({"type": BODY})
            else:
                await unless_disconnected(self._send(send, scope.get(SEND_BODY, send)), receive)
        finally:
            self._close()

    async def _send_head(self, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})

    async def _send(self, send: Send, send_body: Send) -> None:
        """Send the head, then each list of events as one chunk, and comments in long pauses."""
        await self._send_head(send)
        comments = asyncio.create_task(self._send_comments(send_body))
        try:
            async for events in self._events:
                # Events that are ready together are one write, so one packet.
                if events:
                    self._was_silent = False
                    self._has_ids = isinstance(events[0], bytes)
                    body = b"".join(map(self._encode, events))
                    await send_body({"type": BODY, "more_body": True, "body": body})
        finally:
            comments.cancel()
        done = b"" if self._named_events else b"data: [DONE]\n\n"
        await send_body({"type": BODY, "more_body": False, "body": done})

    async def _send_comments(self, send_body: Send) -> None:
        """Send a comment, which clients ignore, whenever the stream was silent."""
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if self._was_silent:
                comment = COMMENT_BETWEEN_IDS if self._has_ids else COMMENT
                await send_body({"type": BODY, "more_body": True, "body": comment})
            self._was_silent = True

    def _encode(self, event: Event | bytes) -> bytes:
        return event if isinstance(event, bytes) else encode_event(event, self._named_events)


def encode_event(event: Event, is_named: bool, event_id: str = "") -> bytes:
    """Return an event as bytes. event_id: sent back by a client as Last-Event-ID; "" for none."""
    data = b"data: %b\n\n" % to_json(event, inf_nan_mode="null")
    if event_id:
        data = b"id: %b\n%b" % (event_id.encode("ascii"), data)
    return b"event: %b\n%b" % (str(event["type"]).encode(), data) if is_named else data


async def unless_disconnected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result | None:
    """Return the work's result; cancel it and return None if the client disconnects first."""
    task = asyncio.create_task(work)
    disconnect = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
