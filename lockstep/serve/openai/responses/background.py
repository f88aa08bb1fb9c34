"""Events of a response that is made in the background, for readers that come and go."""

import asyncio
from collections.abc import AsyncIterator

from lockstep.serve.openai.responses.store import weight
from lockstep.serve.requests.response_writer import Answer, Json


class Recording:
    """The events of an answer, which is generated whether anybody reads it or not.

    size: about the bytes of the events. Their number is bounded by the answer's tokens, and the
    service ends an answer that holds too much (Limits.held_bytes).
    """

    def __init__(self) -> None:
        self.events: list[Json] = []
        self.size = 0
        self.ended = False
        self._grown = asyncio.Event()

    async def run(self, answer: Answer) -> None:
        """Record an answer to its end, and close it."""
        try:
            async for events in answer.stream():
                self.size += sum(map(weight, events))
                self.events += events
                self._wake()
        finally:
            answer.close()
            self.ended = True
            self._wake()

    async def read(self, begin: int) -> AsyncIterator[list[Json]]:
        """Yield the events from this number on, those to come among them."""
        while True:
            grown = self._grown
            events = self.events[begin:]
            begin += len(events)
            if events:
                yield events
            elif self.ended:
                return
            else:
                await grown.wait()

    def _wake(self) -> None:
        """Wake every reader; each waits for the next event object then."""
        self._grown.set()
        self._grown = asyncio.Event()
