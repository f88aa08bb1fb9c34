"""Events of an answer that is generated whether or not a client reads them."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from lockstep.errors import EngineDeadError
from lockstep.serve.http.event_stream import Event, encode_event
from lockstep.serve.requests.response_writer import ResponseWriter


class EventLog:
    """Events of an answer, by their numbers from 0, for any number of readers.

    The SSE id of an event is the id of the response, a colon, and the event's number.

    size: bytes of the events. Their number is limited by the tokens of the answer, and the service
    ends a request with too much output (Limits.max_output_bytes).
    """

    def __init__(self, response_id: str, named_events: bool, was_cut: bool = False) -> None:
        """Begin an empty log. was_cut: updates that earlier readers got may be missing."""
        self.events: list[bytes] = []
        self.size = 0
        self.is_complete = False
        self.named_events = named_events
        self.was_cut = was_cut
        self._num_certain = 0
        self._has_certain = asyncio.Event()
        self._response_id = response_id
        self._last_events: list[Event] = []
        self._growth = asyncio.Event()

    async def record(self, writer: ResponseWriter) -> None:
        """Record the events of a writer to its end, and close the writer."""
        try:
            async for events in writer.stream():
                for event in events:
                    event_id = f"{self._response_id}:{len(self.events)}"
                    self.events.append(encode_event(event, self.named_events, event_id))
                    self.size += len(self.events[-1])
                if not self._has_certain.is_set():
                    self._num_certain = len(self.events)
                    if not writer.active.reads_saved:
                        self._has_certain.set()
                self._wake_readers()
        except EngineDeadError as error:
            # The next process goes on from the events before this one, which so has no number.
            self._last_events = [writer.suspended_event(error, len(self.events) - 1)]
        finally:
            writer.close()
            self.finish(self._last_events)

    def finish(self, last_events: Iterable[Event]) -> None:
        """Let readers end after the events so far and these, which have no number."""
        self._last_events = [*last_events]
        self.is_complete = True
        self._has_certain.set()
        self._wake_readers()

    async def certain_events(self) -> int:
        """Return the number of events that readers can have, those of the last process included.

        Where the log was cut, later events may be divided in another way than those that a reader
        got before the machine stopped.
        """
        await self._has_certain.wait()
        return self._num_certain if self.was_cut else len(self.events)

    async def read(self, begin: int) -> AsyncIterator[list[bytes]]:
        """Yield the events from this number on, and future ones when they come."""
        while True:
            growth = self._growth
            events = self.events[begin:]
            begin += len(events)
            if events:
                yield events
            elif self.is_complete:
                if self._last_events:
                    yield [encode_event(event, self.named_events) for event in self._last_events]
                return
            else:
                await growth.wait()

    async def wait(self) -> None:
        """Wait until the answer is complete."""
        async for _ in self.read(len(self.events)):
            continue

    def _wake_readers(self) -> None:
        # Readers hold the old event object; the next growth has a new one.
        self._growth.set()
        self._growth = asyncio.Event()
