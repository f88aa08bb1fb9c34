"""MoE layers equal the models' formulas in plain torch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.errors import CheckpointError, ConfigError
from lockstep.kernels.activations import silu_mul
from lockstep.kernels.backends import load
from lockstep.kernels.exchange import ALONE
from lockstep.kernels.exchange.group import DryGroup
from lockstep.kernels.experts import experts as experts_op
from lockstep.kernels.formats.weights import QuantizedWeight, quantize_int
from lockstep.kernels.linear import linear
from lockstep.kernels.route import route
from lockstep.layers.build_context import BuildContext
from lockstep.layers.moe import MoE, Routing
from lockstep.layers.sharding import Rank
from lockstep.models.loader import finish
from lockstep.quantization import TensorInfo, WeightFormat, WeightSink
from tests.layers.rounding import Rounding

HIDDEN = 24
INNER = 10
ROUTING = set(Routing.__dataclass_fields__)


NO_CONTEXT: Any = None
"""Context of a step; MoE layers do not read it."""


def random_moe(
    dtype: torch.dtype = torch.float32,
    experts: int = 12,
    build: BuildContext | None = None,
    hidden: int = HIDDEN,
    **more: Any,
) -> MoE:
    """Return a layer of random weights with top 3."""
    torch.manual_seed(0)
    routing = Routing(experts, 3, **{name: more.pop(name) for name in ROUTING & set(more)})
    layer = MoE(build or BuildContext("cpu", dtype, 1, 1), hidden, INNER, routing, **more)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.2)
    return layer


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def reference_moe(x: Tensor, table: dict[str, Tensor], ids: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum over each token's experts, by the checkpoint's names."""
    y = torch.zeros_like(x)
    for t, mine in enumerate(ids.tolist()):
        for slot, e in enumerate(mine):
            names = [f"experts.{e}.{n}_proj.weight" for n in ("gate", "up", "down")]
            y[t] += weights[t, slot] * mlp(x[t], *(table[name] for name in names))
    return y


@pytest.mark.parametrize("shared", [0, 16])
@pytest.mark.parametrize("gated", [False, True])
def test_qwen(shared: int, gated: bool) -> None:
    """Qwen3-MoE has no shared expert, Qwen3-Next and Qwen3.5 a gated one."""
    gated = gated and shared > 0
    layer = random_moe(shared_inner=shared, shared_gate=gated)
    x = torch.randn(9, HIDDEN)
    table = layer.weights()
    weights, ids = F.linear(x, table["gate.weight"]).softmax(-1).topk(3)
    expected = reference_moe(x, table, ids, weights / weights.sum(-1, keepdim=True))
    if shared:
        names = [f"shared_expert.{n}_proj.weight" for n in ("gate", "up", "down")]
        last = mlp(x, *(table[name] for name in names))
        if gated:
            last = torch.sigmoid(F.linear(x, table["shared_expert_gate.weight"])) * last
        expected = expected + last
    torch.testing.assert_close(layer(x, NO_CONTEXT), expected)


def test_deepseek_grouped_routing() -> None:
    layer = random_moe(
        scoring="sigmoid", scale=2.5, bias=True, groups=4, top_groups=2, shared_inner=20,
        shared_name="shared_experts",
    )  # fmt: skip
    x = torch.randn(9, HIDDEN)
    table = layer.weights()
    scores = F.linear(x, table["gate.weight"]).sigmoid()
    choice = scores + table["gate.e_score_correction_bias"]
    best = choice.view(9, 4, 3).topk(2)[0].sum(-1).topk(2)[1]
    kept = F.one_hot(best, 4).sum(1).repeat_interleave(3, 1).bool()
    ids = choice.masked_fill(~kept, -torch.inf).topk(3)[1]
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
    names = [f"shared_experts.{n}_proj.weight" for n in ("gate", "up", "down")]
    last = mlp(x, *(table[name] for name in names))
    torch.testing.assert_close(layer(x, NO_CONTEXT), reference_moe(x, table, ids, weights) + last)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_sigmoid_router_is_fp32(scoring: str) -> None:
    layer = random_moe(torch.bfloat16, scoring=scoring)
    wide = scoring == "sigmoid"
    x = torch.randn(5, HIDDEN).bfloat16()
    assert layer.router.part(0).dtype == (torch.float32 if wide else torch.bfloat16)
    assert layer.up.stored.dtype == torch.bfloat16 and layer(x, NO_CONTEXT).dtype == torch.bfloat16
    weights = layer.route(layer.router(x, NO_CONTEXT), 3, **layer.routing_arguments)[1]
    assert weights.dtype == layer.router.dtype


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_router_equals_separate_gemms(dtype: torch.dtype, scoring: str) -> None:
    """Fused are the router, the shared expert's gate, its gate and up projections; an fp32 router
    of a bf16 model is a separate GEMM."""
    gated = scoring == "softmax"
    layer = random_moe(dtype, scoring=scoring, shared_inner=16, shared_gate=gated)
    is_separate = layer.router.dtype != dtype
    assert len(layer.router.gemms) == 1 and (layer.shared_up is not None) == is_separate
    load()
    run = {op: op.backends["cpu"].run for op in (linear, experts_op)}
    table = layer.weights()
    x = torch.randn(9, HIDDEN).to(dtype)

    def times(x: Tensor, *names: str) -> Tensor:
        return run[linear](x, torch.cat([table[f"{name}.weight"] for name in names]))

    routed = ("gate", "shared_expert_gate") if gated else ("gate",)
    logits, gate = times(x.to(layer.router.dtype), *routed).split((12, gated), 1)
    gate_up = times(x, "shared_expert.gate_proj", "shared_expert.up_proj")
    shared = times(silu_mul(gate_up), "shared_expert.down_proj")
    gate = gate[:, 0] if gated else None
    ids, weights, *_ = route(logits, 3, scoring=scoring, dtype=layer.router.dtype)
    stored = (layer.up.stored, layer.down.stored)
    assert torch.equal(
        layer(x, NO_CONTEXT), run[experts_op](x, *stored, ids, weights, shared, gate)
    )


