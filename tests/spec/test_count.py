"""The number of drafts, against a device of known costs that accepts drafts by coin."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from lockstep.config import SpeculativeConfig
from lockstep.spec.count import (
    Acceptance,
    AdaptiveCount,
    Cost,
    Costs,
    FixedCount,
    RandomCount,
    draft_count,
)

Chance = Callable[[int, int], float]
COUNTS = (0, 1, 3)
ONE_ROW = {0: 14.5, 1: 14.9, 3: 15.8}
MANY_ROWS = {0: 25.7, 1: 33.0, 3: 47.0}
MANY_NULL = {0: 16.0, 1: 22.0, 3: 33.0}
CPU = {0: 10.0, 1: 12.5, 3: 17.0}
DEVICES = {
    "one row": (1, ONE_ROW, ONE_ROW, 2),
    "many rows": (64, MANY_ROWS, MANY_NULL, 2),
    "cpu": (1, CPU, CPU, 1),
}
"""rows, ms by count, ms of null rows by count, steps in flight."""


@dataclass
class Device:
    """Steps with these costs; chance(step, place): whether a draft there is accepted."""

    name: str
    chance: Chance
    seed: int = 0
    used: Counter[int] = field(default_factory=Counter)

    def speed(self, steps: int = 3000) -> float:
        """Tokens per ms over that of steps without drafts."""
        rows, ms, null, latency = DEVICES[self.name]
        draw = random.Random(self.seed)
        chooser = AdaptiveCount(COUNTS, Costs.measured({(rows, k): null[k] for k in COUNTS}))
        flights, last, time, tokens = [], 0, 0.0, 0.0
        for step in range(steps):
            count = chooser.choose(rows)
            made, last = min(count, last), count
            accepted = [self._accepted(draw, step, made) for _ in range(rows)]
            self.used[count] += 1
            tokens += 1 + sum(accepted) / rows
            time += ms[count]
            disturbed = 5.0 if draw.random() < 0.01 else abs(draw.gauss(0, 0.03))
            flights.append((rows, count, made, accepted, ms[count] * (1 + disturbed)))
            if len(flights) >= latency:
                chooser.observe(*flights.pop(0))
        return tokens / time * ms[0]

    def _accepted(self, draw: random.Random, step: int, made: int) -> int:
        place = 0
        while place < made and draw.random() < self.chance(step, place):
            place += 1
        return place


def best(name: str, chance: float) -> float:
    """The speed of the best count that never changes, over that without drafts."""
    ms = DEVICES[name][1]
    return max(sum(chance**i for i in range(k + 1)) / ms[k] for k in COUNTS) * ms[0]


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("seed", range(2))
def test_never_loses_two_percent(name: str, seed: int) -> None:
    for chance in (0.0, 0.03, 0.1, 0.2, 0.3, 0.4):
        assert Device(name, lambda t, i, p=chance: p, seed).speed() > 0.98, chance
    for period in (20, 100, 700):  # good and hopeless times in turn
        turns = Device(name, lambda t, i, n=period: 0.9 * (t // n % 2), seed)
        assert turns.speed() > 0.98, period


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("chance", [0.0, 0.5, 0.7, 0.85, 1.0])
def test_finds_the_best_count(name: str, chance: float) -> None:
    assert Device(name, lambda t, i: chance).speed() > 0.96 * best(name, chance)


def test_places_are_told_apart() -> None:
    """The first draft is nearly always right and the second never: one draft it is."""
    device = Device("many rows", lambda t, i: 0.95 if i == 0 else 0.0)
    assert device.speed() > 0.96 * 1.95 / MANY_ROWS[1] * MANY_ROWS[0]
    assert device.used[1] > 0.9 * device.used.total()


@pytest.mark.parametrize("name", DEVICES)
def test_comes_back_when_drafts_are_accepted_again(name: str) -> None:
    device = Device(name, lambda t, i: 0.0 if t < 1500 else 0.9)
    gained = (1500 + 1500 * best(name, 0.9)) / 3000
    assert device.speed() > 0.85 * gained and device.used[3] > 1000


def test_costs_are_learned_from_real_rows() -> None:
    """Null rows are cheap; the first real step corrects its own cost and guesses the others'."""
    costs = Costs.measured({(64, k): MANY_NULL[k] for k in COUNTS})
    assert costs.ms(64) == MANY_NULL
    costs.at(64)[0].observe(26.0)
    assert costs.ms(64) == {k: ms + 10.0 for k, ms in MANY_NULL.items()}
    costs.at(64)[3].observe(50.0)
    assert costs.ms(64) == {0: 26.0, 1: 32.0, 3: 50.0}
    for _ in range(60):
        costs.at(64)[0].observe(30.0)
    assert costs.ms(64)[0] == pytest.approx(30.0, rel=1e-3)
    costs.at(64)[0].observe(3000.0)
    assert costs.ms(64)[0] < 30.7, "a disturbed step hardly counts"
    costs.at(64)[1].observe(3000.0)
    costs.at(64)[1].observe(33.0)
    assert costs.ms(64)[1] == 33.0, "neither where it is the first"


def test_rows_between_those_measured() -> None:
    costs = Costs.measured({(1, 0): 10.0, (1, 3): 20.0, (5, 0): 30.0, (5, 3): 80.0})
    assert costs.ms(3) == {0: 20.0, 3: 50.0}
    assert costs.ms(9) == costs.ms(5) and Costs({2: {0: Cost(7.0)}}).ms(1) == {0: 7.0}


def test_acceptance_length_of_what_was_seen() -> None:
    seen = Acceptance(3)
    guess = seen.length(3)
    assert 1 < seen.length(1) < guess < 4
    for _ in range(400):
        seen.observe(3, [3, 1, 1, 0])
    assert seen.length(1) == pytest.approx(1.75, abs=0.02)
    assert seen.length(3) == pytest.approx(2.25, abs=0.05)
    for _ in range(400):
        seen.observe(1, [1, 1, 1, 0])
    assert seen.length(1) == pytest.approx(1.75, abs=0.02)
    assert seen.length(3) > 2.4, "what is not tried any more is forgotten"


def test_the_config_says_who_chooses() -> None:
    taken = {(1, k): 10.0 + k for k in COUNTS}
    fixed = draft_count(SpeculativeConfig("ngram", 3, adaptive=False), (3,), {(1, 3): 5.0})
    assert isinstance(fixed, FixedCount) and fixed.choose(1) == 3
    assert isinstance(draft_count(SpeculativeConfig("ngram", 3), COUNTS, taken), AdaptiveCount)
    spec = SpeculativeConfig("ngram", 3, adaptive="random")
    drawn = [[draft_count(spec, COUNTS, taken).choose(1)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    one = draft_count(spec, COUNTS, taken)
    assert isinstance(one, RandomCount) and {one.choose(1) for _ in range(50)} == set(COUNTS)
