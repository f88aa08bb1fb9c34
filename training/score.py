"""Teacher-forced evaluation: a greedy answer equals the reference iff every argmax does."""

import torch
from torch import Tensor

from training import tasks
from training.data import Encoder
from training.model import Model

SETS: dict[str, tuple[str, int, dict[str, int]]] = {
    "tools": ("tools", 256, {}),
    "needle_1k": ("needle", 48, {"characters": 3400}),
    "needle_4k": ("needle", 48, {"characters": 13600}),
    "needle_8k": ("needle", 48, {"characters": 26000}),
    "dialogue": ("dialogue", 96, {}),
    "json": ("json", 96, {}),
    "sequence": ("sequence", 48, {}),
    "list": ("list", 48, {}),
}


def cases(encoder: Encoder, name: str) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) token ids of one evaluation set."""
    task, count, options = SETS[name]
    found = []
    for seed in range(count):
        sample = tasks.draw(10**9 + seed, evaluation=True, task=task, **options)
        found.append((encoder.ids(sample.prompt), encoder.ids(sample.answer)))
    return found


def accepted_length(right: Tensor) -> tuple[int, int]:
    """right [K, N]: whether draft k from base position n is right -> (tokens, steps)."""
    count, length = right.shape
    position = steps = 0
    while position < length:
        taken = 0
        while taken < count and position + taken < length and bool(right[taken, position + taken]):
            taken += 1
        position += 1 + taken
        steps += 1
    return length, steps


@torch.no_grad()
def evaluate(model: Model, encoder: Encoder, device: str, names: list[str], drafts: int = 3) -> dict:
    """Per set: exact share, and tokens per step with `drafts` drafts."""
    report = {}
    for name in names:
        exact = tokens = steps = 0
        todo = cases(encoder, name)
        for prompt, answer in todo:
            ids = torch.tensor([prompt + answer], device=device)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                hidden = model.model(ids)
                begin, n = len(prompt) - 1, len(answer)
                best = model.head(hidden[:, begin : begin + n]).argmax(-1)[0]
                ahead = model.drafts(ids, hidden, drafts)
                guess = torch.stack(
                    [model.head(h[:, begin : begin + n - 1]).argmax(-1)[0] for h in ahead]
                )
            exact += bool(torch.equal(best, ids[0, begin + 1 : begin + 1 + n]))
            right = guess == ids[0, begin + 2 : begin + 1 + n]
            got = accepted_length(right.cpu())
            tokens, steps = tokens + got[0], steps + got[1]
        report[name] = {
            "exact": round(exact / len(todo), 4),
            "acceptance_length": round(tokens / max(steps, 1), 3),
        }
    return report
