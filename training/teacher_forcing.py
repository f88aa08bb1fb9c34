"""Teacher-forced evaluation: a greedy answer equals the reference iff every argmax does."""

from collections.abc import Iterator

import torch
from torch import Tensor

from training.batches import Encoder
from training.corpus import tasks
from training.evaluation_sets import blind_requests, development_requests
from training.models.base import Language
from training.models.functional import CHUNK

ROWS = 16
SETS: dict[str, tuple[str, int, dict[str, int]]] = {
    "tools": ("tools", 256, {}),
    "needle_1k": ("needle", 48, {"characters": 2300}),
    "needle_4k": ("needle", 48, {"characters": 9200}),
    "needle_8k": ("needle", 48, {"characters": 17700}),
    "dialogue": ("dialogue", 96, {}),
    "json": ("json", 96, {}),
    "sequence": ("sequence", 48, {}),
    "list": ("list", 48, {}),
    "daily": ("daily", 96, {}),
    "code": ("code", 48, {}),
}
CALL = "<tool_call>"
WRITTEN = {
    "written": (development_requests.REQUESTS, True),
    "written_silent": (development_requests.REQUESTS, False),
    "unseen": (blind_requests.REQUESTS, True),
    "unseen_silent": (blind_requests.REQUESTS, False),
}
"""The requests written by hand: those that need a call, and those that need none."""


def cases(encoder: Encoder, name: str) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) token ids of one evaluation set."""
    if name in WRITTEN:
        requests, wanted = WRITTEN[name]
        return [
            (encoder.ids(sample.prompt), encoder.ids(sample.answer if calls else CALL))
            for sample, calls in tasks.written(requests)
            if bool(calls) == wanted
        ]
    task, count, options = SETS[name]
    found = []
    for seed in range(count):
        sample = tasks.draw(10**9 + seed, evaluation=True, task=task, **options)
        found.append((encoder.ids(sample.prompt), encoder.ids(sample.answer)))
    return found


def accepted_length(right: Tensor) -> tuple[int, int]:
    """right [K, N]: whether draft k from base position n is right -> (tokens, steps)."""
    count, length = right.shape
    position = 0
    steps = 0
    while position < length:
        taken = 0
        while taken < count and position + taken < length and bool(right[taken, position + taken]):
            taken += 1
        position += 1 + taken
        steps += 1
    return length, steps


@torch.no_grad()
def evaluate(
    model: Language, encoder: Encoder, device: str, names: list[str], drafts: int = 3
) -> dict[str, dict[str, float]]:
    """Per set: exact share, and tokens per step with `drafts` drafts.

    Of requests that need no call, the share where the answer does not begin with one.
    """
    report = {}
    on = model.fused.on
    model.fused.on = False
    for name in names:
        exact = 0
        tokens = 0
        steps = 0
        silent = name in WRITTEN and not WRITTEN[name][1]
        todo = sorted(cases(encoder, name), key=lambda case: len(case[0]) + len(case[1]))
        for at in range(0, len(todo), ROWS):
            some = todo[at : at + ROWS]
            for right, ahead in _judge(model, device, some, drafts):
                exact += bool(right.all()) != silent
                got = accepted_length(ahead)
                tokens += got[0]
                steps += got[1]
        report[name] = {
            "exact": round(exact / len(todo), 4),
            "acceptance_length": round(tokens / max(steps, 1), 3),
        }
    model.fused.on = on
    model.places.clear()
    return report


def _judge(
    model: Language, device: str, some: list[tuple[list[int], list[int]]], drafts: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Per case: which answer tokens the model gives [N], and which drafts are right [K, N - 1]."""
    width = -(-max(len(p) + len(a) for p, a in some) // CHUNK) * CHUNK
    rows = torch.tensor([p + a + [0] * (width - len(p) - len(a)) for p, a in some], device=device)
    hidden, read, _ = model.hidden(rows)
    ahead = [h.view(*rows.shape, -1) for h in model.drafts(rows, read, drafts)[0]]
    hidden = hidden.view(*rows.shape, -1)
    for i, (prompt, answer) in enumerate(some):
        begin = len(prompt) - 1
        n = len(answer)
        best = model.head(hidden[i, begin : begin + n]).argmax(-1)
        guess = torch.zeros(len(ahead), n - 1, dtype=rows.dtype, device=device)
        for k, h in enumerate(ahead):
            guess[k] = model.head(h[i, begin : begin + n - 1]).argmax(-1)
        ids = rows[i]
        right = best == ids[begin + 1 : begin + 1 + n]
        yield right.cpu(), (guess == ids[begin + 2 : begin + 1 + n]).cpu()
