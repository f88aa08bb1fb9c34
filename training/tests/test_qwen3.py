"""Tests of the EAGLE-3 head: what a step sees, and that the target gets no gradient from it."""

import torch

from training.models.functional import CHUNK
from training.models.qwen3 import CONFIG, EAGLE3, Qwen3, chain_mask


def test_a_step_sees_true_states_and_its_own_chain() -> None:
    """At t, step s: the truth up to t - s, then step i's state at t - s + i."""
    length = 6
    for step in (1, 2):
        mask = chain_mask(length, step, torch.device("cpu"))
        for t in range(length):
            wanted = [(0, position) for position in range(t - step + 1)]
            wanted += [(i, t - step + i) for i in range(1, step + 1) if t - step + i >= 0]
            seen = [divmod(key, length) for key in mask[t].nonzero()[:, 0].tolist()]
            assert seen == wanted


def test_target_gets_no_gradient_from_its_head() -> None:
    torch.manual_seed(0)
    model = Qwen3(CONFIG, head=EAGLE3)
    ids = torch.randint(CONFIG["vocab_size"], (1, CHUNK))
    _, read, _ = model.hidden(ids)
    drafts, _ = model.drafts(ids, read, 2)
    sum((h @ model.draft_head.T).square().mean() for h in drafts).backward()
    for name, p in model.named_parameters():
        has_gradient = p.grad is not None and bool(p.grad.any())
        assert has_gradient == name.startswith("eagle3."), name
