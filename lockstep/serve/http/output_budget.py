"""Memory limits of output that waits for its readers, per request and in total."""

from collections.abc import Hashable
from typing import Generic, TypeVar

# Approximate sizes, with the Python objects that each consists of.
DELTA_BYTES = 500
TOKEN_BYTES = 100
LOGPROB_BYTES = 250
Owner = TypeVar("Owner", bound=Hashable)


def delta_bytes(num_tokens: int, num_logprobs: int) -> int:
    """Return the approximate bytes of an output delta.

    num_logprobs: log-probabilities of its tokens and of the prompt.
    """
    return DELTA_BYTES + TOKEN_BYTES * num_tokens + LOGPROB_BYTES * num_logprobs


class OutputBudget(Generic[Owner]):
    """Byte budget of output that clients have not read yet, per owner and in total."""

    def __init__(self, max_bytes: int, max_total_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.max_total_bytes = max_total_bytes
        self.total_bytes = 0
        self._bytes_of: dict[Owner, int] = {}

    def add(self, owner: Owner, size: int) -> Owner | None:
        """Count new output. Return the owner that must drop its output, if a limit is exceeded.

        That is the owner itself, or the largest one where the total is too large.
        """
        self.total_bytes += size
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + size
        if self._bytes_of[owner] > self.max_bytes:
            return owner
        if self.total_bytes > self.max_total_bytes:
            return max(self._bytes_of, key=self._bytes_of.__getitem__)
        return None

    def release(self, owner: Owner, size: int) -> None:
        """Subtract output that was read."""
        if owner in self._bytes_of:
            self.total_bytes -= size
            self._bytes_of[owner] -= size

    def forget(self, owner: Owner) -> None:
        """Subtract all output of an owner."""
        self.total_bytes -= self._bytes_of.pop(owner, 0)
