"""Batches: worker processes draw samples and cut them into rows of one length."""

import random
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from training import tasks, text

GIVEN = 0.1
"""Weight of a token that is given, against 1.0 for one that is learned: it teaches words."""


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
        ids: list[int] = []
        weights: list[float] = []
        for piece, learned in sample.pieces:
            new = self.ids(piece)
            ids += new
            weights += [1.0 if learned else GIVEN] * len(new)
        return ids, weights


def rows(folder: Path, seed: int, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless rows of `length` tokens: whole samples one after another, sources in between.

    A row never starts inside a sample; what does not fit is left out, the rest is padding.
    """
    encoder, rng = Encoder(folder), random.Random(seed)
    text.load_filler()
    count = seed * 1_000_003
    held: tuple[list[int], list[float]] | None = None
    while True:
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            if held is None:
                count += 1
                held = _draw(encoder, rng, count, length)
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
    encoder: Encoder, rng: random.Random, seed: int, length: int
) -> tuple[list[int], list[float]]:
    chance = rng.random()
    if chance < 0.12:
        ids = encoder.ids(text.document(rng, rng.choice((1500, 4000)), False))[: length - 1]
        return [*ids, encoder.end], [0.6] * (len(ids) + 1)
    if length > 512 and chance < 0.55:
        most = length * 3.6
        size = int(most * rng.uniform(0.3, 0.93))
        return encoder.sample(tasks.draw(seed, task="needle", characters=size))
    return encoder.sample(tasks.draw(seed))


def _work(folder: Path, seed: int, length: int, per_batch: int, queue: Any) -> None:
    source = rows(folder, seed, length)
    while True:
        pairs = [next(source) for _ in range(per_batch)]
        queue.put((np.stack([p[0] for p in pairs]), np.stack([p[1] for p in pairs])))


class Feed:
    """Worker processes per row length, each with a queue of batch parts."""

    def __init__(self, folder: Path, workers: dict[int, int], part_tokens: int, seed: int) -> None:
        context = get_context("fork")
        self.queues = {n: context.Queue(maxsize=64) for n in workers}
        self.pools: dict[int, list[Any]] = {n: [] for n in workers}
        self.rng = random.Random(seed)
        for length, count in workers.items():
            for i in range(count):
                arguments = (folder, seed + 7919 * length + i, length, part_tokens // length)
                process = context.Process(
                    target=_work, args=(*arguments, self.queues[length]), daemon=True
                )
                process.start()

    def batch(self, length: int, parts: int, keep: int) -> tuple[np.ndarray, np.ndarray]:
        """`parts` parts of this length: fresh ones where they wait, else ones seen before."""
        queue, pool = self.queues[length], self.pools[length]
        chosen = []
        for _ in range(parts):
            if not queue.empty() or len(pool) < 2 * parts:
                pool.append(queue.get())
                if len(pool) > keep:
                    pool.pop(self.rng.randrange(len(pool) - 1))
                chosen.append(pool[-1])
            else:
                chosen.append(self.rng.choice(pool))
        return np.concatenate([c[0] for c in chosen]), np.concatenate([c[1] for c in chosen])
