"""Events of a response that is generated in the background, for any number of readers."""

import asyncio
from collections.abc import AsyncIterator

from lockstep.serve.http.event_stream import Event
from lockstep.serve.openai.responses.store import json_bytes
from lockstep.serve.requests.response_writer import ResponseWriter


class EventLog:
    """Events of a response that is generated whether or not a client reads them.

    size: approximate bytes of the events. Their number is limited by the tokens of the response,
    and the service ends a request with too much output (Limits.max_output_bytes).
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.size = 0
        self.is_complete = False
        self._growth = asyncio.Event()

    async def record(self, writer: ResponseWriter) -> None:
        """Record the events of a writer to its end, and close the writer."""
        try:
            async for events in writer.stream():
                self.size += sum(map(json_bytes, events))
                self.events += events
                self._wake_readers()
        finally:
            writer.close()
            self.is_complete = True
            self._wake_readers()

    async def read(self, begin: int) -> AsyncIterator[list[Event]]:
        """Yield the events from this index on, and future ones when they come."""
        while True:
            growth = self._growth
            events = self.events[begin:]
            begin += len(events)
            if events:
                yield events
            elif self.is_complete:
                return
            else:
                await growth.wait()

    def _wake_readers(self) -> None:
        # Readers hold the old event object; the next growth has a new one.
        self._growth.set()
        self._growth = asyncio.Event()
