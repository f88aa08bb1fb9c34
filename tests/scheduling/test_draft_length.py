"""The number of drafts, on a simulated device of known costs with random acceptance."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from lockstep.scheduling.draft_length import (
    Acceptance,
    AdaptiveDraftLength,
    Cost,
    Costs,
    FixedDraftLength,
    RandomDraftLength,
    draft_length_policy,
)

Chance = Callable[[int, int], float]
"""(step, position) -> probability that a draft is accepted after accepted ones."""

DEVICES = {
    "27B, 1 row": (1, 2, {0: 14.5, 1: 14.9, 3: 15.7}),
    "27B, 1 row, K=7": (1, 2, {0: 14.5, 1: 14.9, 3: 15.7, 7: 17.6}),
    "27B, 64 rows": (64, 2, {0: 25.7, 1: 31.0, 3: 40.9}),
    "27B, 64 rows, slower": (64, 2, {0: 25.7, 1: 33.0, 3: 46.0}),
    "drafts that cost nothing": (1, 2, {0: 4.20, 1: 4.22, 3: 4.25}),
    "drafts that hardly pay": (8, 2, {0: 5.0, 1: 8.0, 3: 16.0}),
    "cpu": (1, 1, {0: 10.0, 1: 12.5, 3: 17.0}),
}
"""Rows, steps in flight, ms by number of drafts. Null rows take 0.8 of it."""

CONSTANT = (0.0, 0.03, 0.1, 0.2, 0.3, 0.4, 0.7, 0.95)
TURNS = (5, 20, 100, 700)
WORKLOADS: dict[str, Chance] = {
    **{f"accepted {p}": lambda step, position, p=p: p for p in CONSTANT},
    **{f"turns of {n}": lambda step, position, n=n: 0.9 * (step // n % 2) for n in TURNS},
    "where contexts are long": lambda step, position: 0.4 * (step // 150 % 2),
    "the first of a step": lambda step, position: 0.95 * (position == 0),
    "ever less": lambda step, position: max(0.9 - 0.0005 * step, 0.0),
}
CONTEXTS: dict[str, Callable[[int], float]] = {
    "equal": lambda step: 1.0,
    "growing": lambda step: 1.0 + step / 2000,
    "jumping": lambda step: 1.0 + step // 150 % 2,
}
"""Duration of a step without drafts over its ms in DEVICES; the difference is added to all
others."""


@dataclass
class Device:
    """Steps of known cost, measured with `noise` and occasional `spikes`.

    steps_lost: maximum number of steps by which it was slower than without drafts, beyond 2 % of
        the time.
    tells_time: the policy learns how long the steps take.
    """

    name: str
    chance: Chance
    context: Callable[[int], float] = CONTEXTS["equal"]
    seed: int = 0
    noise: float = 0.03
    spikes: float = 0.01
    tells_time: bool = True
    used: Counter[int] = field(default_factory=Counter)
    steps_lost: float = 0.0

    def speed(self, steps: int = 2000) -> float:
        """Return tokens per ms over that of steps without drafts."""
        rows, latency, ms = DEVICES[self.name]
        draw = random.Random(self.seed)
        coins = np.random.default_rng(self.seed)
        null = {(rows, k): 0.8 * ms[k] for k in ms}
        chooser = AdaptiveDraftLength(tuple(ms), Costs.measured(null))
        flights = []
        last = 0
        time = 0.0
        without = 0.0
        for step in range(steps):
            count = chooser.choose(rows)
            result = min(count, last)
            last = count
            accepted = self._accepted(coins, step, result, rows)
            plain = ms[0] * self.context(step)
            took = plain + ms[count] - ms[0]
            self.used[count] += 1
            time += took
            without += plain * (1 + sum(accepted) / rows)
            self.steps_lost = max(self.steps_lost, (0.98 * time - without) / plain)
            off = 5.0 if draw.random() < self.spikes else abs(draw.gauss(0, self.noise))
            observed = took * (1 + off) if self.tells_time else None
            flights.append((rows, count, result, accepted, observed))
            if len(flights) >= latency:
                chooser.observe(*flights.pop(0))
        return without / time

    def _accepted(self, coins: np.random.Generator, step: int, result: int, rows: int) -> list[int]:
        """Return each row's accepted drafts: a random draw at each position."""
        accepted: list[int] = []
        remaining = rows
        for index in range(result):
            chance = self.chance(step, index)
            stay = (
                int(coins.binomial(remaining, chance))
                if remaining > 1
                else remaining * (coins.random() < chance)
            )
            accepted += [index] * (remaining - stay)
            remaining = stay
        return accepted + [result] * remaining


