"""Limit on grammars that are compiled before their requests have tokens."""

import threading


class CompileLimiter:
    """Limit on requests with a compiled grammar and no tokens yet. Thread-safe.

    A compiled grammar may take 13 MB, and the server's queue may be long.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ids: set[str] = set()
        self._changed = threading.Condition()

    def enter(self, request_id: str) -> None:
        """Wait until fewer than `limit` other requests have entered, then enter."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ids) < self._limit)
            self._ids.add(request_id)

    def leave(self, request_id: str) -> None:
        """Leave once a request has tokens or has ended; no effect where it has not entered."""
        with self._changed:
            if request_id in self._ids:
                self._ids.remove(request_id)
                self._changed.notify()
