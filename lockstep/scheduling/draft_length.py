"""How many drafts a step brings: chosen by the host before every step, invisible in the answers.

The adaptive count weighs what a step of k drafts costs, by rows and k, against the drafts that are
accepted. All that speculation has won or lost against steps without drafts is kept as a balance, in
ms: it may try where the balance allows, and rests where it does not, so that no workload can lose
more than SHARE to it in the long run, however wrong is what it expects to be accepted. Measured:
docs/decisions/0008-adaptive-drafts.md.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low
from typing import Protocol

from lockstep.config import SpeculativeConfig

SHARE = 0.006
"""Share of the time without drafts that trials may cost."""
TRIAL = 6
"""Steps of a trial, all of which may lose."""
BEARABLE = 8
"""Losing steps of the dearest count that past winnings pay for, before it rests."""
MEMORY = 48
"""Steps after which an observed acceptance counts a third."""
PRIOR, PRIOR_WEIGHT = 0.5, 2.0
"""Acceptance of the first draft before anything is known, and the rows that this counts as."""
BETTER = 1.02
"""A count gives way to one that is faster by this factor."""
SAMPLES, PROBES, SOON = 3, 0.005, 16
"""While drafts are made, SAMPLES steps without them are measured now and then: as often as loses
the share PROBES of the tokens, and not before SOON steps."""
OWN, SHARED, JUMP = 0.25, 0.5, 0.1
"""How much of what is new in the cost of one count, and of all of them, is believed at once; what
is new is the median of SAMPLES steps, cut off at the share JUMP of what was known."""


class DraftLengthPolicy(Protocol):
    """Chooses k before a step, and is told afterwards what came of it."""

    def choose(self, rows: int) -> int:
        """Drafts of the next step, of `rows` rows."""
        ...

    def observe(self, rows: int, count: int, made: int, accepted: list[int], ms: float) -> None:
        """A step of `count` drafts, `made` of which were there, took `ms`; accepted: by row."""
        ...


@dataclass
class FixedDraftLength:
    """Always the same."""

    count: int

    def choose(self, rows: int) -> int:
        """K."""
        return self.count

    def observe(self, rows: int, count: int, made: int, accepted: list[int], ms: float) -> None:
        """Nothing is learned."""


@dataclass
class RandomDraftLength:
    """Another one at every step: to test that every transition leaves the answers alone."""

    counts: tuple[int, ...]
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def choose(self, rows: int) -> int:
        """Any."""
        return self.draw.choice(self.counts)

    def observe(self, rows: int, count: int, made: int, accepted: list[int], ms: float) -> None:
        """Nothing is learned."""


@dataclass
class Cost:
    """ms of one kind of step. null: measured on null rows when the engine was stood up; extra: what
    real rows take beyond, running; seen: real steps measured."""

    null: float
    extra: float = 0.0
    seen: int = 0


@dataclass
class Run:
    """Steps of one count in a row: how many were measured, and ms of the latest."""

    count: int
    steps: int = 0
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))


@dataclass
class Costs:
    """ms of a step by rows and count, among them what was never measured on real rows.

    latest: what ms() found, by rows, until a step of them is observed.
    """

    table: dict[int, dict[int, Cost]]
    runs: dict[int, Run] = field(default_factory=dict)
    latest: dict[int, dict[int, float]] = field(default_factory=dict)

    @classmethod
    def measured(cls, nulls: dict[tuple[int, int], float]) -> "Costs":
        """(rows, count) -> ms of a step of null rows."""
        table: dict[int, dict[int, Cost]] = {}
        for (rows, count), ms in sorted(nulls.items()):
            table.setdefault(rows, {})[count] = Cost(ms)
        return cls(table)

    def at(self, rows: int) -> dict[int, Cost]:
        """The line of this many rows, made from its neighbours where the table has none."""
        if rows not in self.table:
            below = max((r for r in self.table if r < rows), default=min(self.table))
            above = min((r for r in self.table if r > rows), default=max(self.table))
            share = (rows - below) / (above - below) if above > below else 0.0
            low, high = self.table[below], self.table[above]
            self.table[rows] = {
                k: Cost(low[k].null + share * (high[k].null - low[k].null)) for k in low
            }
        return self.table[rows]

    def observe(self, rows: int, count: int, ms: float) -> None:
        """The first steps of a run tell its count from the others. The later ones tell what all of
        them share, contexts above all, so that no count is out of date while it rests."""
        line, run = self.at(rows), self.runs.get(rows)
        self.latest.pop(rows, None)
        if run is None or run.count != count:
            run = self.runs[rows] = Run(count)
        run.latest.append(ms)
        run.steps += 1
        cost = line[count]
        cost.seen += 1
        known = cost.null + cost.extra
        new = min(max(median_low(run.latest) - known, -JUMP * known), JUMP * known)
        if cost.seen <= SAMPLES:
            cost.extra = min(run.latest) - cost.null
        elif run.steps == SAMPLES:
            cost.extra += OWN * new
        elif run.steps > SAMPLES:
            for other in line.values():
                other.extra += SHARED * new if other.seen else 0.0

    def ms(self, rows: int) -> dict[int, float]:
        """count -> ms."""
        if rows not in self.latest:
            self.latest[rows] = self._estimate(rows)
        return self.latest[rows]

    def _estimate(self, rows: int) -> dict[int, float]:
        """count -> ms. What real rows add is taken from the nearest count that has seen enough; of
        one that has seen too few, the less, since a disturbed first step would end all trials."""
        line = self.at(rows)
        seen = [k for k, cost in line.items() if cost.seen]
        known = [k for k in seen if line[k].seen >= SAMPLES] or seen

        def extra(k: int, cost: Cost) -> float:
            if not known or k in known:
                return cost.extra
            near = line[min(known, key=lambda s: abs(s - k))].extra
            return min(near, cost.extra) if cost.seen else near

        return {k: max(cost.null + extra(k, cost), 1e-3) for k, cost in line.items()}


class Acceptance:
    """The share of drafts accepted at each place, given that those in front were: running."""

    def __init__(self, most: int) -> None:
        self.tried, self.taken = [0.0] * most, [0.0] * most

    def observe(self, made: int, accepted: list[int]) -> None:
        """One step's rows, which had `made` drafts each."""
        tried = len(accepted)
        for i in range(len(self.tried)):
            taken = sum([a > i for a in accepted]) if i < made else 0
            self.tried[i] += (tried if i < made else 0) - self.tried[i] / MEMORY
            self.taken[i] += taken - self.taken[i] / MEMORY
            tried = taken

    def length(self, count: int) -> float:
        """Tokens that a step of `count` drafts is expected to emit per row."""
        total, chance, rate = 1.0, 1.0, PRIOR
        for tried, taken in zip(self.tried[:count], self.taken[:count], strict=True):
            rate = (taken + PRIOR_WEIGHT * rate) / (tried + PRIOR_WEIGHT)
            chance *= rate
            total += chance
        return total


