"""Shards: equal parts of a check that run in separate processes."""

import random
from dataclasses import dataclass
from functools import lru_cache

from lockstep.errors import ConfigError

MAX_SHARDS = 1024
"""Maximum number of shards."""


@dataclass(frozen=True)
class Shard:
    """Part number `index`, from 1, of `count`. Raises ConfigError if it does not exist."""

    index: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count <= MAX_SHARDS:
            raise ConfigError(
                f"shard={self} is not allowed; allowed: I/N with I from 1 to N, and N at most "
                f"{MAX_SHARDS:,}. Give each process its own I, such as 1/4 to 4/4."
            )

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @classmethod
    def read(cls, text: str) -> "Shard":
        """Return the shard that a text such as 2/4 names. Raises ConfigError."""
        (index, _, count) = text.partition("/")
        # The length is bounded first: int() takes quadratic time for long numbers.
        if not (index.isdecimal() and count.isdecimal() and len(text) < 16):
            raise ConfigError(
                f"shard={text!r} is not allowed; allowed: I/N, two whole numbers, such as 2/4."
            )
        return cls(int(index), int(count))

    def has(self, number: int) -> bool:
        """Return whether this shard includes the case of this number, from 0."""
        (cycle, position) = divmod(number, self.count)
        return _shuffled_shards(cycle, self.count)[position] == self.index


@lru_cache(maxsize=1024)
def _shuffled_shards(cycle: int, count: int) -> tuple[int, ...]:
    """Return a shuffled assignment of `count` consecutive cases to shards."""
    # Cases repeat a cycle of drafters, phases and graphs. Without shuffling, a shard whose count is
    # a multiple of that cycle would get the same drafter each time, and never one that drafts.
    order = list(range(1, count + 1))
    random.Random(f"shards {cycle} of {count}").shuffle(order)
    return tuple(order)


WHOLE = Shard()
"""Shard that is the complete check."""
