"""What every answer of an endpoint is: begun, read as a whole or as events, and closed."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from lockstep.serve.problems import status_and_body

Json = dict[str, Any]


class Answer(ABC):
    """One call of an endpoint: start() first, then whole() or stream(), and close() at the end.

    NAMED: events bear their type as their name; others are data only, and [DONE] ends them. body:
    what was sent, with ignored_fields().
    """

    NAMED: ClassVar[bool] = False
    body: Any

    @abstractmethod
    async def start(self) -> None:
        """Begins; raises what is wrong before anything is sent."""

    @abstractmethod
    async def whole(self) -> Json:
        """The answer as one object."""

    @abstractmethod
    def stream(self) -> AsyncIterator[Json]:
        """The answer as events; each depends on what came before it, not on when it is read."""

    @abstractmethod
    def close(self) -> None:
        """Aborts what still runs."""

    def failure(self, error: Exception) -> Json:
        """The event that tells of an error."""
        return status_and_body(error)[1]
