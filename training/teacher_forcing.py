"""Teacher-forced evaluation: a greedy answer equals the reference iff every argmax does."""

from collections.abc import Iterator

import torch
from torch import Tensor

from training.batches import Encoder
from training.corpus import tasks
from training.evaluation_sets import blind_requests, development_requests
from training.models.base import LanguageModel
from training.models.functional import CHUNK

ROWS = 16
"""Samples of one batch."""
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
"""Name -> (task, number of samples, options of the task)."""
CALL = "<tool_call>"
"""Beginning of every call."""
WRITTEN = {
    "written": (development_requests.REQUESTS, True),
    "written_silent": (development_requests.REQUESTS, False),
    "unseen": (blind_requests.REQUESTS, True),
    "unseen_silent": (blind_requests.REQUESTS, False),
}
"""Name -> (handwritten requests, whether those that need a call or those that need none)."""


def cases(encoder: Encoder, name: str) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, answer) token ids of one evaluation set."""
    if name in WRITTEN:
        requests, wanted = WRITTEN[name]
        return [
            (encoder.ids(sample.prompt), encoder.ids(sample.answer if calls else CALL))
            for sample, calls in tasks.written(requests)
            if bool(calls) == wanted
        ]
    task, count, options = SETS[name]
    token_ids = []
    for seed in range(count):
        sample = tasks.draw(10**9 + seed, evaluation=True, task=task, **options)
        token_ids.append((encoder.ids(sample.prompt), encoder.ids(sample.answer)))
    return token_ids


def accepted_length(right: Tensor) -> tuple[int, int]:
    """Return (tokens, steps) of drafting.

    right [K, N]: whether draft k from base position n is correct.
    """
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
    model: LanguageModel, encoder: Encoder, device: str, names: list[str], drafts: int = 3
) -> dict[str, dict[str, float]]:
    """Return the exact share, and the tokens per step with `drafts` drafts, of each set.

    For requests that need no call it is the share of answers that do not begin with one.
    """
    report = {}
    on = model.fused.on
    model.fused.on = False
    for name in names:
        exact = 0
        tokens = 0
        steps = 0
        silent = name in WRITTEN and not WRITTEN[name][1]
        sorted_cases = sorted(cases(encoder, name), key=lambda case: len(case[0]) + len(case[1]))
        for at in range(0, len(sorted_cases), ROWS):
            batch = sorted_cases[at : at + ROWS]
            for right, drafts_right in _judge(model, device, batch, drafts):
                exact += bool(right.all()) != silent
                accepted = accepted_length(drafts_right)
                tokens += accepted[0]
                steps += accepted[1]
        report[name] = {
            "exact": round(exact / len(sorted_cases), 4),
            "acceptance_length": round(tokens / max(steps, 1), 3),
        }
    model.fused.on = on
    model.positions.clear()
    return report


def _judge(
    model: LanguageModel, device: str, batch: list[tuple[list[int], list[int]]], drafts: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield which answer tokens the model predicts [N], and which drafts are correct [K, N - 1]."""
    width = -(-max(len(p) + len(a) for p, a in batch) // CHUNK) * CHUNK
    rows = torch.tensor([p + a + [0] * (width - len(p) - len(a)) for p, a in batch], device=device)
    hidden, read, _ = model.hidden(rows)
    draft_states = [h.view(*rows.shape, -1) for h in model.drafts(rows, read, drafts)[0]]
    hidden = hidden.view(*rows.shape, -1)
    for i, (prompt, answer) in enumerate(batch):
        begin = len(prompt) - 1
        n = len(answer)
        best = model.head(hidden[i, begin : begin + n]).argmax(-1)
        guess = torch.zeros(len(draft_states), n - 1, dtype=rows.dtype, device=device)
        for k, h in enumerate(draft_states):
            guess[k] = model.head(h[i, begin : begin + n - 1]).argmax(-1)
        ids = rows[i]
        right = best == ids[begin + 1 : begin + 1 + n]
        yield right.cpu(), (guess == ids[begin + 2 : begin + 1 + n]).cpu()
