"""Report of a check: its cases, its failures and what it exercised."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.check.report.exercised import Exercised
from lockstep.check.matrix.setups import PHASES, TESTS, WORLD, Setup
from lockstep.check.shard import WHOLE, Shard


@dataclass(frozen=True)
class Failure:
    """One case that differs from the plain run. position: index among the request's answer tokens.

    where: the first layer and op that differ, known for the first failure only; file: the world,
    made small, for --replay.
    """

    setup: Setup
    batch: str
    request: str
    sampling: str
    position: int | None
    what: str
    where: str | None = None
    file: str | None = None


@dataclass(frozen=True)
class Tally:
    """One engine's cases, all of them or those of one batch."""

    setup: Setup
    cases: int
    failed: int
    seconds: float
    batch: str = "all"


@dataclass
class Report:
    """All cases of a check. `exercised`: how often what was varied really took place; used: what
    it was run with.

    compared: what of an answer is; seed: of the worlds; shard: which part of the check this is;
    numerics: empty until the plain engine stands; interrupted: ended from outside before its end.
    worlds_due, cases_due: worlds and cases of the matrix that a whole run has, where that is known.
    """

    size: str
    numerics: str = ""
    tallies: list[Tally] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    exercised: dict[str, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0
    compared: str = "tokens and logprobs"
    seed: int = 0
    shard: Shard = WHOLE
    used: Exercised | None = None
    interrupted: bool = False
    worlds_due: int | None = None
    cases_due: int | None = None

    def add(self, tally: Tally) -> None:
        """One engine's or one world's cases more."""
        self.tallies.append(tally)

    def fail(
        self,
        setup: Setup,
        batch: str,
        what: str,
        request: str = "every request",
        sampling: str = "all",
        position: int | None = None,
    ) -> None:
        """One failure more; what is not given is not known, or holds for all."""
        self.failures.append(Failure(setup, batch, request, sampling, position, what))

    def count(self, seen: Counter[str]) -> None:
        """What took place, added to what did before."""
        self.exercised = dict(Counter(self.exercised) + seen)

    @property
    def cases(self) -> int:
        """Answers compared with the plain run, and tests."""
        return sum(t.cases for t in self.tallies)

    @property
    def failed(self) -> int:
        """Answers that differ, and axes that were meant to be exercised and were not."""
        return len(self.failures)

    @property
    def verdict(self) -> str:
        """One line; where the check was interrupted, that is said first."""
        return f"{self._ending} {self._found}" if self.interrupted else self._found

    @property
    def _ending(self) -> str:
        """How much was done of a check that was interrupted."""
        worlds = sum(t.setup.phase == WORLD for t in self.tallies)
        cases = sum(t.cases for t in self.tallies if t.setup.phase in PHASES)
        due = {"scenarios": (worlds, self.worlds_due), "matrix cases": (cases, self.cases_due)}
        parts = [f"{done:,} of {of:,} {name}" for name, (done, of) in due.items() if of is not None]
        return f"Stopped early: {' and '.join(parts)} were run." if parts else "Stopped early."

    @property
    def _found(self) -> str:
        """What was compared, and how it came out."""
        tests = sum(t.cases for t in self.tallies if t.setup.phase in TESTS)
        if self.interrupted and not (self.cases or self.failed):
            return "Nothing was compared."
        if not self.failed:
            answers = f"{self.cases - tests} cases, all equal to the plain run"
            more = f" {tests} tests of distributions and logits passed." if tests else ""
            return f"{answers}, {self.compared} bit for bit.{more}"
        first = self.failures[0]
        at = "" if first.position is None else f", output position {first.position}"
        where = f"; {first.where}" if first.where else ""
        file = f" Reproduce: lockstep check --replay {first.file}" if first.file else ""
        return (
            f"{self.failed} of {self.cases} cases differ. First: drafter {first.setup.drafting}, "
            f"{first.setup.phase}, graph {first.setup.graph}, {first.batch}: {first.request}{at}: "
            f"{first.what}{where}.{file}"
        )

    def to_json(self) -> dict[str, Any]:
        """For machines: cases, failed, and the rest."""
        return {
            "cases": self.cases,
            "failed": self.failed,
            "interrupted": self.interrupted,
            "verdict": self.verdict,
            "size": self.size,
            "seed": self.seed,
            "shard": str(self.shard),
            "numerics": self.numerics,
            "seconds": round(self.seconds, 2),
            "exercised": self.exercised,
            "skipped": self.skipped,
            "not_exercised": self.used.lacks() if self.used else [],
            "engines": [asdict(t) for t in self.tallies],
            "failures": [asdict(f) for f in self.failures],
        }


class Interrupted(KeyboardInterrupt):
    """A check was ended from outside; `report` is of what was done until then."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.verdict)
        self.report = report


@contextmanager
def running(report: Report) -> Iterator[None]:
    """A check that adds to the report: how long it takes is noted. Raises Interrupted where a
    KeyboardInterrupt ends it."""
    started = time.monotonic()
    try:
        yield
    except KeyboardInterrupt:
        report.interrupted = True
        raise Interrupted(report) from None
    finally:
        report.seconds = time.monotonic() - started
