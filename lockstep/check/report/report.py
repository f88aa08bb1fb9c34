"""Report of a check: its sections, cases, failures, event counters, and what it left out."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from lockstep.check.matrix.setups import KERNEL, LOGITS, PHASES, SCENARIO, TESTS, Setup
from lockstep.check.report.coverage import Coverage
from lockstep.check.sections import SECTIONS, section_of
from lockstep.check.shard import WHOLE, Shard

if TYPE_CHECKING:
    from lockstep.check.scenarios.met_tuples import MetTuples

SCENARIOS = "scenarios"
MATRIX_CASES = "matrix cases"
LOGITS_CASES = "logits cases"
"""Names of what an interrupted check counts."""


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

    @property
    def place(self) -> str:
        """Return where it was found: an engine and its batch, or a test."""
        if self.setup.phase in (*TESTS, KERNEL):
            return f"{section_of(self.setup)}, {self.batch}"
        return (
            f"drafter {self.setup.drafting}, {self.setup.phase}, graph {self.setup.graph}, "
            f"{self.batch}"
        )


@dataclass(frozen=True)
class Tally:
    """Counts of one engine's cases, of all or of one batch."""

    setup: Setup
    cases: int
    failed: int
    seconds: float
    batch: str = "all"


@dataclass(frozen=True)
class Omission:
    """Part of a section that was not run, and the reason."""

    section: str
    part: str
    reason: str


class SectionState(StrEnum):
    """Result of a section in a word or two."""

    PASSED = "passed"
    PASSED_IN_PART = "passed in part"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class SectionResult:
    """Result of a section.

    passed: number of its cases without a difference. failed: number of its failures, of which a
    case may have several. omissions: its parts that were not run.
    """

    name: str
    cases: int
    passed: int
    failed: int
    seconds: float
    omissions: tuple[Omission, ...] = ()

    @property
    def state(self) -> SectionState:
        """Return the result as one of the states."""
        if self.failed:
            return SectionState.FAILED
        if not self.cases:
            return SectionState.NOT_RUN
        return SectionState.PASSED_IN_PART if self.omissions else SectionState.PASSED

    @property
    def reasons(self) -> str:
        """Return why parts were not run, each reason once."""
        return "; ".join(dict.fromkeys(omission.reason for omission in self.omissions))


@dataclass
class Report:
    """Result of a check.

    numerics: name of the engine's numerics, empty until the plain engine is built. exercised:
    counters of the events that the check varies. seed: seed of the scenarios. shard: part of the
    check. coverage: ops, drafters and parameters that ran. interrupted: the check was stopped
    early. planned: number of scenarios, and of cases, of a complete run, by their names.
    section_seconds: duration of each section. omissions: parts that were not run. refused: reason
    by companion that cannot be built here, or by part of a replay that cannot be run.
    """

    size: str
    numerics: str = ""
    tallies: list[Tally] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    exercised: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    seed: int = 0
    shard: Shard = WHOLE
    coverage: Coverage | None = None
    interrupted: bool = False
    planned: dict[str, int] = field(default_factory=dict)
    section_seconds: dict[str, float] = field(default_factory=dict)
    omissions: list[Omission] = field(default_factory=list)
    tuples: "MetTuples | None" = None
    refused: dict[str, str] = field(default_factory=dict)

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

    def omit(self, section: str, part: str, reason: str) -> None:
        """Record a part of a section that is not run."""
        self.omissions.append(Omission(section, part, reason))

    @property
    def cases(self) -> int:
        """Return the number of compared outputs, of tests and of examined kernels."""
        return sum(t.cases for t in self.tallies)

    @property
    def failed(self) -> int:
        """Return the number of outputs that differ, and of required events that never occurred."""
        return len(self.failures)

    @property
    def sections(self) -> list[SectionResult]:
        """Return the result of each section, those that were not run included."""
        return [self._section(name) for name in SECTIONS]

    def _section(self, name: str) -> SectionResult:
        tallies = [t for t in self.tallies if section_of(t.setup) == name]
        return SectionResult(
            name,
            sum(t.cases for t in tallies),
            sum(t.cases - t.failed for t in tallies),
            sum(section_of(failure.setup) == name for failure in self.failures),
            round(self.section_seconds.get(name, 0.0), 2),
            tuple(omission for omission in self.omissions if omission.section == name),
        )

    def not_exercised(self) -> dict[str, list[str]]:
        """Return the parts, features and backends that were not run, by reason."""
        pairs = [(omission.part, omission.reason) for omission in self.omissions]
        pairs += self.refused.items()
        pairs += self.coverage.missing() if self.coverage else []
        by_reason: dict[str, list[str]] = {}
        for part, reason in dict.fromkeys(pairs):
            by_reason.setdefault(reason, []).append(part)
        return by_reason

    @property
    def verdict(self) -> str:
        """Return the result as one line, which begins with the interruption if there was one."""
        parts = [self._progress] if self.interrupted else []
        return " ".join(part for part in (*parts, self._result, self._incomplete) if part)

    @property
    def _progress(self) -> str:
        """Return how much of an interrupted check was run."""
        done = {
            SCENARIOS: sum(t.setup.phase == SCENARIO for t in self.tallies),
            MATRIX_CASES: self._cases_of(*PHASES),
            LOGITS_CASES: self._cases_of(LOGITS),
        }
        parts = [
            f"{count:,} of {self.planned[name]:,} {name}"
            for name, count in done.items()
            if self.planned.get(name)
        ]
        return f"Stopped early: {' and '.join(parts)} were run." if parts else "Stopped early."

    @property
    def _incomplete(self) -> str:
        """Return the sections that were not run, or in part."""
        results = self.sections if self.section_seconds else []
        by_state = {
            state: ", ".join(r.name for r in results if bool(r.cases) == ran and r.omissions)
            for state, ran in (("Not run", False), ("In part", True))
        }
        return " ".join(f"{state}: {names}." for state, names in by_state.items() if names)

    def _cases_of(self, *phases: str) -> int:
        return sum(t.cases for t in self.tallies if t.setup.phase in phases)

    @property
    def _result(self) -> str:
        """Return what was compared, and with which result."""
        if not (self.cases or self.failed):
            return "Nothing was compared."
        if not self.failed:
            tests = self._cases_of(*TESTS)
            kernels = self._cases_of(KERNEL)
            outputs = self.cases - tests - kernels
            parts = [f"{outputs} cases, all equal to the plain run, bit for bit."] * bool(outputs)
            parts += [f"{tests} tests of distributions and logits passed."] * bool(tests)
            parts += [f"Healthy kernels: {kernels}."] * bool(kernels)
            return " ".join(parts)
        first = self.failures[0]
        at = "" if first.position is None else f", output position {first.position}"
        where = f"; {first.where}" if first.where else ""
        file = f" Reproduce: lockstep check --replay {first.file}" if first.file else ""
        return (
            f"{self.failed} of {self.cases} cases differ. First: {first.place}: "
            f"{first.request}{at}: {first.what}{where}.{file}"
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
            "sections": [asdict(one) | {"state": one.state} for one in self.sections],
            "exercised": self.exercised,
            "not_exercised": [
                {"reason": reason, "parts": parts} for reason, parts in self.not_exercised().items()
            ],
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
