"""Draft length policies: they choose the number of drafts per row before every step.

The choice changes the speed, never an answer. The adaptive policy compares, per number of rows, the
cost in ms of a step of k drafts with the tokens that it is expected to emit. It keeps a balance in
ms: what all steps so far have gained or lost against steps without drafts. It drafts only as far as
the balance allows, so in the long run no workload loses more than TRIAL_BUDGET of its time to
drafting, however wrong the expected acceptance is. Measured in
docs/decisions/0008-adaptive-drafts.md.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low
from typing import Protocol

# All of these were chosen by the simulations and runs of docs/decisions/0008-adaptive-drafts.md.
TRIAL_BUDGET = 0.006
"""Share of the time of steps without drafts that trials of drafting may cost."""
TRIAL_STEPS = 6
"""Steps of a trial. All of them may lose."""
MAX_SAVED_LOSSES = 8
"""Bound of the balance, in losses of a step with max_drafts of which none is accepted."""
ACCEPTANCE_MEMORY = 48
"""Steps after which the weight of an observed acceptance has fallen to 1 / e."""
PRIOR_ACCEPTANCE = 0.5
"""Assumed acceptance of the first draft before any was observed."""
PRIOR_ROWS = 2.0
"""Observed rows that the assumed acceptance weighs as much as."""
SWITCH_FACTOR = 1.02
"""Expected speed-up from which another draft length is chosen."""
COST_SAMPLES = 3
"""Steps whose median gives the cost of a draft length."""
BASELINE_SHARE = 0.005
"""Share of the tokens that may be lost to steps without drafts which only measure their cost."""
BASELINE_INTERVAL = 16
"""Minimum number of steps between two such measurements."""
OWN_RATE = 0.25
"""Share of a cost's change that is applied at once to its own draft length."""
SHARED_RATE = 0.5
"""Share of a cost's change that is applied to all draft lengths, such as longer contexts."""
MAX_JUMP = 0.1
"""Maximum relative change of a cost by one measurement."""


class DraftLengthPolicy(Protocol):
    """Policy that chooses the number of drafts before a step, and observes the step afterwards.

    min_drafts: the smallest draft length that it chooses.
    """

    @property
    def min_drafts(self) -> int: ...

    def choose(self, rows: int) -> int:
        """Return the drafts per row of the next step, of `rows` rows."""
        ...

    def observe(
        self, rows: int, num_drafts: int, num_drafted: int, accepted: list[int], ms: float | None
    ) -> None:
        """Observe a step with `num_drafted` drafts per row, for which `num_drafts` were chosen.

        accepted: accepted drafts per row. ms: time of the step; None if it shared a forward pass
        with a prompt step.
        """
        ...


@dataclass
class FixedDraftLength:
    """Policy with the same number of drafts in every step."""

    num_drafts: int

    @property
    def min_drafts(self) -> int:
        """Return K."""
        return self.num_drafts

    def choose(self, rows: int) -> int:
        """Return K."""
        return self.num_drafts

    def observe(
        self, rows: int, num_drafts: int, num_drafted: int, accepted: list[int], ms: float | None
    ) -> None:
        """Ignore the step."""


@dataclass
class RandomDraftLength:
    """Policy with a random number in every step: shows that no transition changes an answer."""

    draft_lengths: tuple[int, ...]
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def min_drafts(self) -> int:
        """Return the smallest number."""
        return min(self.draft_lengths)

    def choose(self, rows: int) -> int:
        """Return a random number."""
        return self.rng.choice(self.draft_lengths)

    def observe(
        self, rows: int, num_drafts: int, num_drafted: int, accepted: list[int], ms: float | None
    ) -> None:
        """Ignore the step."""


@dataclass
class Cost:
    """Cost in ms of a step of one number of rows and drafts.

    null: measured on null rows at warm-up. extra: running estimate of what real rows add. seen:
    number of measured steps with real rows.
    """

    null: float
    extra: float = 0.0
    seen: int = 0


@dataclass
class Streak:
    """Streak of consecutive steps with one draft length. latest: ms of the latest steps."""

    num_drafts: int
    steps: int = 0
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=COST_SAMPLES))


