"""Covering arrays: few rows of feature values that have every pair, or every triple, of them.

A row has one value per feature. Rows share their engine's values with the other rows of an engine,
and their limits' values with the other rows of a scenario. Values are chosen greedily (Cohen et
al., The AETG system, 1997): each row begins with a tuple that is not covered yet, and each further
value is the one that covers most new tuples. The same seed gives the same rows.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from math import factorial

import numpy as np
from numpy.typing import NDArray

from lockstep.check.scenarios.features import Event, FeatureTable, Level

CANDIDATES = 6
"""Candidate rows, of which the one with most new tuples is taken."""
TRIPLE_CANDIDATES = 2
"""Candidate rows of an array of triples."""
MAX_ATTEMPTS = 40
"""Random orders of features that are tried before a row with a tuple is searched exhaustively."""
STATE_WEIGHT = 6.0
"""Weight of a pair that touches state, relative to other pairs."""
COSTLY_FACTOR = 0.1
"""Weight of the tuples of a costly value."""
POTENTIAL_WEIGHT = 0.02
"""Weight of a tuple that a value may still cover, relative to one that it covers now."""
Bools = NDArray[np.bool_]
Row = tuple[int, ...]
"""Numbers of values, see ValueNumbers."""


class ValueNumbers:
    """Numbers of all values of all features, and which of them a row may have together.

    names: (feature, value) by number. owner [N]: feature of each value. compatible [N, N]: both
    may be in a row. state [N]: the value's feature touches state.
    """

    def __init__(self, table: FeatureTable) -> None:
        self.table = table
        self.names = [(f.name, value) for f in table.features for value in f.values]
        self.number = {name: number for number, name in enumerate(self.names)}
        owners = [index for index, f in enumerate(table.features) for _ in f.values]
        self.owner = np.array(owners)
        self.state = np.array([table.features[index].state for index in owners])
        self.of_feature = [
            [self.number[f.name, value] for value in f.values] for f in table.features
        ]
        self.compatible: Bools = self.owner[:, None] != self.owner
        self.reasons: dict[tuple[int, int], str] = {}
        for exclusion in table.exclusions:
            for first, second in self._excluded(exclusion.first, exclusion.second):
                self.compatible[first, second] = self.compatible[second, first] = False
                self.reasons[min(first, second), max(first, second)] = exclusion.reason

    def _excluded(
        self, first: tuple[str, Sequence[str]], second: tuple[str, Sequence[str]]
    ) -> list[tuple[int, int]]:
        one, other = (
            [self.number[name, v] for v in values if (name, v) in self.number]
            for name, values in (first, second)
        )
        return [(a, b) for a in one for b in other]

    def features_at(self, level: Level) -> list[int]:
        """Return the indices of a level's features."""
        return [i for i, f in enumerate(self.table.features) if f.level is level]


