"""Watches an engine's logits: a digest of all bits of every row of them that decided a token."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from lockstep.llm import LLM
from lockstep.runner.observer import StepObserver
from lockstep.runner.program import Outcome
from lockstep.scheduling.request import Request
from lockstep.step import StepShape

TILE = 64


@cache
def _factors(vocab: int, device: torch.device) -> Tensor:
    """A fixed odd int64 per token id."""
    generator = torch.Generator().manual_seed(vocab)
    drawn = torch.randint(-(2**62), 2**62, (vocab,), generator=generator)
    return (drawn | 1).to(device)


def digest(logits: Tensor) -> Tensor:
    """logits [N, V] -> [N] int64: the sum of each one's bits, as fp32, times its own odd number.

    Modulo 2**64, so the order of the sum is free; one bit more or less always shows.
    """
    factors = _factors(logits.shape[1], logits.device)
    tiles = (tile.float().view(torch.int32) for tile in logits.split(TILE))
    return torch.cat([(tile.long() * factors).sum(1) for tile in tiles])


@dataclass
class Seen:
    """One step: its requests, the place after the first of each row's new tokens, the digests.

    places [S], digests [S, Q], emitted [S]: how many of the Q stand, all still on the device.
    """

    requests: list[Request]
    places: Tensor
    digests: Tensor
    emitted: Tensor


@dataclass
class Digests:
    """What was seen while an engine was watched. rows: the most rows that one step decoded."""

    steps: list[Seen] = field(default_factory=list)
    rows: int = 0

    def by_request(self) -> dict[str, list[int]]:
        """Request id -> the digests of its answer's tokens, in their order."""
        found: dict[str, dict[int, int]] = {}
        for step in self.steps:
            lines = zip(
                step.requests,
                step.places.tolist(),
                step.digests.tolist(),
                step.emitted.tolist(),
                strict=True,
            )
            for request, place, row, count in lines:
                first = place - len(request.prompt_token_ids)
                for index, value in enumerate(row[:count], first):
                    if index >= 0:
                        found.setdefault(request.id, {})[index] = value
        return {name: [own[i] for i in sorted(own)] for name, own in found.items()}


class _DigestObserver(StepObserver):
    """Adds every step to what was found."""

    def __init__(self) -> None:
        self.found = Digests()

    def after_step(self, requests: Sequence[Request], shape: StepShape, outcome: Outcome) -> None:
        step, _, logits, verdict = outcome
        count = len(requests)
        if not shape.prompt:
            self.found.rows = max(self.found.rows, count)
        window = verdict.tokens.shape[1]
        places = step.seq_lens if shape.prompt else step.starts + 1
        digests = digest(logits[: count * window]).view(count, window)
        emitted = verdict.accepted[:count] + 1
        self.found.steps.append(Seen(list(requests), places[:count].clone(), digests, emitted))


@contextmanager
def watch(llm: LLM) -> Iterator[Digests]:
    """Digests of all that is generated meanwhile."""
    observer = _DigestObserver()
    observers = llm.engine.runner.observers
    observers.append(observer)
    try:
        yield observer.found
    finally:
        observers.remove(observer)
