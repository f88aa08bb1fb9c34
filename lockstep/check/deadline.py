"""Time limit of a check, and its division among the parts."""

import time
from dataclasses import dataclass

TIME_UP = "time was up"
"""Reason against parts that a time limit left out."""


@dataclass(frozen=True)
class Deadline:
    """Time at which a part must end. at: time of the monotonic clock, None for no limit."""

    at: float | None = None

    @classmethod
    def after(cls, seconds: float | None) -> "Deadline":
        """Return the deadline in this number of seconds, NO_DEADLINE for None."""
        return cls(None if seconds is None else time.monotonic() + seconds)

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds that are left, not below 0; None without a limit."""
        return None if self.at is None else max(self.at - time.monotonic(), 0.0)

    @property
    def passed(self) -> bool:
        """Return whether the time is up."""
        return self.seconds_left == 0.0

    def share(self, weight: int, weights: int) -> "Deadline":
        """Return the deadline of the next part.

        weight: of this part. weights: of it and of the parts that come after it. Time that earlier
        parts did not use is divided among the later ones.
        """
        seconds = self.seconds_left
        return self if seconds is None else Deadline.after(seconds * weight / weights)


NO_DEADLINE = Deadline()
