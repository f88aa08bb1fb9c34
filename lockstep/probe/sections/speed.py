"""Speed: latency and throughput by workload, and their variation."""

import time

from lockstep.probe.answers import Answer
from lockstep.probe.report import Plot, Section, Table
from lockstep.probe.session import Session
from lockstep.probe.texts import mean, variation

WORKLOADS = {
    "primes list": "List the first 60 primes, separated by commas.",
    "essay": "Write an essay about lighthouses.",
    "code": "Write a Python class for a stack with push, pop and peek, and tests for it.",
    "structured list": 'List ten countries as JSON lines: {"name": ..., "capital": ...}',
}
RUNS = 4
CONCURRENCY = 8
MAX_TOKENS = 128
VARIES = 0.25
"""Coefficient of variation of tokens/s above which figures of one run mean little."""


def run(session: Session, section: Section) -> None:
    """Stream each workload alone several times, then all of them at once."""
    rows = []
    series: dict[str, list[tuple[float, float]]] = {}
    try:
        for name, prompt in WORKLOADS.items():
            request = {"prompt": prompt, "stream": True, "max_tokens": MAX_TOKENS}
            # The first run is a warm-up: later ones find its prompt cached, as each other's.
            answers = session.ask_all([request] * (RUNS + 1), 1)[1:]
            streamed = [answer for answer in answers if answer.ok and len(answer.times) > 1]
            if not streamed:
                continue
            rates = [_rate(answer) for answer in streamed]
            first = [1e3 * answer.times[0] for answer in streamed]
            series[name] = [(float(i + 1), rate) for i, rate in enumerate(rates)]
            rows.append((name, first, rates, streamed))
            section.figures[f"{name}, tokens/s"] = mean(rates)
            if variation(rates) > VARIES:
                detail = f"{name}: coefficient of variation {variation(rates):.0%} of tokens/s"
                section.warn("speed varies from run to run", detail)
        # Alone first: a loaded server would slow down the runs of one request.
        _throughput(session, section)
    finally:
        _report(section, rows, series)


def _rate(answer: Answer) -> float:
    """Return tokens/s after the first chunk."""
    seconds = answer.times[-1] - answer.times[0]
    count = (answer.tokens or len(answer.times)) - 1
    return count / max(seconds, 1e-6)


def _throughput(session: Session, section: Section) -> None:
    prompts = list(WORKLOADS.values())
    requests = [
        {"prompt": f"{prompts[i % len(prompts)]} Variant {i}.", "max_tokens": MAX_TOKENS}
        for i in range(CONCURRENCY)
    ]
    started = time.monotonic()
    answers = session.ask_all(requests, CONCURRENCY)
    seconds = time.monotonic() - started
    tokens = sum(answer.tokens or 0 for answer in answers if answer.ok)
    if tokens:
        section.figures[f"{CONCURRENCY} at once, tokens/s"] = tokens / seconds


def _report(
    section: Section,
    rows: list[tuple[str, list[float], list[float], list[Answer]]],
    series: dict[str, list[tuple[float, float]]],
) -> None:
    if not rows:
        return
    head = ("workload", "tokens", "first token, ms", "CV", "tokens/s", "CV", "s per answer")
    cells = tuple(
        (
            name,
            f"{mean([answer.tokens or len(answer.times) for answer in answers]):.0f}",
            f"{mean(first):.0f}",
            f"{variation(first):.0%}",
            f"{mean(rates):.1f}",
            f"{variation(rates):.0%}",
            f"{mean([answer.seconds for answer in answers]):.2f}",
        )
        for name, first, rates, answers in rows
    )
    section.tables.append(Table(head, cells))
    section.plots.append(Plot("Tokens/s by run", "run", "tokens/s", series))
