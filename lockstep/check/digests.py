"""Observers of an engine's logits: digests of all bits of every row, and rows themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lockstep.scheduling.schedule import RowSpec
from lockstep.step import StepShape
from lockstep.worker.program import Outcome
from lockstep.worker.step_observer import StepObserver

TILE = 64
"""Rows of logits that are digested at once."""


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
class DigestedStep:
    """One step: its requests, the place after the first of each row's new tokens, the digests.

    places [S], digests [S, Q], emitted [S]: how many of the Q stand, all still on the device.
    """

    requests: list[RowSpec]
    places: Tensor
    digests: Tensor
    emitted: Tensor


class LogitDigests(StepObserver):
    """Digests every row of logits that decides a token. rows: the most rows that a step decoded."""

    def __init__(self) -> None:
        self.steps: list[DigestedStep] = []
        self.rows = 0

    def after_step(self, rows: Sequence[RowSpec], shape: StepShape, outcome: Outcome) -> None:
        """Digests the step's logits, without waiting for the device."""
        step, _, logits, verdict = outcome
        count = len(rows)
        if not shape.prompt:
            self.rows = max(self.rows, count)
        window = verdict.tokens.shape[1]
        places = step.seq_lens if shape.prompt else step.starts + 1
        digests = digest(logits[: count * window]).view(count, window)
        emitted = verdict.accepted[:count] + 1
        self.steps.append(DigestedStep(list(rows), places[:count].clone(), digests, emitted))

    def by_request(self) -> dict[str, list[int]]:
        """Request id -> the digests of its answer's tokens, in their order."""
        found: dict[str, dict[int, int]] = {}
        for step in self.steps:
            rows = zip(
                step.requests,
                step.places.tolist(),
                step.digests.tolist(),
                step.emitted.tolist(),
                strict=True,
            )
            for request, place, digests, count in rows:
                first = place - len(request.prompt_token_ids)
                for index, value in enumerate(digests[:count], first):
                    if index >= 0:
                        found.setdefault(request.id, {})[index] = value
        return {name: [own[i] for i in sorted(own)] for name, own in found.items()}


class RawLogits(StepObserver):
    """Keeps the first row's logits [1, V] of every step: all of them where a request runs alone."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def after_step(self, rows: Sequence[RowSpec], shape: StepShape, outcome: Outcome) -> None:
        """Copies the first row."""
        self.rows.append(outcome[2][:1].clone())

    def behind(self, count: int) -> Tensor:
        """The first `count` rows [count, V] in fp32, on the CPU."""
        return torch.cat(self.rows)[:count].float().cpu()