def best(name: str, chance: float) -> float:
    """Return the speed of the best constant number of drafts over that without drafts."""
    ms = DEVICES[name][2]
    return max(sum(chance**i for i in range(k + 1)) / ms[k] for k in ms) * ms[0]


def device_pairs(rest: Sequence[object]) -> list[Any]:
    """Return params of all pairs (device, other); those of a device with another's setting are
    slow."""
    return [
        pytest.param(name, other, marks=() if i % len(rest) == at else pytest.mark.slow)
        for i, name in enumerate(DEVICES)
        for at, other in enumerate(rest)
    ]


@pytest.mark.default_cases("27B, 64 rows-jumping", "cpu-equal")
@pytest.mark.parametrize(("name", "context"), device_pairs(tuple(CONTEXTS)))
def test_adaptive_drafts_never_lose_two_percent(name: str, context: str) -> None:
    for seed, (workload, chance) in enumerate(WORKLOADS.items()):
        device = Device(name, chance, CONTEXTS[context], seed)
        assert device.speed(1500) > 0.98, workload
        assert device.steps_lost < 4, f"{workload}: what the first trial costs, at no time more"


@pytest.mark.default_cases("27B, 64 rows", "cpu")
@pytest.mark.parametrize(("name", "clock"), device_pairs([(0.0, 0.0), (0.1, 0.01), (0.003, 0.2)]))
def test_noisy_clock_loses_no_more(name: str, clock: tuple[float, float]) -> None:
    """clock: noise and spikes of a Device."""
    noise, spikes = clock
    for chance in (0.0, 0.1):
        device = Device(name, lambda t, i, p=chance: p, noise=noise, spikes=spikes)
        assert device.speed() > 0.98, chance
    device = Device(name, lambda t, i: 0.9, noise=noise, spikes=spikes)
    assert device.speed() > 0.93 * best(name, 0.9)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("chance", [0.0, 0.5, 0.7, 0.85, 1.0])
def test_finds_the_best_count(name: str, chance: float) -> None:
    assert Device(name, lambda t, i: chance).speed(3000) > 0.95 * best(name, chance)


def test_acceptance_is_learned_per_position() -> None:
    """The first draft is nearly always accepted and the second never, so one draft is chosen."""
    device = Device("27B, 64 rows", WORKLOADS["the first of a step"])
    ms = DEVICES["27B, 64 rows"][2]
    assert device.speed() > 0.96 * 1.95 / ms[1] * ms[0]
    assert device.used[1] > 0.9 * device.used.total()


@pytest.mark.default_cases("27B, 64 rows", "cpu")
@pytest.mark.parametrize("name", DEVICES)
def test_comes_back_when_drafts_are_accepted_again(name: str) -> None:
    device = Device(name, lambda t, i: 0.0 if t < 1500 else 0.9)
    gained = (1500 + 1500 * best(name, 0.9)) / 3000
    assert device.speed(3000) > 0.8 * gained and device.used[0] < 2100


