"""Results of a probe: findings, figures, tables and plots of each section."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

FAULT = "fault"
WARNING = "warning"


@dataclass
class Finding:
    """Finding of a section. count: number of occurrences; detail: the first of them."""

    severity: str
    name: str
    detail: str
    count: int = 1


@dataclass(frozen=True)
class Table:
    """Table of a section. Cells are texts."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Plot:
    """Line plot: one series of (x, y) points by label."""

    title: str
    x_label: str
    y_label: str
    series: dict[str, list[tuple[float, float]]]


@dataclass
class Section:
    """Results of one section.

    figures: values by name. unsupported: feature by the server's own error. stopped: reason for
    which the section ended early, or did not run.
    """

    name: str
    title: str
    figures: dict[str, float | int | str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    unsupported: dict[str, str] = field(default_factory=dict)
    requests: int = 0
    stopped: str | None = None

    def add(self, severity: str, name: str, detail: str) -> None:
        """Add a finding, or count it again."""
        for finding in self.findings:
            if (finding.severity, finding.name) == (severity, name):
                finding.count += 1
                return
        self.findings.append(Finding(severity, name, detail))

    def fault(self, name: str, detail: str) -> None:
        """Add a fault: the server breaks its own API, or an answer is certainly wrong."""
        self.add(FAULT, name, detail)

    def warn(self, name: str, detail: str) -> None:
        """Add a warning: the model may be the cause, or no API promises otherwise."""
        self.add(WARNING, name, detail)

    @property
    def state(self) -> str:
        """Return the result in one word or two."""
        counts = Counter(finding.severity for finding in self.findings)
        for severity in (FAULT, WARNING):
            if counts[severity]:
                return plural(counts[severity], severity)
        if not self.figures:
            return "not run" if self.stopped else "not supported"
        return "partly run" if self.stopped else "no findings"


@dataclass
class ServerReport:
    """Results of one server. answers: greedy answers by prompt, for a comparison of two servers."""

    url: str
    model: str
    sections: list[Section] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    requests: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    def count(self, severity: str) -> int:
        """Return the number of findings of a severity."""
        return sum(f.severity == severity for section in self.sections for f in section.findings)

    @property
    def verdict(self) -> str:
        """Return the result in one line."""
        faults, warnings = self.count(FAULT), self.count(WARNING)
        counts = plural(faults, FAULT) + (f", {plural(warnings, WARNING)}" if warnings else "")
        if not faults and not warnings:
            counts = "no fault"
        names = [
            f"{section.title}: {finding.name}"
            for severity in (FAULT, WARNING)
            for section in self.sections
            for finding in section.findings
            if finding.severity == severity
        ]
        listed = f" ({'; '.join(names[:3])}{'; ...' if len(names) > 3 else ''})" if names else ""
        short = [section.title for section in self.sections if section.stopped]
        lacking = f"; not complete: {', '.join(short)}" if short else ""
        return f"{self.model}: {counts} in {self.requests} requests{listed}{lacking}"

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        sections = [asdict(section) | {"state": section.state} for section in self.sections]
        return {
            "url": self.url,
            "model": self.model,
            "verdict": self.verdict,
            "faults": self.count(FAULT),
            "warnings": self.count(WARNING),
            "requests": self.requests,
            "seconds": round(self.seconds, 1),
            "interrupted": self.interrupted,
            "sections": sections,
        }


@dataclass(frozen=True)
class Comparison:
    """Comparison of two servers. rows: (section, figure, first value, second value).

    identical, compared: number of equal greedy answers, and of prompts that both answered.
    """

    rows: tuple[tuple[str, str, str, str], ...]
    identical: int
    compared: int


def compare(first: ServerReport, second: ServerReport) -> Comparison:
    """Compare the results and figures of two servers."""
    rows = []
    for ours in first.sections:
        theirs = next(section for section in second.sections if section.name == ours.name)
        rows.append((ours.title, "result", ours.state, theirs.state))
        for name in dict.fromkeys((*ours.figures, *theirs.figures)):
            values = [text_of(section.figures.get(name, "–")) for section in (ours, theirs)]
            rows.append((ours.title, name, values[0], values[1]))
    shared = [prompt for prompt in first.answers if prompt in second.answers]
    identical = sum(first.answers[prompt] == second.answers[prompt] for prompt in shared)
    return Comparison(tuple(rows), identical, len(shared))


def text_of(value: float | int | str) -> str:
    """Return a figure as text."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value


def plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
