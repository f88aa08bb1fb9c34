"""What every answer of an endpoint is: begun, read as a whole or as events, and closed."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from typing import Any, ClassVar

from lockstep.serve.http.errors import status_and_body
from lockstep.serve.requests.service import Piece, Run

Json = dict[str, Any]


class Answer(ABC):
    """One call of an endpoint: start() first, then whole() or stream(), and close() at the end.

    NAMED: events bear their type as their name; others are data only, and [DONE] ends them. body:
    what was sent, with ignored_fields(). Its events are those of begin(), of hear() for every
    piece, and of end(); each depends on what came before it, not on when it is read.
    """

    NAMED: ClassVar[bool] = False
    body: Any

    @property
    @abstractmethod
    def run(self) -> Run:
        """The request in the engine, once it was started."""

    @abstractmethod
    async def start(self, brief: bool = False) -> None:
        """Begins; raises what is wrong before anything is sent. brief: so little was sent that it
        is read at once, not beside the event loop."""

    @abstractmethod
    async def whole(self) -> Json:
        """The answer as one object."""

    @abstractmethod
    def begin(self) -> Iterable[Json]:
        """The events before anything has come."""

    @abstractmethod
    def hear(self, piece: Piece) -> Iterable[Json]:
        """The events of a piece. Raises what ends the answer."""

    @abstractmethod
    def end(self) -> Iterable[Json]:
        """The events behind the last piece."""

    @abstractmethod
    def close(self) -> None:
        """Aborts what still runs."""

    def failure(self, error: Exception) -> Iterable[Json]:
        """The events that tell of an error, in the place of those of end()."""
        return [status_and_body(error)[1]]

    async def read(self) -> None:
        """Hears all pieces for whole(), which wants no events. Raises what ended the answer."""
        async for pieces in self.run:
            for piece in pieces:
                for _ in self.hear(piece):
                    continue
        for _ in self.end():
            continue

    async def stream(self) -> AsyncIterator[list[Json]]:
        """The answer as events, together those that come at once."""
        yield [*self.begin()]
        events: list[Json] = []
        try:
            async for pieces in self.run:
                for piece in pieces:
                    for event in self.hear(piece):
                        events.append(event)
                yield events
                events = []
            events += self.end()
        except Exception as error:
            events += self.failure(error)
        yield events
