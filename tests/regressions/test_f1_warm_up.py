"""F1 (vLLM #39483): a graph captured a path that warm-up never ran.

Warm-up is the step itself. Every op that serving calls, with the shape of its step, has been called
before the first request; a warm-up that leaves the step out (the old fault) is caught.
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


def watched(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, changing: bool = False
) -> tuple[Seen, Seen]:
    """(kinds of step that warm-up ran, kinds that serving ran): prompt or not, query length."""
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


def test_serving_runs_nothing_that_warm_up_did_not(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed, served = watched(make, monkeypatch)
    assert served == {(True, 0), (False, 4)}
    assert served <= warmed


def test_every_number_of_drafts_was_warmed_up(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed, served = watched(make, monkeypatch, changing=True)
    assert served == {(True, 0), (False, 1), (False, 2), (False, 4)}
    assert served <= warmed


def test_a_warm_up_that_imitates_the_step_is_caught(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: warm-up runs zero drafts, serving runs K."""
    warm_up = Worker.warm_up

    def imitation(self: Worker, progress: Any) -> Any:
        real = self.run_step
        self.run_step = lambda *given: None  # type: ignore[assignment]
        taken = warm_up(self, progress)
        self.run_step = real
        return taken

    monkeypatch.setattr(Worker, "warm_up", imitation)
    warmed, served = watched(make, monkeypatch)
    assert not served <= warmed
