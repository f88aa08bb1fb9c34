"""Determinism: the same greedy request under conditions that should not change its answer."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.probe.answers import Answer
from lockstep.probe.http import BudgetSpentError
from lockstep.probe.report import Section, Table
from lockstep.probe.session import Session
from lockstep.probe.texts import first_difference, gap_at, mean

CONCURRENT = 32
"""Other requests that run at the same time as the repeated ones."""
MAX_TOKENS = 48
LARGE_GAP = 0.5
"""Difference of two log-probabilities in nats that rounding does not explain: a fault above it."""
QUESTIONS = (
    "List the first 15 primes.",
    "Write a short paragraph about the history of bread.",
    "Write a Python function that reverses a list.",
    "Name five capital cities and their countries, one per line.",
)
NEIGHBOURS = ("Tell a long story about a lighthouse.", "Explain in detail how rain forms.")


@dataclass
class Condition:
    """Answers under one condition compared with the first ones. gaps: nats at differences."""

    name: str
    compared: int = 0
    identical: int = 0
    differences: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    example: str = ""

    def add(self, first: Answer, answer: Answer) -> None:
        """Compare an answer with the first one to the same request."""
        self.compared += 1
        index = first_difference(first.output, answer.output)
        if index is None:
            self.identical += 1
            return
        self.differences.append(index)
        gap = gap_at(first, index)
        if gap is not None:
            self.gaps.append(gap)
        texts = [a.output[max(index - 15, 0) : index + 25] for a in (first, answer)]
        self.example = self.example or f"character {index}: {texts[0]!r}, then {texts[1]!r}"

    def row(self) -> tuple[str, ...]:
        """Return the cells of the table."""
        first = f"{min(self.differences)}" if self.differences else ""
        gaps = f"{min(self.gaps):.3f} to {max(self.gaps):.3f}" if self.gaps else ""
        return self.name, f"{self.identical} of {self.compared}", first, gaps


def run(session: Session, section: Section) -> None:
    """Ask the same questions under each condition, and compare every answer with the first."""
    requests = _requests(session)
    first = session.ask_all(requests, 1)
    if not any(answer.ok for answer in first):
        failure = first[0].failure
        section.unsupported["greedy answers"] = failure.detail if failure else "no answer"
        return
    for question, answer in zip(QUESTIONS, first, strict=False):
        if answer.ok:
            session.greedy_answers[question] = answer.output
    conditions: list[Condition] = []
    steps: tuple[tuple[str, Callable[[Session, list[dict[str, Any]]], list[Answer]]], ...] = (
        ("repeated alone", _alone),
        ("streamed", _streamed),
        ("after a prefix hit", _after_prefix),
        (f"among {CONCURRENT} others", _among_others),
        ("after an abort of its neighbours", _after_aborts),
        ("repeated at the end", _alone),
    )
    try:
        for name, ask in steps:
            condition = Condition(name)
            conditions.append(condition)
            for original, answer in zip(first, ask(session, requests), strict=False):
                if original.ok and answer.ok:
                    condition.add(original, answer)
    finally:
        _report(section, [condition for condition in conditions if condition.compared])


def _requests(session: Session) -> list[dict[str, Any]]:
    """Return the repeated requests. Their prompts share a prefix that no earlier run has cached."""
    extra = {"logprobs": True, "top_logprobs": 2} if session.has_logprobs else {}
    system = (
        f"Session {session.nonce}. You are a helpful assistant. Answer briefly and exactly. "
        + "Keep to the question, use plain words, and do not repeat yourself. " * 6
    )
    return [
        {
            "prompt": [
                {"role": "system", "content": system},
                {"role": "user", "content": question},
            ],
            "max_tokens": MAX_TOKENS,
            **extra,
        }
        for question in QUESTIONS
    ]


def _alone(session: Session, requests: list[dict[str, Any]]) -> list[Answer]:
    return session.ask_all(requests, 1)


def _streamed(session: Session, requests: list[dict[str, Any]]) -> list[Answer]:
    return session.ask_all([request | {"stream": True} for request in requests], 1)


def _after_prefix(session: Session, requests: list[dict[str, Any]]) -> list[Answer]:
    """Send another question with the same prefix before each request."""
    answers = []
    for request in requests:
        system = request["prompt"][0]
        other = [system, {"role": "user", "content": f"Say the word {session.nonce[:4]}."}]
        session.ask(other, max_tokens=4)
        answers += session.ask_all([request], 1)
    return answers


def _among_others(session: Session, requests: list[dict[str, Any]]) -> list[Answer]:
    """Send the requests together with CONCURRENT others of several lengths."""
    fillers = [
        {
            "prompt": f"Number {index}: describe the number {index * 7}. " * (1 + index % 5),
            "max_tokens": 8 + index % 4 * 16,
        }
        for index in range(CONCURRENT)
    ]
    step = len(fillers) // len(requests)
    mixed: list[dict[str, Any]] = []
    indices = []
    for index, request in enumerate(requests):
        mixed += fillers[index * step : (index + 1) * step]
        indices.append(len(mixed))
        mixed.append(request)
    answers = session.ask_all(mixed, len(mixed))
    return [answers[i] for i in indices if i < len(answers)]


def _after_aborts(session: Session, requests: list[dict[str, Any]]) -> list[Answer]:
    """Close the streams of two neighbours while each request runs, and ask again afterwards."""
    answers = []
    for request in requests:
        neighbours = [
            threading.Thread(target=_abort, args=(session, prompt), daemon=True)
            for prompt in NEIGHBOURS
        ]
        for thread in neighbours:
            thread.start()
        answers += session.ask_all([request], 1)
        for thread in neighbours:
            thread.join()
    return answers


def _abort(session: Session, prompt: str) -> None:
    """Read three events of a stream and close it."""
    try:
        session.ask(prompt, stream=True, max_tokens=200, keep=lambda events: events < 3)
    except BudgetSpentError:
        # The main thread meets the same end of the budget.
        return


def _report(section: Section, conditions: list[Condition]) -> None:
    """Add the table, the figures and a finding for each condition with differences."""
    head = ("condition", "identical", "first difference, character", "logit gap there, nats")
    section.tables.append(Table(head, tuple(condition.row() for condition in conditions)))
    compared = sum(condition.compared for condition in conditions)
    identical = sum(condition.identical for condition in conditions)
    section.figures["identical answers"] = f"{identical} of {compared}"
    if compared:
        section.figures["identical, %"] = 100 * identical / compared
    gaps = [gap for condition in conditions for gap in condition.gaps]
    if gaps:
        section.figures["mean logit gap at differences, nats"] = mean(gaps)
    for condition in conditions:
        if not condition.differences:
            continue
        detail = f"{condition.identical} of {condition.compared} identical; {condition.example}"
        largest = max(condition.gaps, default=None)
        if largest is None:
            section.warn(f"answers differ {condition.name}", detail)
        elif largest > LARGE_GAP:
            detail += f"; logit gap {largest:.3f} nats, more than rounding explains"
            section.fault(f"answers differ {condition.name}", detail)
        else:
            detail += f"; logit gap {largest:.3f} nats, as rounding explains"
            section.warn(f"answers differ {condition.name}", detail)
