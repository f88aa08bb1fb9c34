"""Each part of a check gets a share of the time, and what one leaves goes to later ones."""

import pytest

from lockstep.check import deadline
from lockstep.check.deadline import NO_DEADLINE, Deadline


class Clock:
    """Clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(deadline, "time", clock)
    return clock


def test_unused_time_flows_on(clock: Clock) -> None:
    deadline = Deadline.after(60.0)
    first = deadline.share(1, 6)
    assert first.seconds_left == pytest.approx(10.0)
    clock.now += 4.0
    assert not first.passed
    second = deadline.share(2, 5)
    assert second.seconds_left == pytest.approx(2 / 5 * 56.0), "the first part left 6 seconds"
    clock.now += 30.0
    assert second.passed and deadline.share(3, 3).seconds_left == pytest.approx(26.0)
    clock.now += 100.0
    assert deadline.passed and deadline.seconds_left == 0.0 and deadline.share(1, 2).passed


def test_no_limit_never_passes(clock: Clock) -> None:
    clock.now += 1e9
    assert Deadline.after(None) == NO_DEADLINE and NO_DEADLINE.share(1, 9) == NO_DEADLINE
    assert NO_DEADLINE.seconds_left is None and not NO_DEADLINE.passed
