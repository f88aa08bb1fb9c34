"""Tests of the sigmoid mixture: choice of experts as in the engine, balance, files."""

from typing import Any

import pytest
import torch

from lockstep.kernels.route import route
from training.models.deepseek_v3 import CONFIG
from training.models.feed_forward import SeparateExperts, SigmoidMixture, mask_groups, top_k_mask

SMALL: dict[str, Any] = {
    **CONFIG,
    "hidden_size": 16,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 4,
}
TOKENS = 64


def _mixture(**changes: Any) -> SigmoidMixture:
    torch.manual_seed(0)
    mixture = SigmoidMixture({**SMALL, **changes}, 8, gated=True)
    for p in mixture.parameters():
        torch.nn.init.normal_(p)
    return mixture


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (2, 1)])
def test_the_choice_is_the_engines(groups: int, top_groups: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(TOKENS, 8)
    bias = torch.randn(8)
    worth = mask_groups(torch.sigmoid(logits) + bias, groups, top_groups)
    got = top_k_mask(worth, 3).nonzero()[:, 1].view(TOKENS, 3)
    ids, *_ = route(logits, 3, scoring="sigmoid", bias=bias, groups=groups, top_groups=top_groups)
    assert got.tolist() == ids.sort().values.tolist()


def test_the_balance_moves_the_bias_and_the_router_as_the_switch_transformers_loss() -> None:
    mixture = _mixture()
    x = torch.randn(TOKENS, SMALL["hidden_size"])
    norm = torch.ones(SMALL["hidden_size"])
    _, imbalance = mixture.function(x, norm, *mixture.weights())
    imbalance.backward()
    router = mixture.gate.weight.detach().requires_grad_()
    bias = mixture.gate.e_score_correction_bias
    normed = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
    scores = torch.sigmoid(torch.nn.functional.linear(normed, router))
    used = top_k_mask(mask_groups((scores + bias).detach(), 4, 2), 3).float().mean(0) * 8 / 3
    torch.testing.assert_close(imbalance.detach(), used.square().mean())
    (used * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum().backward()
    torch.testing.assert_close(mixture.gate.weight.grad, router.grad)
    torch.testing.assert_close(bias.grad, used - 1)
    frozen = [p for p in mixture.parameters() if p is not bias and p is not mixture.gate.weight]
    assert all(p.grad is None or not p.grad.any() for p in frozen)


def test_steps_along_the_balance_even_it_out() -> None:
    mixture = _mixture(n_group=1, topk_group=1)
    x = torch.randn(1024, SMALL["hidden_size"])
    norm = torch.ones(SMALL["hidden_size"])
    bias = mixture.gate.e_score_correction_bias
    optimizer = torch.optim.AdamW([bias], lr=0.02, weight_decay=0.0)
    seen = []
    for _ in range(200):
        _, imbalance = mixture.function(x, norm, *mixture.weights())
        imbalance.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(imbalance.detach()))
    assert seen[0] > 1.3
    assert seen[-1] < 1.01


def test_each_expert_has_separate_tensors_in_files() -> None:
    torch.manual_seed(0)
    experts = SeparateExperts(6, 4, 3, gated=True)
    for p in experts.parameters():
        torch.nn.init.normal_(p)
    state = experts.state_dict()
    kinds = ("gate_proj", "up_proj", "down_proj")
    assert set(state) == {f"{e}.{kind}.weight" for e in range(3) for kind in kinds}
    assert torch.equal(state["1.down_proj.weight"], experts.down_proj[1])
    other = SeparateExperts(6, 4, 3, gated=True)
    other.load_state_dict(state)
    for p, q in zip(experts.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