@dataclass
class Costs:
    """Costs in ms by rows and draft length, also of combinations that no step has had.

    estimates: cached results of ms(), by rows, until a step of these rows is observed.
    """

    table: dict[int, dict[int, Cost]]
    streaks: dict[int, Streak] = field(default_factory=dict)
    estimates: dict[int, dict[int, float]] = field(default_factory=dict)

    @classmethod
    def measured(cls, nulls: dict[tuple[int, int], float]) -> "Costs":
        """Return the costs of steps of null rows: (rows, drafts) -> ms."""
        table: dict[int, dict[int, Cost]] = {}
        for (rows, num_drafts), ms in sorted(nulls.items()):
            table.setdefault(rows, {})[num_drafts] = Cost(ms)
        return cls(table)

    def at(self, rows: int) -> dict[int, Cost]:
        """Return the costs of this many rows by draft length, interpolated where none were
        measured.
        """
        if rows not in self.table:
            below = max((r for r in self.table if r < rows), default=min(self.table))
            above = min((r for r in self.table if r > rows), default=max(self.table))
            share = (rows - below) / (above - below) if above > below else 0.0
            low = self.table[below]
            high = self.table[above]
            self.table[rows] = {
                k: Cost(low[k].null + share * (high[k].null - low[k].null)) for k in low
            }
        return self.table[rows]

    def observe(self, rows: int, num_drafts: int, ms: float) -> None:
        """Update costs from a step.

        The first steps of a streak move its own draft length. Later ones move all lengths, since
        contexts grow for all: so no cost is out of date when its length is chosen again.
        """
        costs = self.at(rows)
        streak = self.streaks.get(rows)
        self.estimates.pop(rows, None)
        if streak is None or streak.num_drafts != num_drafts:
            streak = Streak(num_drafts)
            self.streaks[rows] = streak
        streak.latest.append(ms)
        streak.steps += 1
        cost = costs[num_drafts]
        cost.seen += 1
        known = cost.null + cost.extra
        # Clamped: one disturbed step must not move a cost far.
        change = min(max(median_low(streak.latest) - known, -MAX_JUMP * known), MAX_JUMP * known)
        if cost.seen <= COST_SAMPLES:
            cost.extra = min(streak.latest) - cost.null
        elif streak.steps == COST_SAMPLES:
            cost.extra += OWN_RATE * change
        elif streak.steps > COST_SAMPLES:
            for other in costs.values():
                other.extra += SHARED_RATE * change if other.seen else 0.0

    def ms(self, rows: int) -> dict[int, float]:
        """Return draft length -> estimated ms."""
        if rows not in self.estimates:
            self.estimates[rows] = self._estimate(rows)
        return self.estimates[rows]

    def _estimate(self, rows: int) -> dict[int, float]:
        """Return draft length -> estimated ms.

        The extra cost of real rows comes from the nearest length with enough measurements. A length
        with too few takes the smaller of both, since one disturbed first step would end all trials.
        """
        costs = self.at(rows)
        seen = [k for k, cost in costs.items() if cost.seen]
        known = [k for k in seen if costs[k].seen >= COST_SAMPLES] or seen

        def extra(k: int, cost: Cost) -> float:
            if not known or k in known:
                return cost.extra
            near = costs[min(known, key=lambda s: abs(s - k))].extra
            return min(near, cost.extra) if cost.seen else near

        return {k: max(cost.null + extra(k, cost), 1e-3) for k, cost in costs.items()}


class Acceptance:
    """Running share of accepted drafts by index, given that all earlier ones were accepted."""

    def __init__(self, max_drafts: int) -> None:
        self.tried = [0.0] * max_drafts
        self.taken = [0.0] * max_drafts

    def observe(self, num_drafted: int, accepted: list[int]) -> None:
        """Observe the rows of a step, which had `num_drafted` drafts each."""
        tried = len(accepted)
        for i in range(len(self.tried)):
            taken = tried - accepted.count(i) if i < num_drafted else 0
            self.tried[i] += (tried if i < num_drafted else 0) - self.tried[i] / ACCEPTANCE_MEMORY
            self.taken[i] += taken - self.taken[i] / ACCEPTANCE_MEMORY
            tried = taken

    def length(self, num_drafts: int) -> float:
        """Return the tokens that a step of `num_drafts` drafts is expected to emit per row."""
        total = 1.0
        chance = 1.0
        rate = PRIOR_ACCEPTANCE
        for tried, taken in zip(self.tried[:num_drafts], self.taken[:num_drafts], strict=True):
            rate = (taken + PRIOR_ROWS * rate) / (tried + PRIOR_ROWS)
            chance *= rate
            total += chance
        return total


