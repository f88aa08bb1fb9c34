"""Report of a check: its cases, failures and event counters."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.check.matrix.setups import PHASES, SCENARIO, TESTS, Setup
from lockstep.check.report.coverage import Coverage
from lockstep.check.shard import WHOLE, Shard

if TYPE_CHECKING:
    from lockstep.check.scenarios.met_tuples import MetTuples


@dataclass(frozen=True)
class Failure:
    """Case that differs from the plain run.

    position: index among the request's output tokens. where: the first layer and op that differ,
    for the first failure only. file: the shrunk scenario for --replay.
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
    """Counts of one engine's cases, of all or of one batch."""

    setup: Setup
    cases: int
    failed: int
    seconds: float
    batch: str = "all"


@dataclass
class Report:
    """Result of a check.

    numerics: name of the engine's numerics, empty until the plain engine is built. exercised:
    counters of the events that the check varies. skipped: reasons against drafters that the
    checkpoint does not support. compared: compared parts of an output, as text. seed: seed of the
    scenarios. shard: part of the check. coverage: ops, drafters and parameters that ran.
    interrupted: the check was stopped early. num_scenarios, num_matrix_cases: totals of a complete
    run, None if unknown.
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
    coverage: Coverage | None = None
    interrupted: bool = False
    num_scenarios: int | None = None
    num_matrix_cases: int | None = None
    tuples: "MetTuples | None" = None
    refused: list[str] = field(default_factory=list)

    def add(self, tally: Tally) -> None:
        """Add the cases of an engine or a scenario."""
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
        """Add a failure; the defaults describe a failure of all requests."""
        self.failures.append(Failure(setup, batch, request, sampling, position, what))

    def count(self, events: Counter[str]) -> None:
        """Add event counters."""
        self.exercised = dict(Counter(self.exercised) + events)

    @property
    def cases(self) -> int:
        """Return the number of compared outputs and of tests."""
        return sum(t.cases for t in self.tallies)

    @property
    def failed(self) -> int:
        """Return the number of outputs that differ, and of required events that never occurred."""
        return len(self.failures)

    @property
    def verdict(self) -> str:
        """Return the result as one line, which begins with the interruption if there was one."""
        return f"{self._progress} {self._result}" if self.interrupted else self._result

    @property
    def _progress(self) -> str:
        """Return how much of an interrupted check was run."""
        scenarios = sum(t.setup.phase == SCENARIO for t in self.tallies)
        cases = sum(t.cases for t in self.tallies if t.setup.phase in PHASES)
        totals = {
            "scenarios": (scenarios, self.num_scenarios),
            "matrix cases": (cases, self.num_matrix_cases),
        }
        parts = [
            f"{done:,} of {of:,} {name}" for name, (done, of) in totals.items() if of is not None
        ]
        return f"Stopped early: {' and '.join(parts)} were run." if parts else "Stopped early."

    @property
    def _result(self) -> str:
        """Return what was compared, and with which result."""
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
        """Return the report as plain data."""
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
            "not_exercised": self.coverage.missing() if self.coverage else [],
            "refused": self.refused,
            "feature_tuples": self.tuples.to_json() if self.tuples else None,
            "engines": [asdict(t) for t in self.tallies],
            "failures": [asdict(f) for f in self.failures],
        }


class Interrupted(KeyboardInterrupt):
    """Interruption of a check; `report` covers the cases that were run."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.verdict)
        self.report = report


@contextmanager
def running(report: Report) -> Iterator[None]:
    """Measure the duration of a check. Raises Interrupted on a KeyboardInterrupt."""
    started = time.monotonic()
    try:
        yield
    except KeyboardInterrupt:
        report.interrupted = True
        raise Interrupted(report) from None
    finally:
        report.seconds = time.monotonic() - started
