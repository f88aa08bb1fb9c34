"""Interface of the engine's client, as far as the server needs it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from lockstep.engine.async_engine import Listener
from lockstep.engine.stats import Stats
from lockstep.scheduling.request import Request


class EngineClient(Protocol):
    """Client of an engine that runs in a thread or in another process.

    on_end: called once from any thread, with the reason, if the engine ends unexpectedly.
    """

    on_end: Callable[[str], None] | None

    @property
    def is_alive(self) -> bool:
        """True while requests are served."""
        ...

    @property
    def restarting(self) -> bool:
        """True while requests wait for an engine that is starting again."""
        ...

    @property
    def stalled_for(self) -> float:
        """Seconds since the running step began; 0 between steps."""
        ...

    def submit(self, requests: Sequence[tuple[Request, Listener]]) -> None:
        """Queue requests; each listener is called in the event loop with updates of its request."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request."""
        ...

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes before requests that are submitted later."""
        ...

    def stats(self) -> Stats:
        """Return the engine's counters."""
        ...