class CoveringArray:
    """Rows of a covering array, made one after the other.

    strength: number of values of the tuples that are covered, 2 or 3. costly: values whose rows
    take long, so that few rows have them.
    """

    def __init__(
        self, table: FeatureTable, strength: int, seed: int, costly: Sequence[Event] = ()
    ) -> None:
        self.values = ValueNumbers(table)
        self.strength = strength
        self.rng = random.Random(f"covering array {seed} {strength}")
        self._factors = {self.values.number[value]: COSTLY_FACTOR for value in costly}
        ok = self.values.compatible
        self.uncovered: Bools = ok.copy()
        if strength == 3:
            self.uncovered = ok[:, :, None] & ok[:, None, :] & ok[None, :, :]
        self._had: Bools = np.zeros(len(ok), np.bool_)
        self._weights = np.ones(ok.shape, np.float32)
        state = self.values.state
        self._weights[state[:, None] | state] = STATE_WEIGHT

    @property
    def is_complete(self) -> bool:
        """Return whether every tuple was covered or is impossible."""
        return not self.uncovered.any()

    def cover(self, row: Sequence[int]) -> None:
        """Mark all tuples of a row as covered."""
        self._had[list(row)] = True
        self.uncovered[np.ix_(*[list(row)] * self.strength)] = False

    def next_tuple(self, fixed: Sequence[int]) -> Row:
        """Return a tuple that is not covered and fits the fixed values, () if there is none.

        Tuples of a value that no row had come first, then those that touch state, and among these
        those without a costly value.
        """
        fits = self._fitting(fixed)
        numbers = np.flatnonzero(fits)
        remaining = self.uncovered[np.ix_(*[numbers] * self.strength)]
        if self.strength == 2:
            new = ~self._had[numbers]
            state = self.values.state[numbers]
            cheap = np.array([number not in self._factors for number in numbers])
            touching_state = state[:, None] | state
            for preferred in (
                new[:, None] | new,
                touching_state & cheap[:, None] & cheap,
                touching_state,
            ):
                urgent = remaining & preferred
                if urgent.any():
                    remaining = urgent
                    break
        indices = np.flatnonzero(remaining)
        if not len(indices):
            return ()
        index_of_tuple = int(indices[self.rng.randrange(len(indices))])
        return tuple(int(numbers[i]) for i in np.unravel_index(index_of_tuple, remaining.shape))

    def _fitting(self, fixed: Sequence[int]) -> Bools:
        """Return the mask [N] of the values that may be in a row with all fixed ones."""
        fits: Bools = np.ones(len(self.values.names), np.bool_)
        for number in fixed:
            fits &= self.values.compatible[number]
            fits[number] = True
        return fits

    def assign(self, level: Level, fixed: Row, required: Row) -> Row | None:
        """Choose the values of a level's features; return them, or None if nothing fits.

        fixed: values of the levels above. required: values that the result must have or permit.
        """
        features = self.values.features_at(level)
        best: tuple[float, Row] | None = None
        count = CANDIDATES if self.strength == 2 else TRIPLE_CANDIDATES
        for attempt in range(MAX_ATTEMPTS):
            if attempt >= count and best is not None:
                break
            candidate = self._candidate(features, fixed, required)
            if candidate is not None and (best is None or candidate[0] > best[0]):
                best = candidate
        return None if best is None else best[1]

    def _candidate(
        self, features: Sequence[int], fixed: Row, required: Row
    ) -> tuple[float, Row] | None:
        """Choose values in a random order of features; return the new tuples and the values."""
        owner = self.values.owner
        present = list(fixed)
        fits = self._fitting((*fixed, *required))
        if not all(fits[number] for number in (*fixed, *required)):
            return None
        total = 0.0
        chosen: dict[int, int] = {}
        mine = {int(owner[n]): n for n in required if int(owner[n]) in features and n not in fixed}
        order = [*mine, *self.rng.sample(features, len(features))]
        for feature in order:
            if feature in chosen:
                continue
            options = [mine[feature]] if feature in mine else self.values.of_feature[feature]
            options = [number for number in options if fits[number]]
            if not options:
                return None
            scores = [self._score(number, present, fits) for number in options]
            highest = max(score for score, _ in scores)
            index = self.rng.choice([i for i, (s, _) in enumerate(scores) if s == highest])
            total += scores[index][1]
            number = options[index]
            chosen[feature] = number
            present.append(number)
            fits = fits & self.values.compatible[number]
            fits[present] = True
        return total, tuple(chosen[feature] for feature in features)

    def _score(self, number: int, present: list[int], fits: Bools) -> tuple[float, float]:
        """Return the score of adding a value to a row, and the weight of its new tuples."""
        if self.strength == 2:
            remaining = self.uncovered[number]
            weights = self._weights[number]
            new = float(weights[present][remaining[present]].sum())
            potential = float(weights[remaining & fits].sum())
        else:
            plane = self.uncovered[number]
            new = float(plane[np.ix_(present, present)].sum()) / 2
            potential = float(plane[present].sum()) if present else float(plane.sum())
        factor = self._factors.get(number, 1.0)
        return factor * (new + POTENTIAL_WEIGHT * potential), factor * new

    def complete(self, required: Row) -> Row | None:
        """Return a row with these values, in the order of features; None if there is none.

        The search is exhaustive: it assigns the feature with fewest fitting values first, and goes
        back where a feature has none left.
        """
        fits = self._fitting(required)
        if not all(fits[number] for number in required):
            return None
        remaining = [[n for n in numbers if fits[n]] for numbers in self.values.of_feature]
        assigned = {int(self.values.owner[number]) for number in required}
        for number in required:
            remaining[self.values.owner[number]] = [number]
        return self._search(remaining, assigned)

    def _search(self, remaining: list[list[int]], assigned: set[int]) -> Row | None:
        """Return a row of remaining values. assigned: features whose value was chosen."""
        todo = [index for index in range(len(remaining)) if index not in assigned]
        if not todo:
            return tuple(numbers[0] for numbers in remaining)
        feature = min(todo, key=lambda index: len(remaining[index]))
        for number in remaining[feature]:
            fits = self.values.compatible[number]
            reduced = [[n for n in numbers if fits[n]] for numbers in remaining]
            reduced[feature] = [number]
            if all(reduced) and (row := self._search(reduced, assigned | {feature})):
                return row
        return None

    def give_up(self, required: Row) -> None:
        """Count a tuple as covered."""
        for order in permutations(required):
            self.uncovered[order] = False