@pytest.mark.parametrize("joined", [True, False])
def test_small_quantized_shared_expert_fuses_with_the_router(
    joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.layers.linear.MAX_DEQUANTIZED", (32 - (not joined)) * HIDDEN)
    weight_format = Rounding(of="shared_expert.")
    load()
    build = BuildContext("cuda:0", torch.bfloat16, 1, 1, weight_format=weight_format, arch=90)
    with FakeTensorMode():
        layer = random_moe(build=build, shared_inner=16)
    router = layer.router.gemms[0]
    assert len(layer.router.gemms) == 1 and router.quantized is None
    assert (layer.shared_up is None) == joined
    assert router.shape == (44 if joined else 12, HIDDEN)
    if layer.shared_up is not None:
        shared = layer.shared_up.gemms[0]
        assert shared.shape == (32, HIDDEN) and isinstance(shared.quantized, QuantizedWeight)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("gated", [True, False])
def test_quantized_shared_expert_equals_dequantized(device: str, gated: bool) -> None:
    """Fused with the router, and dequantized when it is loaded; down stays quantized on a GPU."""
    load()
    build = BuildContext(device, torch.bfloat16, 1, 1, weight_format=Rounding(of="shared_expert."))
    sizes: dict[str, Any] = dict(hidden=256, shared_inner=16, shared_gate=gated)
    layer = random_moe(build=build, **sizes)
    plain = random_moe(build=BuildContext(device, torch.bfloat16, 1, 1), **sizes)
    assert layer.shared_up is None and layer.shared_down is not None
    expected = plain.weights()
    for name, target in layer.weights().items():
        WeightSink.of(target).fill(expected[name].clone())
        if name.startswith("shared_expert."):
            expected[name].copy_(quantize_int(expected[name], 4, 4).dequantize(torch.bfloat16))
    finish(layer)
    x = torch.randn(70, 256, dtype=torch.bfloat16, device=device)
    for tokens in (1, 3, 70):
        assert torch.equal(layer(x[:tokens], NO_CONTEXT), plain(x[:tokens], NO_CONTEXT))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_bits_are_batch_independent(dtype: torch.dtype) -> None:
    layer = random_moe(dtype, shared_inner=16, shared_gate=True)
    x = torch.randn(40, HIDDEN).to(dtype)
    full = layer(x, NO_CONTEXT)
    for begin, end in ((0, 1), (3, 5), (7, 40), (6, 6)):
        assert torch.equal(layer(x[begin:end], NO_CONTEXT), full[begin:end])


FUSED = {
    "moe.experts": {
        "gate_up_proj": TensorInfo("moe.experts.gate_up_proj", (12, 2 * INNER, HIDDEN), "F32"),
        "down_proj": TensorInfo("moe.experts.down_proj", (12, HIDDEN, INNER), "F32"),
    }
}
"""Header of a file that stores all experts as one tensor."""


def build_context(
    tensors: Any = None,
    weight_format: WeightFormat | None = None,
    device: str = "cpu",
    rank: Rank | None = None,
) -> BuildContext:
    context = BuildContext(
        device,
        torch.float32,
        1,
        1,
        tensors=tensors,
        weight_format=weight_format,
        group=ALONE if rank is None else DryGroup(rank.index, rank.size),
    )
    return context.for_layer("moe")


def test_separate_and_stacked_experts_load_equally() -> None:
    names = ("w1", "w3", "w2")
    shared = dict(shared_inner=16, shared_gate=True, bias=True)
    one = random_moe(names=names, **shared)
    all_at_once = random_moe(build=build_context(FUSED), **shared)
    single = one.weights()
    fused = all_at_once.weights()
    mine = {f"experts.{e}.w{n}.weight" for e in range(12) for n in (1, 2, 3)}
    assert set(single) - set(fused) == mine
    assert set(fused) - set(single) == {"experts.gate_up_proj", "experts.down_proj"}
    filled = {name: torch.randn(t.shape) for name, t in fused.items()}
    (gate_up, down) = (filled[f"experts.{n}_proj"] for n in ("gate_up", "down"))
    for e in range(12):
        parts = (gate_up[e, :INNER], gate_up[e, INNER:], down[e])
        filled |= {f"experts.{e}.{n}.weight": t for n, t in zip(names, parts, strict=True)}
    for table in (single, fused):
        for name, tensor in table.items():
            tensor.copy_(filled[name])
    x = torch.randn(9, HIDDEN)
    assert torch.equal(one(x, NO_CONTEXT), all_at_once(x, NO_CONTEXT))
    size = sum(parameter.numel() for parameter in one.parameters())
    assert sum(t.numel() for t in single.values()) == size
    assert sum(t.numel() for t in fused.values()) == size


@pytest.mark.parametrize("index", [0, 1])
def test_rank_has_its_columns_of_every_expert(index: int) -> None:
    """A stacked tensor is sharded within each expert, not across experts."""
    layer = random_moe(build=build_context(FUSED, rank=Rank(index, 2)))
    sink = layer.weights()["experts.gate_up_proj"]
    assert isinstance(sink, WeightSink) and sink.shape == (12, 2 * INNER, HIDDEN)
    tensor = torch.randn(12, 2 * INNER, HIDDEN)
    sink.fill(sink.narrow(tensor))
    share = Rank(index, 2).columns(INNER)
    rows = [tensor[:, n * INNER + share.start : n * INNER + share.stop] for n in range(2)]
    assert torch.equal(layer.up.stored, torch.cat(rows, 1))


@pytest.mark.parametrize("tensors", [None, FUSED], ids=["single", "fused"])
def test_quantized_experts_equal_dequantized(tensors: Any) -> None:
    weight_format = Rounding()
    layer = random_moe(
        build=build_context(tensors, weight_format), shared_inner=16, shared_gate=True
    )
    plain = random_moe(build=build_context(tensors), shared_inner=16, shared_gate=True)
    expected = plain.weights()
    for name, target in layer.weights().items():
        WeightSink.of(target).fill(expected[name].clone())
        if name.startswith("experts."):
            tensor = expected[name]
            rows = tensor.flatten(0, -2)
            tensor.copy_(quantize_int(rows, 4, 4).dequantize(torch.float32).view(tensor.shape))
    assert isinstance(layer.up.stored, QuantizedWeight)
    for weight in (layer.up, layer.down):
        weight.finish()
    x = torch.randn(9, HIDDEN)
    assert torch.equal(layer(x, NO_CONTEXT), plain(x, NO_CONTEXT))
    requested = weight_format.requested[:2]
    assert [module.path for module in requested] == [
        f"moe.experts.0.{n}_proj" for n in ("gate", "up")
    ]
    assert all((module.outputs, module.inputs) == (INNER, HIDDEN) for module in requested)
    if tensors:
        assert requested[0].tensors == {
            "weight": TensorInfo("moe.experts.gate_up_proj", (INNER, HIDDEN), "F32")
        }


def test_expert_of_another_format_is_named() -> None:
    odd = "moe.experts.7.up_proj"
    with pytest.raises(CheckpointError, match=f"{odd} is stored as a plain weight"):
        random_moe(build=build_context(weight_format=Rounding(odd=odd)))


def test_quantized_experts_run_on_a_gpu() -> None:
    """They stay quantized, and are read by the backend of dense experts."""
    load()
    assert set(experts_op.backends) == {"reference", "cpu", "triton"}
    for packed in (False, True):
        chosen = experts_op.choose(device="cuda", dtype=torch.bfloat16, quantized=packed)
        assert chosen == "triton"


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
def test_invalid_routing_is_an_error(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="is not allowed; allowed:"):
        random_moe(**wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("shared", [0, 1024])
def test_row_bits_are_batch_independent_on_a_gpu(scoring: str, shared: int) -> None:
    """With routers of two segments, whose GEMMs leave partial sums at some numbers of rows."""
    load()
    build = BuildContext("cuda", torch.bfloat16, 1, 1)
    gated = scoring == "softmax" and shared > 0
    sizes = dict(experts=128, hidden=2048, shared_inner=shared, shared_gate=gated)
    layer = random_moe(build=build, scoring=scoring, **sizes)
    x = torch.randn(300, 2048, device="cuda").bfloat16()
    full = layer(x, NO_CONTEXT)
    for begin, end in ((0, 1), (5, 13), (40, 104), (30, 158), (0, 256)):
        assert torch.equal(layer(x[begin:end], NO_CONTEXT), full[begin:end]), (begin, end)
