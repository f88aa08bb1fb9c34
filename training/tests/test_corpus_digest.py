"""Digests of the corpus: the samples of fixed seeds keep their bytes.

The bundled model is reproducible only while its corpus is. Paragraphs, sources and vocabulary come
from the standard library of the running Python, so a fixed text replaces them.
"""

import hashlib
import json
from collections.abc import Iterator

import pytest

from training.corpus import tasks, words
from training.evaluation_sets import blind_requests, development_requests

SEEDS = range(300)
SOURCE = "".join(f"def step_{i}(value):\n    return value * {i} + {i * i}\n\n\n" for i in range(60))
PARAGRAPH = ["A garden needs water.", "The market opens at noon.", "Rivers carry sand downstream."]
CORPUS = "5ee781af444f809c"
EVALUATION = "a0316dd76b3680fd"


@pytest.fixture(autouse=True)
def _fixed_text(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace everything that is read from the standard library."""
    monkeypatch.setattr(tasks, "FILLER", [PARAGRAPH])
    monkeypatch.setattr(tasks, "SOURCES", {False: (SOURCE,), True: (SOURCE[::-1],)})
    monkeypatch.setattr(tasks, "DEFINITIONS", [("function", "step", SOURCE[:60])])
    monkeypatch.setattr(words, "VOCABULARY", ["garden", "water", "market", "noon", "river", "sand"])
    words._followers.cache_clear()
    yield
    words._followers.cache_clear()


def digest(samples: list[tasks.Sample]) -> str:
    """Return a hash of all text, messages and tools of the samples."""
    fields = [[s.task, s.pieces, s.messages, s.tools] for s in samples]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:16]


def test_the_corpus_keeps_its_bytes() -> None:
    """Hash mixed samples, as a training run draws them, and samples of every task."""
    samples = [tasks.draw(seed) for seed in SEEDS]
    for task in tasks.TASKS:
        samples += [tasks.draw(seed, task=task) for seed in SEEDS[:40]]
    assert digest(samples) == CORPUS


def test_the_evaluation_sets_keep_their_bytes() -> None:
    """Hash evaluation samples of every task, and the handwritten requests."""
    samples = [tasks.draw(s, evaluation=True, task=t) for t in tasks.TASKS for s in SEEDS[:40]]
    for requests in (development_requests.REQUESTS, blind_requests.REQUESTS):
        samples += [sample for sample, _ in tasks.written(requests)]
    assert digest(samples) == EVALUATION
