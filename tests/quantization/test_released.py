"""Settings and tensor names of released checkpoints: which modules are quantized follows equally
from the tensors and, without any, from the settings."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from lockstep.models import architecture
from lockstep.quantization import (
    CheckpointLinear,
    Layout,
    TensorInfo,
    WeightFormat,
    read_weight_format,
)
from tests.quantization.disk import EXPERTS_ONLY

GPTQ = {"qweight": "I32", "qzeros": "I32", "scales": "BF16", "g_idx": "I32"}
ROUND = {"qweight": "I32", "qzeros": "I32", "scales": "F16"}
AWQ = {"qweight": "I32", "qzeros": "I32", "scales": "F16"}
BLOCKS = {"weight": "F8_E4M3", "weight_scale_inv": "BF16"}
CHANNELS = {"weight": "F8_E4M3", "weight_scale": "BF16"}
STATIC = {"weight": "F8_E4M3", "weight_scale": "F32", "input_scale": "F32"}
WORDS = {"weight_packed": "I32", "weight_scale": "BF16", "weight_shape": "I64"}
BYTES = {"weight": "I8", "weight_scale": "BF16"}
FOUR = {"weight_packed": "U8", "weight_scale": "F8_E4M3", "weight_global_scale": "F32"}
MODELOPT = {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32"}
PLAIN = {"weight": "BF16"}

HYBRID = "model.language_model.layers"
MIXER = (f"{HYBRID}.0.linear_attn.in_proj_qkv", f"{HYBRID}.0.linear_attn.out_proj")
SMALL = (f"{HYBRID}.0.linear_attn.in_proj_a", f"{HYBRID}.0.linear_attn.in_proj_b")
ATTENTION = (f"{HYBRID}.3.self_attn.q_proj", f"{HYBRID}.3.self_attn.o_proj")
MLP = (f"{HYBRID}.0.mlp.gate_proj", f"{HYBRID}.3.mlp.down_proj")
EXPERTS = (f"{HYBRID}.0.mlp.experts.0.gate_proj", f"{HYBRID}.39.mlp.experts.255.down_proj")
SHARED = (f"{HYBRID}.0.mlp.shared_expert.up_proj",)
ROUTERS = (f"{HYBRID}.0.mlp.gate", f"{HYBRID}.0.mlp.shared_expert_gate")
DRAFT = ("mtp.layers.0.self_attn.q_proj", "mtp.layers.0.mlp.down_proj")
MIXED_DRAFT = ("mtp.layers.0.self_attn.q_proj", "mtp.layers.0.mlp.experts.3.up_proj")
DENSE = tuple(f"model.layers.7.{name}" for name in ("self_attn.k_proj", "mlp.up_proj"))


@dataclass(frozen=True)
class Release:
    """A released checkpoint.

    settings: its quantization_config.
    packed: modules that are quantized -> their tensors.
    plain: modules that are dense.
    alone: dense modules about which the settings say nothing.
    """

    family: str
    settings: dict[str, Any]
    packed: dict[tuple[str, ...], dict[str, str]]
    plain: tuple[str, ...]
    name: str
    alone: tuple[str, ...] = field(default=())


def listed(*parts: str, layers: int = 64) -> list[str]:
    """Return the names of these parts of every layer with Gated DeltaNet."""
    return [f"{HYBRID}.{i}.{part}" for i in range(layers) if (i + 1) % 4 for part in parts]


def groups(kind: str, ignore: list[str], acts: object = None, **weights: Any) -> dict[str, Any]:
    """Return settings of compressed-tensors as llm-compressor writes them."""
    common = {"dynamic": False, "observer": "minmax", "observer_kwargs": {}, "symmetric": True}
    common |= {"actorder": None, "block_structure": None, "scale_dtype": None, "zp_dtype": None}
    group = {"targets": ["Linear"], "weights": {**common, **weights}, "format": kind}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {**group, "input_activations": acts}},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


OFFICIAL_GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
    "lm_head": False,
    "checkpoint_format": "gptq",
    "pack_dtype": "int32",
    "meta": {"quantizer": ["gptqmodel:4.2.5"], "static_groups": False, "true_sequential": True},
    "dynamic": EXPERTS_ONLY,
}
FLOAT = {"bits": 16, "data_type": "float"}
MODEL_FREE = {
    "quant_method": "auto-round",
    "autoround_version": "0.14.2",
    "model_free": True,
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "data_type": "int",
    "iters": 0,
    "packing_format": "auto_round:auto_gptq",
    "extra_config": {
        "lm_head": FLOAT,
        f"{HYBRID}.0.input_layernorm": FLOAT,
        f"{HYBRID}.0.linear_attn.norm": FLOAT,
        "model.visual.blocks.0.attn.qkv": FLOAT,
        "mtp.norm": FLOAT,
    },
}
TUNED = {
    **MODEL_FREE,
    "iters": 1000,
    "block_name_to_quantize": ["model.language_model.layers", "mtp.layers"],
    "extra_config": {name: {"bits": 16, "data_type": "fp"} for name in (*SMALL, "mtp.fc")},
}
BLOCKS_OF_QWEN = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [
        "lm_head",
        "model.language_model.embed_tokens",
        *listed("linear_attn.conv1d", "linear_attn.in_proj_a", "linear_attn.in_proj_b"),
        *(f"{HYBRID}.{i}.mlp.{gate}" for i in range(40) for gate in ("gate", "shared_expert_gate")),
        "model.visual.blocks.0.attn.proj",
        "mtp.fc",
        "mtp.layers.0.mlp.gate",
        "mtp.layers.0.mlp.shared_expert_gate",
        "mtp.pre_fc_norm_hidden",
    ],
}
REDHAT_IGNORE = [
    "re:.*lm_head",
    "re:visual.*",
    "re:model.visual.*",
    "re:.*mlp.gate$",
    "re:.*embed_tokens$",
    "re:.*shared_expert_gate$",
    "re:.*linear_attn.*",
    "re:^mtp.*",
]
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
EIGHT = {"num_bits": 8, "group_size": None}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_quant_algo": "FP8",
    "exclude_modules": ["mtp*", "*in_proj_a", "*in_proj_b", "*mlp.gate", "*shared_expert_gate"],
    "quantized_layers": {
        **{name: {"quant_algo": "FP8"} for name in (*MIXER, *ATTENTION)},
        f"{HYBRID}.0.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        f"{HYBRID}.39.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        **{name: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in SHARED},
        "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    },
}
SUPER_EXPERTS = tuple(f"backbone.layers.1.mixer.experts.{e}.up_proj" for e in (0, 511))
SUPER_EIGHT = ("backbone.layers.0.mixer.in_proj", "backbone.layers.1.mixer.fc1_latent_proj")
SUPER = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "ignore": ["lm_head", "mtp*", "*conv1d"],
    "quantized_layers": {
        **{name: {"quant_algo": "NVFP4", "group_size": 16} for name in SUPER_EXPERTS},
        **{name: {"quant_algo": "FP8"} for name in SUPER_EIGHT},
    },
}
KIMI = "language_model.model.layers.5"
KIMI_EXPERTS = (f"{KIMI}.mlp.experts.7.gate_proj", f"{KIMI}.mlp.experts.7.down_proj")
KIMI_PLAIN = (f"{KIMI}.self_attn.o_proj", f"{KIMI}.mlp.shared_experts.up_proj", f"{KIMI}.mlp.gate",
              "language_model.model.layers.0.mlp.gate_proj", "language_model.lm_head")  # fmt: skip
KIMI_IGNORE = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
]
DEEPSEEK = "model.layers.5"
RELEASES = {
    "Qwen3.5-35B-A3B-GPTQ-Int4": Release(
        "qwen3_5_moe",
        OFFICIAL_GPTQ,
        {EXPERTS: GPTQ},
        (*MIXER, *SMALL, *ATTENTION, *SHARED, *ROUTERS, *MIXED_DRAFT, "mtp.fc", "lm_head"),
        "gptq-int4-g128",
    ),
    "Qwen3.6-27B-int4-AutoRound, without a model": Release(
        "qwen3_5",
        MODEL_FREE,
        {(*MIXER, *SMALL, *ATTENTION, *MLP, *DRAFT): ROUND},
        ("lm_head",),
        "auto-round-int4-g128",
        alone=(*SMALL, *DRAFT),
    ),
    "Qwen3.6-27B-int4-AutoRound": Release(
        "qwen3_5",
        TUNED,
        {(*MIXER, *ATTENTION, *MLP, *DRAFT): ROUND},
        (*SMALL, "mtp.fc", "lm_head"),
        "auto-round-int4-g128",
    ),
    "Qwen3.6-35B-A3B-FP8": Release(
        "qwen3_5_moe",
        BLOCKS_OF_QWEN,
        {(*MIXER, *ATTENTION, *EXPERTS, *SHARED, *MIXED_DRAFT): BLOCKS},
        (*SMALL, *ROUTERS, "mtp.fc", "lm_head"),
        "fp8-128x128",
    ),
    "RedHatAI/Qwen3.6-35B-A3B-NVFP4": Release(
        "qwen3_5_moe",
        groups("nvfp4-pack-quantized", REDHAT_IGNORE, {**NVFP4, "dynamic": "local"}, **NVFP4),
        {(*ATTENTION, *EXPERTS, *SHARED): {**FOUR, "input_global_scale": "F32"}},
        (*MIXER, *SMALL, *ROUTERS, *MIXED_DRAFT, "lm_head"),
        "compressed-tensors-nvfp4-pack-quantized",
    ),
    "nvidia/Qwen3.6-35B-A3B-NVFP4": Release(
        "qwen3_5_moe",
        MIXED,
        {(*MIXER, *ATTENTION): STATIC, (*EXPERTS, *SHARED, "lm_head"): MODELOPT},
        (*SMALL, *ROUTERS, *MIXED_DRAFT, "mtp.fc"),
        "modelopt-MIXED_PRECISION",
    ),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": Release(
        "nemotron_h",
        SUPER,
        {SUPER_EXPERTS: {**MODELOPT, "input_scale": "F32"}, SUPER_EIGHT: STATIC},
        ("backbone.layers.7.mixer.q_proj", "backbone.layers.1.mixer.gate", "lm_head",
         "mtp.layers.0.eh_proj", "mtp.layers.1.mixer.experts.0.up_proj"),
        "modelopt-MIXED_PRECISION",
    ),
    "moonshotai/Kimi-K2.5": Release(
        "kimi_k25",
        groups("pack-quantized", KIMI_IGNORE, num_bits=4, type="int", strategy="group",
               group_size=32),
        {KIMI_EXPERTS: WORDS},
        KIMI_PLAIN,
        "compressed-tensors-pack-quantized",
    ),
    "deepseek-ai/DeepSeek-V3": Release(
        "deepseek_v3",
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
         "weight_block_size": [128, 128]},
        {(f"{DEEPSEEK}.self_attn.kv_a_proj_with_mqa", f"{DEEPSEEK}.mlp.experts.7.gate_proj",
          f"{DEEPSEEK}.mlp.shared_experts.up_proj"): {**BLOCKS, "weight_scale_inv": "F32"}},
        (f"{DEEPSEEK}.mlp.gate", "model.layers.61.eh_proj", "lm_head"),
        "fp8-128x128",
    ),
    "RedHatAI/Qwen3-8B-FP8-dynamic": Release(
        "qwen3",
        groups("float-quantized", ["lm_head"], {"dynamic": True, "strategy": "token"}, **EIGHT,
               type="float", strategy="channel"),
        {DENSE: CHANNELS},
        ("lm_head",),
        "compressed-tensors-float-quantized",
    ),
    "RedHatAI/Qwen3-8B-quantized.w4a16": Release(
        "qwen3",
        groups("pack-quantized", ["lm_head"], num_bits=4, type="int", strategy="group",
               group_size=128, actorder="weight"),
        {DENSE: WORDS},
        ("lm_head",),
        "compressed-tensors-pack-quantized",
    ),
    "RedHatAI/Qwen3-8B-quantized.w8a8": Release(
        "qwen3",
        groups("int-quantized", ["lm_head"], {"dynamic": True, "strategy": "token"}, **EIGHT,
               type="int", strategy="channel"),
        {DENSE: BYTES},
        ("lm_head",),
        "compressed-tensors-int-quantized",
    ),
    "Qwen/Qwen3-8B-AWQ": Release(
        "qwen3",
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
         "version": "gemm", "modules_to_not_convert": None, "backend": "autoawq"},
        {DENSE: AWQ},
        ("lm_head",),
        "awq-int4-g128",
    ),
    "OPEA, auto-round 0.4": Release(
        "qwen2",
        {"quant_method": "intel/auto-round", "autoround_version": "0.4.2.dev", "bits": 4,
         "group_size": 128, "sym": True, "data_type": "int", "backend": "auto_round:gptq:exllamav2",
         "amp": True, "scale_dtype": "torch.float16", "to_quant_block_names": None},
        {DENSE: ROUND},
        ("lm_head",),
        "auto-round-int4-g128",
    ),
}  # fmt: skip


def weight_format(release: Release) -> WeightFormat:
    """The weight format of its settings."""
    result = read_weight_format(release.settings)
    assert result is not None
    return result


def module(release: Release, name: str, tensors: dict[str, str] | None) -> CheckpointLinear:
    """Return the module of this name, of 256 x 128, with these tensors or without files."""
    prefixes = architecture(release.family).PREFIXES
    prefix = next((one for one in prefixes if name.startswith(one)), "")
    path = name.removeprefix(prefix)
    names = (*(one + path for one in prefixes), path)
    infos = None
    if tensors is not None:
        infos = {s: TensorInfo(f"{name}.{s}", (1,), dtype) for s, dtype in tensors.items()}
    return CheckpointLinear(path, names, 256, 128, infos)


def kind(layout: Layout | None) -> str:
    """Return a description of its layout, without the dtype of scales, which only files give."""
    if layout is None:
        return "plain"
    options = {name: value for name, value in layout.options if name != "scale_dtype"}
    return f"{layout.kind.__name__}({options})"


@pytest.mark.parametrize("name", RELEASES)
def test_quantized_modules_follow_from_tensors_and_settings(name: str) -> None:
    release = RELEASES[name]
    actual = weight_format(release)
    assert actual.name == release.name
    for modules, tensors in release.packed.items():
        for one in modules:
            read = module(release, one, tensors)
            layout = actual.layout(read)
            assert layout is not None, one
            slots = actual.sinks(read, layout.empty(256, 128, "cpu"))
            assert tensors.keys() - slots.keys() <= actual.unused, one
            if one not in release.alone:
                assert kind(actual.layout(module(release, one, None))) == kind(layout), one
    for one in release.plain:
        assert actual.layout(module(release, one, PLAIN)) is None, one
        assert actual.layout(module(release, one, None)) is None, one
