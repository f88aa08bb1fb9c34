"""Checkpoints of mixtures with quantized experts, each with its own scales, equal their dense
weights bit for bit."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep import LLM
from lockstep.errors import CheckpointError
from lockstep.kernels.linear.prepacked import PrepackedWeight
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Weight
from lockstep.models import architecture
from lockstep.models.loader import build_model
from lockstep.quantization import WeightSink
from lockstep.quantization.weight_sink import FusedExpertSink
from lockstep.worker.executor import worker_of
from tests.models.dense import VOCAB
from tests.models.random_checkpoint import MTP, answer, build
from tests.models.test_mixtures import fuse_experts
from tests.quantization.cases import BLOCKS, FP8, NVFP4, ints, modelopt
from tests.quantization.disk import Codes, awq, gptq, names_in, random_codes
from tests.quantization.stored import (
    MODELOPT_FP4,
    TENSORS_FP4,
    Stored,
    Writer,
    fp8_weight,
    int_weight,
)
from tests.tiny_model import HYBRID_MOE, MIXTRAL, NEMOTRON_H, NEXT, QWEN3_MOE, THREE_LAYERS

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
ROUND = {**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**QWEN3_MOE, "num_hidden_layers": 2, "moe_intermediate_size": 40},
    "mixtral": {**MIXTRAL, "num_hidden_layers": 2},
    "qwen3_next": {**NEXT, **THREE_LAYERS, "mtp_num_hidden_layers": 1},
    "qwen3_5_moe": {**HYBRID_MOE, **THREE_LAYERS, "moe_intermediate_size": 136},
    "nemotron_h": {
        **NEMOTRON_H,
        "hybrid_override_pattern": "M*-EM",
        "intermediate_size": 72,
        "mamba_head_dim": 12,
        "mamba_num_heads": 8,
        "moe_intermediate_size": 24,
        "moe_latent_size": 16,
        "moe_shared_expert_intermediate_size": 32,
        "num_attention_heads": 6,
    },
    "whole": {
        **QWEN3_MOE,
        "num_hidden_layers": 1,
        "mlp_only_layers": [],
        "hidden_size": 128,
        "moe_intermediate_size": 256,
    },
    "packed draft": {
        **HYBRID_MOE,
        **THREE_LAYERS,
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
}
"""Families with widths of experts within a block of 128, beyond one, and of whole blocks."""
DENSE_MODULES = (
    "gate",
    "shared_expert_gate",
    "in_proj_a",
    "in_proj_b",
    "in_proj_ba",
    "lm_head",
    "fc",
)
"""Last parts of the names of layers that stay dense."""


def integer_writer(serialize: Callable[[Codes], dict[str, Tensor]], **options: Any) -> Writer:
    """Return a writer of GPTQ's or AWQ's tensors."""

    def write(n: int, k: int, seed: int) -> Stored:
        codes = random_codes(n, k, seed=seed, **options)
        return Stored(serialize(codes), codes.values())

    return write


Format = tuple[dict[str, Any], Writer]
FORMATS: dict[str, Format] = {
    "gptq": (GPTQ, integer_writer(gptq)),
    "gptq asymmetric": (
        {**GPTQ, "bits": 8, "sym": False, "checkpoint_format": "gptq_v2"},
        integer_writer(partial(gptq, less=0), bits=8, sym=False),
    ),
    "awq": (AWQ, integer_writer(awq, sym=False)),
    "auto-round": (ROUND, integer_writer(awq)),
    "fp8 blocks": (BLOCKS, fp8_weight("block", "weight_scale_inv", torch.bfloat16)),
    "fp8 tensor": (FP8, fp8_weight("scalar")),
    "fp8 channel": (FP8, fp8_weight("channel")),
    "compressed int4": (ints(), int_weight()),
    "compressed nvfp4": (NVFP4, TENSORS_FP4),
    "modelopt fp8": (modelopt("FP8"), fp8_weight("scalar")),
    "modelopt nvfp4": (modelopt("NVFP4"), MODELOPT_FP4),
}


def random_tensors(raw: dict[str, Any]) -> dict[str, Tensor]:
    """Return random weights of a model with its draft module, by their names in a checkpoint."""
    at = BuildContext("cpu", torch.float32, 1, 64)
    model: Any = build_model(raw, at)
    module = architecture(raw["model_type"])
    table = {
        name if name == "lm_head.weight" else f"model.{name}": target
        for name, target in model.weights().items()
    }
    if raw.get("mtp_num_hidden_layers"):
        table |= {f"mtp.{name}": x for name, x in module.Draft(model, at).weights().items()}
    generator = torch.Generator().manual_seed(5)
    result = {}
    for name, target in table.items():
        shape = WeightSink.of(target).shape
        assert shape is not None
        drawn = torch.randn(shape, generator=generator)
        result[name] = drawn * shape[-1] ** -0.5 if len(shape) > 1 else 1 + drawn / 5
    return result


def write(
    folder: Path, family: str, chosen: Format, excluded: tuple[str, ...] = ("mtp.",)
) -> tuple[Path, Path, list[str]]:
    """Write a quantized checkpoint and its dense weights; return (both folders, the quantized
    modules).

    excluded: parts of the names of modules that stay dense.
    """
    settings, writer = chosen
    raw = {**FAMILIES[family], "vocab_size": VOCAB}
    plain = random_tensors(raw)
    packed: dict[str, Tensor] = {}
    done = []
    for seed, (name, tensor) in enumerate(sorted(plain.items())):
        module = name.removesuffix(".weight")
        full = tensor.dim() == 2 and "embed" not in name
        if not full or module.rpartition(".")[2] in DENSE_MODULES or names_in(module, excluded):
            packed[name] = tensor
            continue
        stored = writer(*tensor.shape, seed)
        plain[name] = stored.value
        packed |= {f"{module}.{suffix}": part for suffix, part in stored.tensors.items()}
        done.append(module)
    folders = []
    for kind, tensors in (("packed", packed), ("plain", plain)):
        target = folder / kind
        target.mkdir()
        save_file({name: x.contiguous() for name, x in tensors.items()}, target / "x.safetensors")
        mine = {"quantization_config": settings} if kind == "packed" else {}
        (target / "config.json").write_text(json.dumps({**raw, **mine, "dtype": "float32"}))
        folders.append(target)
    return folders[0], folders[1], done


def draft_weights(folder: Path) -> Tensor:
    """Return every element of the draft module's linear layers, as loaded."""
    program = worker_of(build(folder, speculative_config=MTP).engine).program
    return weights_in(program.drafter.context.module)


