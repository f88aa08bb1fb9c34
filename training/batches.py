"""Batches: worker processes draw samples and pack them into rows of one length."""

import random
import time
from collections import deque
from collections.abc import Iterator
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from training.corpus import stdlib_text, tasks

CONTEXT_WEIGHT = 0.1
"""Maximum loss weight of a context token, against 1.0 for a learned one. It teaches words."""
CONTEXT_SHARE = 0.3
"""Maximum total weight of a sample's context tokens, as a share of its learned tokens' weight."""

CHARACTERS = 2.45
"""Characters per token of filler, in which a space is a token."""

FIRST = 10
"""First tokens of an answer with tools, which select the tool and have a higher weight."""
FIRST_WEIGHT = 2.5
"""Loss weight of these tokens."""


class Encoder:
    """Encoder of samples to token ids and loss weights."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.end = self.tokenizer.token_to_id("<|endoftext|>")

    def ids(self, text: str) -> list[int]:
        """Return the token ids of one piece."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def sample(self, sample: tasks.Sample) -> tuple[list[int], list[float]]:
        """Return token ids, and the weight of predicting each of them."""
        parts = [(self.ids(text), learned) for text, learned in sample.pieces]
        num_context = sum(len(new) for new, learned in parts if not learned)
        num_learned = sum(len(new) for new, learned in parts if learned)
        context_weight = min(CONTEXT_WEIGHT, CONTEXT_SHARE * num_learned / num_context)
        first_weight = FIRST_WEIGHT if sample.tools else 1.0
        weights: list[float] = []
        for new, learned in parts:
            num_first = len(new[:FIRST])
            rest = len(new) - num_first
            weights += (
                [first_weight] * num_first + [1.0] * rest
                if learned
                else [context_weight] * len(new)
            )
        return [i for new, _ in parts for i in new], weights


def rows(
    folder: Path, seed: int, length: int, shares: dict[str, float] = tasks.SHARES
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield rows of `length` tokens without end: whole samples in sequence, mixed with sources.

    A row begins with a sample. A sample that does not fit moves to the next row, and the rest is
    padding.
    """
    encoder = Encoder(folder)
    rng = random.Random(seed)
    stdlib_text.load_filler()
    count = seed * 1_000_003
    pending: tuple[list[int], list[float]] | None = None
    while True:
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            if pending is None:
                count += 1
                pending = _draw(encoder, rng, count, length, shares)
            if len(pending[0]) > length:
                pending = None
                continue
            if len(ids) + len(pending[0]) > length:
                break
            ids += pending[0]
            weights += pending[1]
            pending = None
        num_padding = length - len(ids)
        yield (
            np.array(ids + [encoder.end] * num_padding, np.int16),
            np.array(weights + [0.0] * num_padding, np.float16),
        )


def _draw(
    encoder: Encoder, rng: random.Random, seed: int, length: int, shares: dict[str, float]
) -> tuple[list[int], list[float]]:
    """Return a random sample: a source document, a needle for long rows, or any task."""
    chance = rng.random()
    if chance < 0.08:
        ids = encoder.ids(stdlib_text.document(rng, rng.choice((1500, 4000)), False))[: length - 1]
        return [*ids, encoder.end], [0.5] * (len(ids) + 1)
    if length > 1024 and chance < 0.4:
        size = int(length * CHARACTERS * rng.uniform(0.3, 0.95))
        return encoder.sample(tasks.draw(seed, task="needle", characters=size))
    return encoder.sample(tasks.draw(seed, shares=shares))


def _work(
    folder: Path, seed: int, length: int, shares: dict[str, float], per_batch: int, queue: Any
) -> None:
    """Put batch parts of one length into the queue without end."""
    source = rows(folder, seed, length, shares)
    while True:
        pairs = [next(source) for _ in range(per_batch)]
        queue.put((np.stack([p[0] for p in pairs]), np.stack([p[1] for p in pairs])))


class Feed:
    """Source of batches with worker processes per row length and a buffer of `keep` parts per
    length.

    Parts come from the workers in round-robin order. patient: every batch waits for new parts, so
    that batches depend on the seed alone.
    """

    def __init__(
        self,
        folder: Path,
        workers: dict[int, int],
        part_tokens: int,
        seed: int,
        shares: dict[str, float] = tasks.SHARES,
        keep: int = 1500,
        patient: bool = False,
    ) -> None:
        context = get_context("fork")
        self.pools: dict[int, list[Any]] = {n: [] for n in workers}
        self.fresh: dict[int, deque[Any]] = {n: deque() for n in workers}
        self.num_made = dict.fromkeys(workers, 0)
        self.rng = random.Random(seed)
        self.keep = keep
        self.patient = patient
        for length, count in workers.items():
            queues = [context.Queue(maxsize=2) for _ in range(count)]
            for i, queue in enumerate(queues):
                worker_seed = seed + 7919 * length + i
                arguments = (folder, worker_seed, length, shares, part_tokens // length, queue)
                context.Process(target=_work, args=arguments, daemon=True).start()
            Thread(target=self._collect, args=(length, queues), daemon=True).start()

    def _collect(self, length: int, queues: list[Any]) -> None:
        """Move parts from the workers' queues into the buffer."""
        waiting = self.fresh[length]
        for queue in cycle(queues):
            waiting.append(queue.get())
            self.num_made[length] += 1
            while len(waiting) >= self.keep:
                time.sleep(0.05)

    def batch(self, length: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and weights of `parts` parts: new ones if available, else earlier ones."""
        waiting = self.fresh[length]
        pool = self.pools[length]
        chosen = []
        for _ in range(parts):
            while not waiting and (self.patient or len(pool) < 2 * parts):
                time.sleep(0.01)
            if waiting:
                chosen.append(waiting.popleft())
                pool.append(chosen[-1])
                if len(pool) > self.keep:
                    pool[self.rng.randrange(len(pool))] = pool[-1]
                    pool.pop()
            else:
                chosen.append(self.rng.choice(pool))
        return np.concatenate([c[0] for c in chosen]), np.concatenate([c[1] for c in chosen])
