"""Part of an answer that its client has received."""

from dataclasses import replace

from lockstep.engine.token_update import TokenUpdate
from lockstep.outputs import RequestMetrics
from lockstep.scheduling.request import Request, continue_from


class ReceivedAnswer:
    """Part of an answer that its client has received: where the engine is lost, another one goes on
    from there.

    The request may have tokens of an earlier process already (Request.num_resumed).

    metrics: those of the latest update. has_begun: the present engine works on the request.
    failures: engines that were lost while they worked on it, since its latest token.
    """

    def __init__(self, request: Request) -> None:
        self.metrics = RequestMetrics(arrival_time=request.metrics.arrival_time)
        self.has_begun = False
        self.failures = 0
        self._request = request
        self._token_ids = list(request.forced_token_ids[: request.num_resumed])

    def add(self, update: TokenUpdate) -> None:
        """Append the tokens of an update."""
        self._token_ids += update.token_ids
        self.metrics = update.metrics
        self.has_begun = True
        self.failures = 0

    def lose_engine(self, failed: bool = True) -> bool:
        """Handle the loss of the engine; return whether it had begun to work on the request.

        failed: the engine ended unexpectedly, so that the request may be the cause.
        """
        had_begun = self.has_begun
        self.failures += had_begun and failed
        self.has_begun = False
        return had_begun

    def rest(self) -> Request:
        """Return the request of the rest of the answer: what was received is forced."""
        return replace(
            self._request,
            params=continue_from(self._request.params, self._token_ids),
            arrival=self.metrics.arrival_time,
            metrics=self.metrics.copy(),
            num_resumed=len(self._token_ids),
            failures=self.failures,
        )