def weights(llm: LLM) -> Tensor:
    """Return every element of the target's linear layers, expert by expert and row by row."""
    return weights_in(worker_of(llm.engine).model)


def weights_in(model: Any) -> Tensor:
    """Return every element of a model's linear layers, as loaded."""
    weights = [layer.loaded for layer in model.modules() if isinstance(layer, Weight)]
    plain = [w.plain() if isinstance(w, PrepackedWeight) else w for w in weights]
    return torch.cat([row.flatten() for weight in plain for row in weight.flatten(0, -2)])


@pytest.mark.default_cases("gptq asymmetric", "fp8 tensor", "compressed nvfp4")
@pytest.mark.parametrize("name", FORMATS)
def test_experts_with_their_own_scales_equal_dense(tmp_path: Path, name: str) -> None:
    (packed, plain, done) = write(tmp_path, "qwen3_moe", FORMATS[name])
    assert sum(".experts." in module for module in done) == 18
    actual = build(packed)
    expected = build(plain)
    assert torch.equal(weights(actual), weights(expected))
    assert answer(actual) == answer(expected)


@pytest.mark.default_cases("awq", "fp8 blocks", "modelopt nvfp4")
@pytest.mark.parametrize("name", FORMATS)
def test_experts_of_whole_blocks_are_loaded_together(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the result of loading one by one: codes are joined in every format."""
    joined = []
    real = FusedExpertSink._join

    def counted(stack: FusedExpertSink, actual: Sequence[Tensor]) -> Tensor | None:
        joined.append(len(actual))
        return real(stack, actual)

    monkeypatch.setattr(FusedExpertSink, "_join", counted)
    (packed, plain, _) = write(tmp_path, "whole", FORMATS[name])
    assert torch.equal(weights(build(packed)), weights(build(plain)))
    experts = FAMILIES["whole"]["num_experts"]
    assert {experts, 2 * experts} == set(joined)


@pytest.mark.default_cases("gptq")
@pytest.mark.parametrize("name", ["gptq", "awq", "auto-round", "fp8 blocks", "compressed nvfp4"])
def test_quantized_draft_experts_equal_dense(tmp_path: Path, name: str) -> None:
    """With whole blocks, which are loaded together."""
    (packed, plain, done) = write(tmp_path, "packed draft", FORMATS[name], excluded=())
    assert sum(module.startswith("mtp.layers.0.mlp.experts.") for module in done) == 18
    right = answer(build(plain))
    assert answer(build(packed, speculative_config=MTP)) == right
    assert torch.equal(draft_weights(packed), draft_weights(plain))


FORMATS_WITH_DENSE_EXPERTS = [
    "gptq",
    "awq",
    "fp8 blocks",
    "fp8 channel",
    "compressed int4",
    "modelopt nvfp4",
]


@pytest.mark.default_cases("modelopt nvfp4")
@pytest.mark.parametrize("name", FORMATS_WITH_DENSE_EXPERTS)
def test_dense_experts_with_quantized_layers(tmp_path: Path, name: str) -> None:
    """Tools that quantize linear layers skip experts stored as one tensor, and list none of them;
    the file has one tensor or one per expert."""
    excluded = ("mtp.", ".experts.")
    (packed, plain, done) = write(tmp_path, "qwen3_5_moe", FORMATS[name], excluded)
    assert any("self_attn" in module for module in done)
    right = answer(build(plain))
    assert answer(build(packed)) == right
    together = fuse_experts(load_file(packed / "x.safetensors"))
    save_file(together, packed / "x.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in together
    assert answer(build(packed)) == right


def test_damaged_expert_is_named(tmp_path: Path) -> None:
    (packed, _, _) = write(tmp_path, "whole", FORMATS["gptq"])
    tensors = load_file(packed / "x.safetensors")
    tensors["model.layers.0.mlp.experts.2.up_proj.scales"][0, 3] = float("nan")
    save_file(tensors, packed / "x.safetensors")
    with pytest.raises(CheckpointError, match="experts.2.up_proj.scales has infinities or NaN"):
        build(packed)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("name", ["gptq", "fp8 blocks", "modelopt nvfp4"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_next", "qwen3_5_moe"])
def test_quantized_mixtures_of_every_family(tmp_path: Path, family: str, name: str) -> None:
    """With shared experts, and projections grouped by key head (Qwen3-Next); the draft module is
    dense."""
    (packed, plain, done) = write(tmp_path, family, FORMATS[name])
    actual = build(packed)
    expected = build(plain)
    assert torch.equal(weights(actual), weights(expected))
    right = answer(expected)
    assert answer(actual) == right
    if family != "mixtral":
        assert any("shared_expert.down_proj" in module for module in done)
        assert answer(build(packed, speculative_config=MTP)) == right


@pytest.mark.default_cases("fp8 blocks", "modelopt nvfp4")
@pytest.mark.parametrize("name", ["gptq", "fp8 blocks", "modelopt fp8", "modelopt nvfp4"])
def test_quantized_nemotron_h(tmp_path: Path, name: str) -> None:
    """Mamba-2's projections, MLPs and experts without a gate, and their latent projections."""
    (packed, plain, done) = write(tmp_path, "nemotron_h", FORMATS[name])
    actual = build(packed)
    expected = build(plain)
    parts = {module.rpartition(".")[2] for module in done}
    assert parts >= {"in_proj", "out_proj", "fc1_latent_proj", "fc2_latent_proj", "up_proj"}
    assert torch.equal(weights(actual), weights(expected))
    assert answer(actual) == answer(expected)


def test_nemotron_3_with_two_formats(tmp_path: Path) -> None:
    """Nemotron 3 Super has experts in NVFP4, some projections in FP8, and dense layers."""
    raw = {**FAMILIES["nemotron_h"], "vocab_size": VOCAB}
    plain = {n.replace("model.", "backbone."): x for n, x in random_tensors(raw).items()}
    packed: dict[str, Tensor] = {}
    layers: dict[str, dict[str, Any]] = {}
    for seed, (name, tensor) in enumerate(sorted(plain.items())):
        module = name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        if ".experts." in name:
            layers[module] = {"quant_algo": "NVFP4", "group_size": 16}
            stored = MODELOPT_FP4(*tensor.shape, seed)
        elif last in ("in_proj", "fc1_latent_proj") or "shared_experts" in name:
            layers[module] = {"quant_algo": "FP8"}
            stored = fp8_weight("scalar")(*tensor.shape, seed)
        else:
            packed[name] = tensor
            continue
        plain[name] = stored.value
        packed |= {f"{module}.{suffix}": part for suffix, part in stored.tensors.items()}
    settings = {**modelopt("MIXED_PRECISION"), "quantized_layers": layers}
    folders = []
    for kind, tensors in (("packed", packed), ("plain", plain)):
        target = tmp_path / kind
        target.mkdir()
        save_file({n: x.contiguous() for n, x in tensors.items()}, target / "x.safetensors")
        mine = {"quantization_config": settings} if kind == "packed" else {}
        (target / "config.json").write_text(json.dumps({**raw, **mine, "dtype": "float32"}))
        folders.append(target)
    (actual, expected) = (build(folder) for folder in folders)
    assert torch.equal(weights(actual), weights(expected))
    assert answer(actual) == answer(expected)


def test_experts_with_activation_order_are_refused(tmp_path: Path) -> None:
    """Each would have its own column order, but all experts of a layer share one storage."""
    settings = {**GPTQ, "desc_act": True, "group_size": 32}
    (packed, _, _) = write(tmp_path, "qwen3_moe", (settings, integer_writer(gptq, shuffle=True)))
    with pytest.raises(CheckpointError, match="experts.0.*desc_act"):
        build(packed)


def test_experts_with_static_groups(tmp_path: Path) -> None:
    settings = {**GPTQ, "desc_act": True, "static_groups": True}
    (packed, plain, _) = write(tmp_path, "qwen3_moe", (settings, FORMATS["gptq"][1]))
    assert answer(build(packed)) == answer(build(plain))


def test_missing_expert_is_named(tmp_path: Path) -> None:
    (packed, _, _) = write(tmp_path, "qwen3_moe", FORMATS["gptq"])
    tensors = load_file(packed / "x.safetensors")
    gone = "layers.0.mlp.experts.2."
    save_file({n: x for n, x in tensors.items() if gone not in n}, packed / "x.safetensors")
    with pytest.raises(CheckpointError, match=f"{gone}gate_proj is stored as nothing: it has no"):
        build(packed)


def test_row_order_that_splits_blocks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-Next's rows are grouped by key head: with heads of 64, half a block of scales each."""
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    monkeypatch.setitem(FAMILIES, "qwen3_next", {**FAMILIES["qwen3_next"], **heads})
    (packed, _, _) = write(tmp_path, "qwen3_next", FORMATS["fp8 blocks"])
    with pytest.raises(CheckpointError, match="linear_attn.in_proj_qkvz: .*blocks of 128 rows"):
        build(packed)
