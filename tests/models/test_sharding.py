"""Every architecture loaded by two ranks: their slices together are the whole weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.kernels.exchange.group import DryGroup
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Embedding, Gemm, Linear
from lockstep.layers.moe import ExpertWeight
from lockstep.layers.sharding import Rank, WeightSpec
from lockstep.models import architecture, draft_prefix
from lockstep.models.loader import build_model, fill_dummy, weight_specs
from lockstep.quantization import read_weight_format
from tests.tiny_model import (
    CONFIG,
    DEEPSEEK,
    HYBRID_MOE,
    KIMI,
    LLAMA,
    MIXTRAL,
    NEMOTRON_H,
    NEXT,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
)

CONFIGS = {
    "qwen3": QWEN3,
    "qwen2": QWEN2,
    "llama": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "qwen3_5": CONFIG,
    "qwen3_next": NEXT,
    "qwen3_5_moe": HYBRID_MOE,
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "deepseek_v3": {**DEEPSEEK, "num_attention_heads": 6, "num_key_value_heads": 6},
    "kimi_k2": {**KIMI, "num_attention_heads": 6, "num_key_value_heads": 6},
    "nemotron_h": {**NEMOTRON_H, "num_attention_heads": 6, "num_key_value_heads": 1},
    "nemotron_h with latent experts": {
        **NEMOTRON_H,
        "num_attention_heads": 6,
        "moe_latent_size": 24,
    },
}
RANKS = (Rank(0, 2), Rank(1, 2))
Specs = dict[str, WeightSpec]


def build(
    raw: dict[str, Any], rank: Rank, quantization: str | None = None
) -> tuple[nn.Module, Specs, BuildContext]:
    """Build the target and its draft module for a rank; return it with all specs."""
    context = BuildContext(
        "cpu",
        torch.float32,
        4,
        64,
        group=DryGroup(rank.index, rank.size),
        weight_format=read_weight_format(None, quantization),
    )
    model = build_model({**raw, "vocab_size": 96}, context)
    specs = weight_specs(model.weights())  # type: ignore[operator]  # a Decoder's method
    module = architecture(raw["model_type"])
    prefix = draft_prefix(module, raw)
    if prefix is not None and module.Config.read({**raw, "vocab_size": 96}) is not None:
        draft = module.Draft(model, context)
        specs |= weight_specs(draft.weights(), prefix)
        model.add_module("draft", draft)
    return model, specs, context


def fill(specs: Specs, tensors: dict[str, Tensor]) -> None:
    """Load the rank's slice of every tensor."""
    for name, spec in specs.items():
        assert spec.mismatch(tensors[name]) is None, name
        spec.sink.fill(spec.narrow(tensors[name]))


def owned_elements(spec: WeightSpec, tensor: Tensor) -> Tensor:
    """Return a mask of the elements of the checkpoint's tensor that a rank has."""
    mask = torch.zeros(tensor.shape, dtype=torch.bool)
    if spec.shard_axis is None:
        return ~mask
    for begin, end in spec.sink.ranges:
        mask.narrow(spec.shard_axis, begin, end - begin).fill_(True)
    return mask


@pytest.mark.parametrize("name", CONFIGS)
def test_rank_slices_cover_the_whole_weight(name: str) -> None:
    raw = CONFIGS[name]
    full, whole_specs, _ = build(raw, Rank())
    torch.manual_seed(0)
    tensors = {n: torch.randn(spec.shape or (1,)) for n, spec in whole_specs.items()}
    fill(whole_specs, tensors)
    ranks = [build(raw, rank) for rank in RANKS]
    for _, specs, _ in ranks:
        assert specs.keys() == whole_specs.keys()
        fill(specs, tensors)
    cut = 0
    for n, tensor in tensors.items():
        together = torch.full_like(tensor, torch.nan)
        for _, specs, _ in ranks:
            spec = specs[n]
            assert spec.shape == tuple(tensor.shape), n
            mask = owned_elements(spec, tensor)
            together[mask] = spec.narrow(tensor).flatten() if mask.any() else together[mask]
            cut += not mask.all()
        assert torch.equal(together, tensor), n
    assert cut > len(tensors), "most tensors are sharded"
    for model, _, _ in ranks:
        check_layers(model, full)


def check_layers(model: nn.Module, full: nn.Module) -> None:
    """Assert that each layer's loaded rows equal those of the whole model."""
    modules = dict(full.named_modules())
    compared = 0
    for name, layer in model.named_modules():
        reference: Any = modules.get(name)  # the whole model has no exchanges
        if isinstance(layer, Linear):
            for index, module in enumerate(layer.sources):
                rows = pick(checkpoint_rows(reference, index), module.ranges)
                assert torch.equal(checkpoint_rows(layer, index), rows), name
                compared += 1
            if not layer.gemms[0].quantized:
                assert layer.gemms[0].split_k == reference.gemms[0].split_k
        elif isinstance(layer, ExpertWeight):
            for expert in range(layer.experts):
                rows = pick(reference.stored[expert], layer.ranges)
                assert torch.equal(layer.stored[expert], rows), name
            compared += 1
        elif isinstance(layer, Embedding):
            rows = pick(reference.weight, layer.columns.ranges(layer.rank))
            assert torch.equal(layer.weight, rows), name
    assert compared and any(isinstance(layer, Gemm) for layer in model.modules())


def checkpoint_rows(layer: Any, index: int) -> Tensor:
    """Return the rows of a fused weight in the checkpoint's order."""
    order = layer.orders.get(layer.names[index])
    rows = layer.part(index)
    return rows if order is None else rows[order.argsort()]


def pick(rows: Tensor, ranges: Any) -> Tensor:
    """Return the rows within the ranges; all rows without ranges."""
    return torch.cat([rows[begin:end] for begin, end in ranges]) if ranges else rows


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("quantization", [None, "int4", "int8", "fp8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_dummy_weights_of_a_rank_are_slices_of_the_whole(
    name: str, quantization: str | None
) -> None:
    full, _, context = build(CONFIGS[name], Rank(), quantization)
    fill_dummy(full, None, 7, context)
    for rank in RANKS:
        model, _, context = build(CONFIGS[name], rank, quantization)
        fill_dummy(model, None, 7, context)
        check_layers(model, full)
        whole_parameters = dict(full.named_parameters())
        for n, parameter in model.named_parameters():
            shard = context.shards.get(id(parameter))
            full_weight = whole_parameters[n]
            expected = full_weight if shard is None else shard.narrow(full_weight)
            assert torch.equal(parameter, expected), n


@pytest.mark.parametrize("limit", [1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14])
def test_every_number_of_ranks_has_the_same_gemms(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.layers.linear.MAX_DEQUANTIZED", limit)
    for raw in (NEXT, HYBRID_MOE):
        gemms = []
        for rank in (Rank(), *RANKS):
            model, _, _ = build(raw, rank, "int4")
            gemms.append([n for n, m in model.named_modules() if isinstance(m, Gemm)])
        assert gemms[0] == gemms[1] == gemms[2]


@pytest.mark.parametrize("name", CONFIGS)
def test_indivisible_tensor_parallel_size_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=7 is not allowed; allowed: 1, 2"):
        build(CONFIGS[name], Rank(0, 7))
