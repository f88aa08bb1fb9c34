"""Coverage of a check: pairs or triples of feature values that its requests had."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lockstep.check.scenarios.covering import Bools, CoveringPlan, Row, count_tuples

MAX_LISTED = 40
"""Maximum tuples that a report lists as not met."""
NAMES = {2: "pairs", 3: "triples"}
NO_ROW = "no row of values has them: the other rules leave no value for some feature"
"""Reason of excluded tuples that no single exclusion names."""


class MetTuples:
    """Tuples of feature values that were planned, and those that were met.

    A tuple is met if one request of a scenario whose answers were compared had all of its values.

    planned, met: masks [N, N] of pairs or [N, N, N] of triples, where N is the number of values of
    all features.
    """

    def __init__(self, plan: CoveringPlan) -> None:
        self.covering_plan = plan
        self.values = plan.values
        self.strength = plan.strength
        size = (len(self.values.names),) * self.strength
        self.planned: Bools = np.zeros(size, np.bool_)
        self.met: Bools = np.zeros(size, np.bool_)

    def plan(self, rows: Sequence[Row]) -> None:
        """Record the rows of a scenario that was run."""
        for row in rows:
            self.planned[np.ix_(*[list(row)] * self.strength)] = True

    def add(self, values: dict[str, str]) -> None:
        """Record the values that a request had."""
        row = [self.values.number[feature_value] for feature_value in values.items()]
        self.met[np.ix_(*[row] * self.strength)] = True

    @property
    def missed(self) -> Bools:
        """Return the mask of the tuples that were planned and not met."""
        return self.planned & ~self.met & self.covering_plan.feasible

    @property
    def num_met(self) -> int:
        """Return the number of tuples that were met."""
        return count_tuples(self.met & self.covering_plan.feasible)

    @property
    def num_feasible(self) -> int:
        """Return the number of tuples that are not excluded."""
        return count_tuples(self.covering_plan.feasible)

    @property
    def name(self) -> str:
        """Return "pairs" or "triples"."""
        return NAMES[self.strength]

    def state_pairs(self) -> tuple[int, int]:
        """Return how many tuples that touch state were met, and how many there are."""
        state = self.values.state
        mask = state[:, None] | state
        if self.strength == 3:
            mask = mask[:, :, None] | state
        feasible = self.covering_plan.feasible & mask
        return count_tuples(self.met & feasible), count_tuples(feasible)

    def unmet_values(self) -> list[str]:
        """Return the values that no request had, as "feature: value"."""
        axes = tuple(range(1, self.strength))
        has = self.met.any(axis=axes)
        could = self.covering_plan.feasible.any(axis=axes)
        names = self.values.names
        return [": ".join(names[i]) for i in np.flatnonzero(could & ~has)]

    def unmet(self) -> list[str]:
        """Return tuples that were not met and why, at most MAX_LISTED."""
        unmet = self.covering_plan.feasible & ~self.met
        lines = []
        for numbers in np.argwhere(unmet):
            if list(numbers) != sorted(numbers):
                continue
            why = "did not occur" if self.planned[tuple(numbers)] else "not planned at this size"
            lines.append(f"{self._text(numbers)}: {why}")
            if len(lines) == MAX_LISTED:
                break
        return lines

    def excluded(self) -> dict[str, int]:
        """Return the number of excluded tuples by reason."""
        counts = Counter(self.values.reasons.values())
        if self.covering_plan.impossible:
            counts[NO_ROW] = len(set(self.covering_plan.impossible))
        return dict(counts)

    def summary(self) -> str:
        """Return the counts as one line."""
        state, of_state = self.state_pairs()
        excluded = sum(self.excluded().values())
        return (
            f"{self.num_met:,} of {self.num_feasible:,} {self.name} of feature values were met, "
            f"{state:,} of {of_state:,} of those that touch state; {excluded:,} pairs are excluded "
            "by name"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        state, of_state = self.state_pairs()
        features = {
            feature.name: {"values": list(feature.values), "expressed": feature.expressed}
            for feature in self.covering_plan.table.features
        }
        return {
            "strength": self.strength,
            "met": self.num_met,
            "of": self.num_feasible,
            "state_met": state,
            "state_of": of_state,
            "unmet_values": self.unmet_values(),
            "unmet": self.unmet(),
            "excluded": self.excluded(),
            "features": features,
        }

    def _text(self, numbers: Iterable[int]) -> str:
        return ", ".join(" ".join(self.values.names[i]) for i in numbers)
