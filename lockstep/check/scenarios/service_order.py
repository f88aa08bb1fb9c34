"""Order in which requests must get rows and lose them, kept apart from the scheduler's own."""

from collections.abc import Iterable, Sequence

from lockstep.scheduling.request import Request

Key = tuple[int, int]
"""(priority, number of the arrival); the smallest is served first."""


class ServiceOrder:
    """Order of the requests of one scenario by scheduling_policy and arrival."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self._keys: dict[str, Key] = {}
        self._arrivals = 0

    def add(self, request: Request) -> None:
        """Add a request that arrives now."""
        self._arrivals += 1
        priority = request.priority if self.policy == "priority" else 0
        self._keys[request.id] = (priority, self._arrivals)

    def wrong_starts(self, started: Sequence[str], waiting: Iterable[str]) -> str | None:
        """Return what is wrong with the requests that got rows in one schedule, or None.

        started: ids in the order of their starts. waiting: ids of the others that could run.
        """
        if not started:
            return None
        keys = [self._keys[request_id] for request_id in started]
        if keys != sorted(keys):
            return f"the requests {list(started)} got rows in this order, against their keys {keys}"
        earlier = [request_id for request_id in waiting if self._keys[request_id] < keys[-1]]
        if earlier:
            return f"request {started[-1]} got a row while {earlier} wait, which come before it"
        return None

    def wrong_victim(self, victim: str, running: Iterable[str]) -> str | None:
        """Return why a request may not lose its row for another, or None. running: all with a row.

        The last one in the order is preempted.
        """
        last = max(running, key=self._keys.__getitem__)
        return None if victim == last else f"request {victim} is preempted, and {last} comes later"
