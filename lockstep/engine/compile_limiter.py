"""Grammars that are compiled before their requests have a row: at most so many at a time."""

import threading


class Ahead:
    """Who is ahead: requests whose grammar is compiled, or being compiled, and that have given no
    token yet. May be called from any thread.

    A compiled grammar may take 13 MB, and as many requests may wait as the server lets wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._ids: set[str] = set()
        self._changed = threading.Condition()

    def enter(self, request_id: str) -> None:
        """Waits until fewer than `most` others are ahead."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ids) < self._most)
            self._ids.add(request_id)

    def leave(self, request_id: str) -> None:
        """The request has given tokens, or has ended. Of no effect where it is not ahead."""
        with self._changed:
            if request_id in self._ids:
                self._ids.remove(request_id)
                self._changed.notify()
