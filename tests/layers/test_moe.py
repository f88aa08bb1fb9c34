"""MoE against the formulas of the models that have it, in plain torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.layers.build import Build
from lockstep.layers.moe import MoE

HIDDEN = 24
INNER = 10


def made(dtype: torch.dtype = torch.float32, experts: int = 12, **more: object) -> MoE:
    """A layer of random weights; top 3."""
    torch.manual_seed(0)
    layer = MoE(Build("cpu", dtype, 1, 1), HIDDEN, INNER, experts, 3, **more)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.2)
    return layer


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def mixture(x: Tensor, table: dict[str, Tensor], ids: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum over each token's experts, by the checkpoint's names."""
    y = torch.zeros_like(x)
    for t, own in enumerate(ids.tolist()):
        for slot, e in enumerate(own):
            names = [f"experts.{e}.{n}_proj.weight" for n in ("gate", "up", "down")]
            y[t] += weights[t, slot] * mlp(x[t], *(table[name] for name in names))
    return y


@pytest.mark.parametrize("shared", [0, 16])
@pytest.mark.parametrize("gated", [False, True])
def test_qwen(shared: int, gated: bool) -> None:
    """Qwen3-MoE has no shared expert, Qwen3-Next and Qwen3.5 a gated one."""
    gated = gated and shared > 0
    layer = made(shared_inner=shared, shared_gate=gated)
    x = torch.randn(9, HIDDEN)
    table = layer.weights()
    weights, ids = F.linear(x, table["gate.weight"]).softmax(-1).topk(3)
    expected = mixture(x, table, ids, weights / weights.sum(-1, keepdim=True))
    if shared:
        names = [f"shared_expert.{n}_proj.weight" for n in ("gate", "up", "down")]
        last = mlp(x, *(table[name] for name in names))
        if gated:
            last = torch.sigmoid(F.linear(x, table["shared_expert_gate.weight"])) * last
        expected = expected + last
    torch.testing.assert_close(layer(x), expected)


def test_deepseek() -> None:
    layer = made(
        scoring="sigmoid", scale=2.5, bias=True, groups=4, top_groups=2, shared_inner=20,
    )  # fmt: skip
    x = torch.randn(9, HIDDEN)
    table = layer.weights("shared_experts")
    scores = F.linear(x, table["gate.weight"]).sigmoid()
    choice = scores + table["gate.e_score_correction_bias"]
    best = choice.view(9, 4, 3).topk(2)[0].sum(-1).topk(2)[1]
    kept = F.one_hot(best, 4).sum(1).repeat_interleave(3, 1).bool()
    ids = choice.masked_fill(~kept, -torch.inf).topk(3)[1]
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
    names = [f"shared_experts.{n}_proj.weight" for n in ("gate", "up", "down")]
    last = mlp(x, *(table[name] for name in names))
    torch.testing.assert_close(layer(x), mixture(x, table, ids, weights) + last)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_router_that_scores_by_sigmoid_is_fp32_all_through(scoring: str) -> None:
    layer = made(torch.bfloat16, scoring=scoring)
    wide = scoring == "sigmoid"
    x = torch.randn(5, HIDDEN).bfloat16()
    assert layer.router.weight.dtype == (torch.float32 if wide else torch.bfloat16)
    assert layer.up.dtype == torch.bfloat16 and layer(x).dtype == torch.bfloat16
    weights = layer.route(layer.router(x.to(layer.router_dtype)), 3, **layer.choice)[1]
    assert weights.dtype == layer.router_dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_its_bits_in_any_batch(dtype: torch.dtype) -> None:
    layer = made(dtype, shared_inner=16, shared_gate=True)
    x = torch.randn(40, HIDDEN).to(dtype)
    whole = layer(x)
    for begin, end in ((0, 1), (3, 5), (7, 40), (6, 6)):
        assert torch.equal(layer(x[begin:end]), whole[begin:end])


def test_both_tables_name_the_same_memory() -> None:
    layer = made(shared_inner=16, shared_gate=True, bias=True)
    one = layer.weights(names=("w1", "w3", "w2"))
    fused = layer.fused_weights()
    filled = {name: torch.randn(t.shape) for name, t in fused.items()}
    for name, tensor in fused.items():
        tensor.copy_(filled[name])
    gate_up = filled["experts.gate_up_proj"]
    down = filled["experts.down_proj"]
    assert torch.equal(one["experts.7.w1.weight"], gate_up[7, :INNER])
    assert torch.equal(one["experts.7.w3.weight"], gate_up[7, INNER:])
    assert torch.equal(one["experts.11.w2.weight"], down[11])
    assert set(one) - set(fused) == {
        f"experts.{e}.w{n}.weight" for e in range(12) for n in (1, 2, 3)
    }
    size = sum(parameter.numel() for parameter in layer.parameters())
    assert sum(t.numel() for t in one.values()) == size == sum(t.numel() for t in fused.values())


@pytest.mark.parametrize(
    "wrong",
    [
        dict(groups=5),
        dict(groups=12, top_groups=12),
        dict(groups=6, top_groups=1),
        dict(groups=2, top_groups=3),
        dict(experts=2),
        dict(shared_gate=True),
        dict(shared_gate=True, shared_inner=8, scoring="sigmoid"),
    ],
    ids=str,
)
def test_a_choice_that_cannot_be_made_is_an_error(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="is not allowed; allowed:"):
        made(**wrong)