class AdaptiveDraftLength:
    """Policy with the most expected tokens per ms, as far as the balance allows.

    balance: ms gained (positive) or lost against steps without drafts, plus the trial budget.
    trial_start: balance at the start of the current trial. steps_left: of the current trial. due:
    by rows, steps until the cost without drafts is measured again; 0 or less during a measurement.
    """

    def __init__(self, draft_lengths: tuple[int, ...], costs: Costs) -> None:
        self.draft_lengths = draft_lengths
        self.costs = costs
        self.acceptance = Acceptance(draft_lengths[-1])
        self.balance = 0.0
        self.trial_start = 0.0
        self.num_drafts = draft_lengths[1]
        self.steps_left = TRIAL_STEPS
        self.due: dict[int, int] = {}

    @property
    def min_drafts(self) -> int:
        """Return 0: the policy compares with steps without drafts."""
        return self.draft_lengths[0]

    def choose(self, rows: int) -> int:
        """Return 0 where the balance allows no trial or the cost without drafts is due, else a
        length.
        """
        if self.due.setdefault(rows, 0) <= 0:
            return 0
        ms = self.costs.ms(rows)
        best = self._best(ms)
        trial_failed = not (best or self.steps_left or self.balance > self.trial_start)
        if self.num_drafts and (trial_failed or self.balance < -self._loss(ms)):
            self.num_drafts = 0
            self.balance = min(self.balance, 0.0)
        elif self.num_drafts or self.balance >= self._price(ms):
            if not self.steps_left:
                self.steps_left = TRIAL_STEPS
                self.trial_start = self.balance
            self.num_drafts = best or self.num_drafts or self._cheapest_trial(ms)
            self.steps_left -= 1
        return self.num_drafts

    def observe(
        self, rows: int, num_drafts: int, num_drafted: int, accepted: list[int], ms: float | None
    ) -> None:
        """Update costs and acceptance, and add the step's gain or loss to the balance.

        A step whose time is not known counts with the known costs.
        """
        if ms is not None:
            self.costs.observe(rows, num_drafts, ms)
        self._count_due(rows, num_drafts)
        if num_drafted:
            self.acceptance.observe(num_drafted, accepted)
        cost = self.costs.ms(rows)
        # Time that the same tokens would have taken without drafts.
        without = cost[0] * (1 + sum(accepted) / max(1, len(accepted)))
        self.balance += without - cost[num_drafts] + TRIAL_BUDGET * without
        self.balance = min(self.balance, MAX_SAVED_LOSSES * self._loss(cost))

    def _count_due(self, rows: int, num_drafts: int) -> None:
        """Count down to the next measurement without drafts; count its own steps below 0."""
        due = self.due.get(rows, 0)
        if due > 0:
            self.due[rows] = due - 1 if num_drafts else self._steps_until_due(rows)
        elif num_drafts == 0:
            self.due[rows] = due - 1 if due > 1 - COST_SAMPLES else self._steps_until_due(rows)

    def _steps_until_due(self, rows: int) -> int:
        """Return the steps until a measurement without drafts is due."""
        ms = self.costs.ms(rows)
        best = max(self.acceptance.length(k) / ms[k] for k in self.draft_lengths)
        return max(
            BASELINE_INTERVAL, int((COST_SAMPLES + 1) * (1 - 1 / (ms[0] * best)) / BASELINE_SHARE)
        )

    def _best(self, ms: dict[int, float]) -> int:
        """Return the draft length with the most expected tokens per ms.

        The current one stays unless another is better by SWITCH_FACTOR.
        """
        rates = {k: self.acceptance.length(k) / ms[k] for k in self.draft_lengths}
        best = max(rates, key=lambda k: rates[k])
        return best if rates[best] > SWITCH_FACTOR * rates[self.num_drafts] else self.num_drafts

    def _cheapest_trial(self, ms: dict[int, float]) -> int:
        """Return the draft length of the cheapest trial."""
        return min(self.draft_lengths[1:], key=lambda k: ms[k])

    def _price(self, ms: dict[int, float]) -> float:
        """Return the ms that a trial may lose."""
        return TRIAL_STEPS * max(ms[self._cheapest_trial(ms)] - ms[0], TRIAL_BUDGET * ms[0])

    def _loss(self, ms: dict[int, float]) -> float:
        """Return the ms that a step loses at most, where nothing is accepted."""
        return max(*ms.values(), (1 + TRIAL_BUDGET) * ms[0]) - ms[0]


def draft_length_policy(
    adaptive: bool, draft_lengths: tuple[int, ...], step_ms: dict[tuple[int, int], float]
) -> DraftLengthPolicy:
    """Return the adaptive policy, or the one that always takes the maximum.

    step_ms: (rows, drafts) -> ms of a step of null rows.
    """
    if not adaptive:
        return FixedDraftLength(draft_lengths[-1])
    return AdaptiveDraftLength(draft_lengths, Costs.measured(step_ms))
