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
"""Logit rows per block of a digest."""


@cache
def _factors(vocab: int, device: torch.device) -> Tensor:
    """Return a fixed odd int64 factor per token id."""
    generator = torch.Generator().manual_seed(vocab)
    random_ints = torch.randint(-(2**62), 2**62, (vocab,), generator=generator)
    return (random_ints | 1).to(device)


def digest(logits: Tensor) -> Tensor:
    """Return a digest [N] (int64) of logits [N, V]: the sum of fp32 bits times odd factors.

    The sum is modulo 2**64, so its order is free. A change of a single bit always changes it.
    """
    # Odd factors: the difference of one bit, 2**i, times an odd number is never 0 modulo 2**64.
    factors = _factors(logits.shape[1], logits.device)
    tiles = (tile.float().view(torch.int32) for tile in logits.split(TILE))
    return torch.cat([(tile.long() * factors).sum(1) for tile in tiles])


@dataclass
class DigestedStep:
    """Digests of one step, on the device.

    positions [S]: position after each row's first new token. digests [S, Q]. emitted [S]: number of
    valid digests of each row.
    """

    requests: list[RowSpec]
    positions: Tensor
    digests: Tensor
    emitted: Tensor


class LogitDigests(StepObserver):
    """Observer that digests the logits of every token. max_rows: maximum rows of a decode step."""

    def __init__(self) -> None:
        self.steps: list[DigestedStep] = []
        self.max_rows = 0

    def after_step(self, rows: Sequence[RowSpec], shape: StepShape, outcome: Outcome) -> None:
        """Digest the step's logits without synchronizing with the device."""
        step, _, logits, verdict = outcome
        count = len(rows)
        if not shape.prompt:
            self.max_rows = max(self.max_rows, count)
        window = verdict.tokens.shape[1]
        positions = step.seq_lens if shape.prompt else step.starts + 1
        digests = digest(logits[: count * window]).view(count, window)
        emitted = verdict.accepted[:count] + 1
        # The positions are a static buffer that the next step overwrites.
        self.steps.append(DigestedStep(list(rows), positions[:count].clone(), digests, emitted))

    def by_request(self) -> dict[str, list[int]]:
        """Return the digests of output tokens in order, by request id."""
        digests_by_id: dict[str, dict[int, int]] = {}
        for step in self.steps:
            rows = zip(
                step.requests,
                step.positions.tolist(),
                step.digests.tolist(),
                step.emitted.tolist(),
                strict=True,
            )
            for request, position, digests, count in rows:
                first = position - len(request.prompt_token_ids)
                for index, value in enumerate(digests[:count], first):
                    # A row that resumes after a preemption repeats positions: the last run counts.
                    # A negative index belongs to a chunk that ends within the prompt.
                    if index >= 0:
                        digests_by_id.setdefault(request.id, {})[index] = value
        return {
            name: [by_index[i] for i in sorted(by_index)]
            for name, by_index in digests_by_id.items()
        }


class RawLogits(StepObserver):
    """Observer that stores the first row's logits [1, V] of every step, for a request alone."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def after_step(self, rows: Sequence[RowSpec], shape: StepShape, outcome: Outcome) -> None:
        """Copy the first row."""
        # The logits are a static buffer that the next step overwrites.
        self.rows.append(outcome[2][:1].clone())

    def first_rows(self, count: int) -> Tensor:
        """Return the first `count` rows [count, V] in fp32 on the CPU."""
        return torch.cat(self.rows)[:count].float().cpu()
