"""Watches an engine's logits: a digest of all bits of every row of them that decided a token."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep.llm import LLM
from lockstep.runner.program import Outcome
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import Schedule
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


@contextmanager
def watch(llm: LLM) -> Iterator[Digests]:
    """Digests of all that is generated meanwhile."""
    runner, found = llm.engine.runner, Digests()
    launch, run_step = runner.launch, runner.run_step
    queue: list[list[Request]] = []

    def watched_launch(schedule: Schedule) -> Any:
        if schedule.decode:
            queue.append([request for _, request in schedule.decode])
            found.rows = max(found.rows, len(schedule.decode))
        if schedule.prompt:
            queue.append([chunk.request for chunk in schedule.prompt])
        return launch(schedule)

    def watched_step(shape: StepShape) -> Outcome:
        step, hidden, logits, verdict = run_step(shape)
        requests = queue.pop(0)
        count = len(requests)
        window = verdict.tokens.shape[1]
        places = step.seq_lens if shape.prompt else step.starts + 1
        digests = digest(logits[: count * window]).view(count, window)
        emitted = verdict.accepted[:count] + 1
        found.steps.append(Seen(requests, places[:count].clone(), digests, emitted))
        return step, hidden, logits, verdict

    runner.launch, runner.run_step = watched_launch, watched_step  # type: ignore[method-assign]
    try:
        yield found
    finally:
        runner.launch = launch  # type: ignore[method-assign]
        runner.run_step = run_step
