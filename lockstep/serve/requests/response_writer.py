"""Writers of responses: they turn the deltas of a request into one object or into events."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.errors import EngineDeadError
from lockstep.serve.http.errors import status_and_body
from lockstep.serve.http.event_stream import Event
from lockstep.serve.requests.active_request import ActiveRequest, OutputDelta

if TYPE_CHECKING:
    from lockstep.serve.requests.event_log import EventLog


class ResponseWriter(ABC):
    """Writer of the response to one request: response() once, or stream(), then close().

    The events of a stream are those of start_events(), of delta_events() for every delta, and of
    end_events(). They depend on the deltas so far, never on when a delta is read.

    NAMED_EVENTS: events have their type as their SSE name; otherwise [DONE] ends the stream.
    KIND: name of the API, in the journal. ignored_fields: names of sent fields that have no effect.
    event_log: the events, where they are recorded.
    """

    NAMED_EVENTS: ClassVar[bool] = False
    KIND: ClassVar[str]

    def __init__(self, active: ActiveRequest, ignored_fields: Sequence[str]) -> None:
        self.active = active
        self.event_log: EventLog | None = None
        self.ignored_fields = ignored_fields

    @abstractmethod
    async def response(self) -> Event:
        """Read all deltas and return the response as one object."""

    @abstractmethod
    def start_events(self) -> Iterable[Event]:
        """Yield the events before the first delta."""

    @abstractmethod
    def delta_events(self, delta: OutputDelta) -> Iterable[Event]:
        """Yield the events of a delta. Raises an error that ends the response."""

    @abstractmethod
    def end_events(self) -> Iterable[Event]:
        """Yield the events after the last delta."""

    def error_events(self, error: Exception) -> Iterable[Event]:
        """Yield the events of an error, which replace those of end_events()."""
        return [status_and_body(error)[1]]

    def saved_conversation(self) -> Any:
        """Return the earlier turns that the request's body refers to, as JSON for the journal."""
        return None

    def suspended_event(self, error: EngineDeadError, last_number: int) -> Event:
        """Return the last event of a stream that the next process goes on with.

        last_number: number of the event before it.
        """
        return next(iter(self.error_events(error)))

    def close(self) -> None:
        """Abort the request if it is still running."""
        self.active.close()

    async def read_all(self) -> None:
        """Process all deltas and drop the events, for writers that build a response from them.

        Raises the error that ended the request.
        """
        async for deltas in self.active:
            for delta in deltas:
                for _ in self.delta_events(delta):
                    continue
        for _ in self.end_events():
            continue

    async def stream(self) -> AsyncIterator[list[Event]]:
        """Yield the events; those that are ready at the same time come in one list.

        Raises EngineDeadError where the next process goes on.
        """
        yield [*self.start_events()]
        events: list[Event] = []
        try:
            async for deltas in self.active:
                for delta in deltas:
                    for event in self.delta_events(delta):
                        events.append(event)
                yield events
                events = []
            events += self.end_events()
        except Exception as error:
            # Events of deltas before the error are sent first.
            if self.active.is_suspended:
                yield events
                raise
            events += self.error_events(error)
        yield events