@pytest.mark.default_cases("27B, 64 rows", "cpu")
@pytest.mark.parametrize("name", DEVICES)
def test_drafts_are_tried_in_steps_without_times(name: str) -> None:
    """All steps share a forward pass with prompts, so the costs stay those of null rows."""
    accepting = Device(name, lambda t, i: 0.95, tells_time=False)
    assert accepting.speed(3000) > 0.9 * best(name, 0.95)
    refusing = Device(name, lambda t, i: 0.0, tells_time=False)
    assert refusing.speed() > 0.98


COUNTS = (0, 1, 3)
NULL = {0: 16.0, 1: 22.0, 3: 33.0}


def null_costs() -> Costs:
    """Return costs of 64 null rows."""
    return Costs.measured({(64, k): NULL[k] for k in COUNTS})


def observe(costs: Costs, count: int, *ms: float) -> dict[int, float]:
    """Observe steps of this count; return the known costs."""
    for value in ms:
        costs.observe(64, count, value)
    return costs.ms(64)


def test_costs_are_learned_from_real_rows() -> None:
    """Null rows are cheap; the first real step corrects its own cost and estimates the others."""
    costs = null_costs()
    assert costs.ms(64) == NULL
    assert observe(costs, 0, 26.0) == {k: ms + 10.0 for k, ms in NULL.items()}
    assert observe(costs, 3, 500.0, 50.0) == {0: 26.0, 1: 32.0, 3: 50.0}, "the first was disturbed"
    observe(costs, 0, 26.0, 26.0)
    assert observe(costs, 1, 500.0)[1] == 32.0, "which does not count against one draft"
    assert observe(costs, 1, 34.0, 34.0)[1] == 34.0


def test_shared_costs_change_together() -> None:
    """Longer contexts add 10 ms, observed in steps of three drafts only."""
    costs = null_costs()
    observe(costs, 0, 26.0, 26.0, 26.0)
    observe(costs, 3, 50.0, 50.0, 50.0)
    assert observe(costs, 3, *[60.0] * 30) == pytest.approx({0: 36.0, 1: 42.0, 3: 60.0})
    known = costs.ms(64)
    assert observe(costs, 3, 3000.0, 60.0) == pytest.approx(known), (
        "a disturbed step does not count"
    )


def test_costs_of_one_count_are_learned_at_its_start() -> None:
    costs = null_costs()
    observe(costs, 0, 26.0, 26.0, 26.0)
    observe(costs, 3, 50.0, 50.0, 50.0)
    assert observe(costs, 0, 28.0, 28.0, 28.0) == pytest.approx({0: 26.5, 1: 32.5, 3: 50.0})
    for _ in range(30):
        observe(costs, 3, 50.0, 50.0, 50.0)
        observe(costs, 0, 28.0, 28.0, 28.0)
    assert costs.ms(64) == pytest.approx({0: 28.0, 1: 34.0, 3: 50.0}, rel=1e-3)


def test_costs_are_interpolated_between_row_counts() -> None:
    costs = Costs.measured({(1, 0): 10.0, (1, 3): 20.0, (5, 0): 30.0, (5, 3): 80.0})
    assert costs.ms(3) == {0: 20.0, 3: 50.0}
    assert costs.ms(9) == costs.ms(5) and Costs({2: {0: Cost(7.0)}}).ms(1) == {0: 7.0}


def test_acceptance_length_follows_observations() -> None:
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


def test_config_selects_the_policy() -> None:
    taken = {(1, k): 10.0 + k for k in COUNTS}
    fixed = draft_length_policy(False, (3,), {(1, 3): 5.0})
    assert isinstance(fixed, FixedDraftLength) and fixed.choose(1) == 3
    assert isinstance(draft_length_policy(True, COUNTS, taken), AdaptiveDraftLength)


def test_random_draft_length_is_reproducible() -> None:
    drawn = [[RandomDraftLength(COUNTS).choose(1)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    one = RandomDraftLength(COUNTS)
    assert {one.choose(1) for _ in range(50)} == set(COUNTS)
