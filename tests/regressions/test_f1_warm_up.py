"""F1 (vLLM #39483): a graph captured a path that warm-up never ran.

Warm-up runs the serving step itself, so every op and shape has run before the first request. A
warm-up that omits a kind of step (the fault) is detected.
"""

from collections.abc import Callable
from typing import Any

import pytest

from lockstep import LLM
from lockstep.step import StepShape
from lockstep.worker.program import Program
from lockstep.worker.worker import Worker
from tests.regressions.conftest import answers

Seen = set[tuple[bool, int]]


def steps_run(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, changing: bool = False
) -> tuple[Seen, Seen]:
    """Return the kinds of step that warm-up ran, and those that serving ran: (prompt or not, query
    length)."""
    seen: Seen = set()
    run = Program.forward

    def watch(self: Program, shape: StepShape) -> Any:
        seen.add((shape.prompt, 0 if shape.prompt else shape.query_len))
        return run(self, shape)

    monkeypatch.setattr(Program, "forward", watch)
    llm = make("mtp", 3, changing=changing)
    warmed = set(seen)
    seen.clear()
    answers(llm)
    return warmed, seen


def test_warm_up_covers_every_serving_step(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed, served = steps_run(make, monkeypatch)
    assert served == {(True, 0), (False, 4)}
    assert served <= warmed


def test_warm_up_covers_every_number_of_drafts(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed, served = steps_run(make, monkeypatch, changing=True)
    assert served == {(True, 0), (False, 1), (False, 2), (False, 4)}
    assert served <= warmed


def test_imitated_warm_up_is_detected(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: warm-up runs without drafts, serving with K."""
    warm_up = Worker.warm_up

    def imitation(self: Worker, progress: Any) -> Any:
        real = self.run_step
        self.run_step = lambda *args: None  # type: ignore[assignment]
        taken = warm_up(self, progress)
        self.run_step = real
        return taken

    monkeypatch.setattr(Worker, "warm_up", imitation)
    warmed, served = steps_run(make, monkeypatch)
    assert not served <= warmed