def count_tuples(mask: Bools) -> int:
    """Return the number of tuples in a symmetric mask, each counted once."""
    return int(mask.sum()) // factorial(mask.ndim)


@dataclass(frozen=True)
class PlannedScenario:
    """Values of a scenario: of its engine, its limits, and each of its requests."""

    engine: Row
    limits: Row
    requests: tuple[Row, ...]

    def rows(self) -> list[Row]:
        """Return the rows of the array: one per request."""
        return [(*self.engine, *self.limits, *request) for request in self.requests]


class CoveringPlan:
    """Scenarios whose requests are the rows of a covering array.

    table: features. strength: values per covered tuple. per_engine: consecutive scenarios that
    share an engine. num_requests: requests per scenario. Scenarios after the array's end begin
    another array of the same strength, with other rows.
    """

    def __init__(
        self,
        table: FeatureTable,
        strength: int,
        seed: int,
        per_engine: int,
        num_requests: int,
        costly: Sequence[Event] = (),
    ) -> None:
        self.table = table
        self.per_engine = per_engine
        self.num_requests = num_requests
        self.seed = seed
        self.strength = strength
        self.array = CoveringArray(table, strength, seed, costly)
        self.values = self.array.values
        self.feasible: Bools = self.array.uncovered.copy()
        self.impossible: list[Row] = []
        self._scenarios: list[PlannedScenario] = []
        self._complete_at: int | None = None

    def scenario(self, index: int) -> PlannedScenario:
        """Return a scenario's values."""
        while len(self._scenarios) <= index:
            self._append_engine()
        return self._scenarios[index]

    @property
    def num_scenarios(self) -> int:
        """Return how many scenarios have every tuple of the first array."""
        while self._complete_at is None:
            self._append_engine()
        return self._complete_at

    @property
    def num_for_values(self) -> int:
        """Return how many scenarios have every value, or every tuple if a value has none."""
        met: set[int] = set()
        index = 0
        while len(met) < len(self.values.names) and not self.is_complete(index):
            # An engine has all of its scenarios.
            for _ in range(self.per_engine):
                met.update(number for row in self.scenario(index).rows() for number in row)
                index += 1
        return index

    def is_complete(self, index: int) -> bool:
        """Return whether the scenarios before this one have every tuple."""
        while len(self._scenarios) < index:
            self._append_engine()
        return self._complete_at is not None and self._complete_at <= index

    def plan_again(self, missed: Bools) -> None:
        """Make the next scenarios cover these tuples, which earlier ones had but did not meet."""
        self.array.uncovered = missed & self.feasible

    def _append_engine(self) -> None:
        """Append the scenarios of one more engine."""
        array = self.array
        if array.is_complete:
            array.uncovered = self.feasible.copy()
        required = array.next_tuple(())
        planned = self._engine(required)
        if planned is None:
            # The greedy choices left no value for some feature.
            row = array.complete(required)
            planned = None if row is None else self._engine(row)
        if planned is None:
            self._give_up(required)
            return
        engine, scenario = planned
        self._scenarios.append(scenario)
        for _ in range(self.per_engine - 1):
            # A tuple that this engine cannot have is tried again with a separate engine. The
            # engine still gets all of its scenarios, since shards count them.
            scenario = self._scenario(engine, array.next_tuple(engine)) or scenario
            self._scenarios.append(scenario)
        if array.is_complete and self._complete_at is None:
            self._complete_at = len(self._scenarios)

    def _engine(self, required: Row) -> tuple[Row, PlannedScenario] | None:
        """Return an engine with a first scenario that has these values, None if none fit."""
        engine = self.array.assign(Level.ENGINE, (), required)
        scenario = None if engine is None else self._scenario(engine, required)
        return None if engine is None or scenario is None else (engine, scenario)

    def _give_up(self, required: Row) -> None:
        """Record a tuple that no row can have."""
        self.array.give_up(required)
        self.impossible.append(required)
        for order in permutations(required):
            self.feasible[order] = False
        if self.array.is_complete and self._complete_at is None:
            self._complete_at = len(self._scenarios)

    def _scenario(self, engine: Row, required: Row) -> PlannedScenario | None:
        """Return a scenario of an engine that has a tuple of values in its first request."""
        array = self.array
        limits = array.assign(Level.LIMITS, engine, required)
        if limits is None:
            return None
        fixed = (*engine, *limits)
        requests: list[Row] = []
        while len(requests) < self.num_requests:
            request = array.assign(Level.REQUEST, fixed, required)
            if request is None:
                if not requests:
                    return None
                break
            requests.append(request)
            array.cover((*fixed, *request))
            required = array.next_tuple(fixed)
        return PlannedScenario(engine, limits, tuple(requests))
