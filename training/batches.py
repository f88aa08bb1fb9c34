"""Batches: worker processes draw samples and cut them into rows of one length."""

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

GIVEN = 0.1
"""Most weight of a token that is given, against 1.0 for one that is learned: it teaches words."""
GIVEN_SHARE = 0.3
"""Most weight of all given tokens of a sample, against that of its learned ones."""

CHARACTERS = 2.45
"""Characters a token of filler, of a space and a word's token each."""

FIRST = 10
"""Tokens with which an answer beside tools begins, where it chooses: they weigh more."""
FIRST_WEIGHT = 2.5


class Encoder:
    """Samples to token ids and weights."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.end = self.tokenizer.token_to_id("<|endoftext|>")

    def ids(self, piece: str) -> list[int]:
        """Token ids of one piece."""
        return self.tokenizer.encode(piece, add_special_tokens=False).ids

    def sample(self, sample: tasks.Sample) -> tuple[list[int], list[float]]:
        """ids and weights; a weight belongs to the token that is predicted."""
        parts = [(self.ids(piece), learned) for piece, learned in sample.pieces]
        given = sum(len(new) for new, learned in parts if not learned)
        taught = sum(len(new) for new, learned in parts if learned)
        low = min(GIVEN, GIVEN_SHARE * taught / given)
        first = FIRST_WEIGHT if sample.tools else 1.0
        weights: list[float] = []
        for new, learned in parts:
            begun = len(new[:FIRST])
            rest = len(new) - begun
            weights += [first] * begun + [1.0] * rest if learned else [low] * len(new)
        return [i for new, _ in parts for i in new], weights


def rows(
    folder: Path, seed: int, length: int, shares: dict[str, float] = tasks.SHARES
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless rows of `length` tokens: whole samples one after another, sources in between.

    A row never starts inside a sample; what does not fit is left out, the rest is padding.
    """
    encoder = Encoder(folder)
    rng = random.Random(seed)
    stdlib_text.load_filler()
    count = seed * 1_000_003
    held: tuple[list[int], list[float]] | None = None
    while True:
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            if held is None:
                count += 1
                held = _draw(encoder, rng, count, length, shares)
            if len(held[0]) > length:
                held = None
                continue
            if len(ids) + len(held[0]) > length:
                break
            ids += held[0]
            weights += held[1]
            held = None
        short = length - len(ids)
        yield (
            np.array(ids + [encoder.end] * short, np.int16),
            np.array(weights + [0.0] * short, np.float16),
        )


def _draw(
    encoder: Encoder, rng: random.Random, seed: int, length: int, shares: dict[str, float]
) -> tuple[list[int], list[float]]:
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
    source = rows(folder, seed, length, shares)
    while True:
        pairs = [next(source) for _ in range(per_batch)]
        queue.put((np.stack([p[0] for p in pairs]), np.stack([p[1] for p in pairs])))


class Feed:
    """Worker processes per row length; what they make waits in memory, `keep` parts a length.

    Parts are taken from the workers in turn. patient: a batch waits for parts that are new, so that
    what it holds depends on the seed alone.
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
        self.made = dict.fromkeys(workers, 0)
        self.rng = random.Random(seed)
        self.keep = keep
        self.patient = patient
        for length, count in workers.items():
            queues = [context.Queue(maxsize=2) for _ in range(count)]
            for i, queue in enumerate(queues):
                own = seed + 7919 * length + i
                arguments = (folder, own, length, shares, part_tokens // length, queue)
                context.Process(target=_work, args=arguments, daemon=True).start()
            Thread(target=self._collect, args=(length, queues), daemon=True).start()

    def _collect(self, length: int, queues: list[Any]) -> None:
        waiting = self.fresh[length]
        for queue in cycle(queues):
            waiting.append(queue.get())
            self.made[length] += 1
            while len(waiting) >= self.keep:
                time.sleep(0.05)

    def batch(self, length: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
        """`parts` parts of this length: fresh ones where they wait, else ones seen before; fresh
        ones alone where it is patient."""
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