class AdaptiveDraftLength:
    """The count with the most tokens per ms, as far as the balance allows."""

    def __init__(self, counts: tuple[int, ...], costs: Costs) -> None:
        self.counts, self.costs = counts, costs
        self.acceptance = Acceptance(counts[-1])
        self.balance, self.mark = 0.0, 0.0
        self.count, self.left = counts[1], TRIAL
        self.due: dict[int, int] = {}

    def choose(self, rows: int) -> int:
        """0 while it rests, and now and then to know what that costs."""
        if self.due.setdefault(rows, 0) <= 0:
            return 0
        ms = self.costs.ms(rows)
        best = self._best(ms)
        over = not (best or self.left or self.balance > self.mark)
        if self.count and (over or self.balance < -self._loss(ms)):
            self.count, self.balance = 0, min(self.balance, 0.0)
        elif self.count or self.balance >= self._price(ms):
            if not self.left:
                self.left, self.mark = TRIAL, self.balance
            self.count = best or self.count or self._least(ms)
            self.left -= 1
        return self.count

    def observe(self, rows: int, count: int, made: int, accepted: list[int], ms: float) -> None:
        """Keeps time and acceptance, and enters what the step has won or lost."""
        self.costs.observe(rows, count, ms)
        self._watch(rows, count)
        if made:
            self.acceptance.observe(made, [min(a, made) for a in accepted])
        cost = self.costs.ms(rows)
        without = cost[0] * (1 + sum(accepted) / max(1, len(accepted)))
        self.balance += without - cost[count] + SHARE * without
        self.balance = min(self.balance, BEARABLE * self._loss(cost))

    def _watch(self, rows: int, count: int) -> None:
        """Counts down to when steps without drafts are due; from 0 on, the steps that were."""
        due = self.due.get(rows, 0)
        if due > 0:
            self.due[rows] = due - 1 if count else self._stale(rows)
        elif count == 0:
            self.due[rows] = due - 1 if due > 1 - SAMPLES else self._stale(rows)

    def _stale(self, rows: int) -> int:
        """Steps until a step without drafts is due; the step behind them has no drafts either."""
        ms = self.costs.ms(rows)
        best = max(self.acceptance.length(k) / ms[k] for k in self.counts)
        return max(SOON, int((SAMPLES + 1) * (1 - 1 / (ms[0] * best)) / PROBES))

    def _best(self, ms: dict[int, float]) -> int:
        rates = {k: self.acceptance.length(k) / ms[k] for k in self.counts}
        best = max(rates, key=lambda k: rates[k])
        return best if rates[best] > BETTER * rates[self.count] else self.count

    def _least(self, ms: dict[int, float]) -> int:
        """The count that a trial costs least with."""
        return min(self.counts[1:], key=lambda k: ms[k])

    def _price(self, ms: dict[int, float]) -> float:
        """What a trial may lose."""
        return TRIAL * max(ms[self._least(ms)] - ms[0], SHARE * ms[0])

    def _loss(self, ms: dict[int, float]) -> float:
        """What a step of the dearest count loses where nothing is accepted."""
        return max(*ms.values(), (1 + SHARE) * ms[0]) - ms[0]


def draft_length_policy(
    config: SpeculativeConfig, counts: tuple[int, ...], taken: dict[tuple[int, int], float]
) -> DraftLengthPolicy:
    """Who chooses among the counts, as the config asks.

    taken: (rows, count) -> ms of a step of null rows.
    """
    if not config.adaptive:
        return FixedDraftLength(counts[-1])
    return AdaptiveDraftLength(counts, Costs.measured(taken))
