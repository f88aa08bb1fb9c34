"""Quantization settings and tensors that do not fit are refused with a one-line remedy."""

from typing import Any

import pytest
import torch

from lockstep.errors import CheckpointError
from lockstep.quantization import (
    CheckpointLinear,
    Layout,
    TensorInfo,
    WeightFormat,
    read_weight_format,
)
from lockstep.quantization.ignored_settings import BY_FORMAT

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
PACKED = ("qweight", "qzeros", "scales")
READ_BY_SOME = {
    "quant_method", "version", "meta", "backend", "act_bits", "activation_scheme", "quantization",
    "block_name_to_quantize", "to_quant_block_names",
}  # fmt: skip
"""Settings that one format ignores and another reads."""


def weight_format(settings: dict[str, Any], **changes: Any) -> WeightFormat:
    """The weight format of these settings."""
    result = read_weight_format({**settings, **changes})
    assert result is not None
    return result


def module(path: str, *suffixes: str, files: bool = True, scales: str = "F16") -> CheckpointLinear:
    """Return a module of 64 x 256 with these tensors, or without files."""
    name = path if path.startswith(("mtp.", "lm_head")) else f"model.language_model.{path}"
    infos = {
        s: TensorInfo(f"{name}.{s}", (1,), scales if s == "scales" else "I32") for s in suffixes
    }
    names = (f"model.language_model.{path}", f"model.{path}", path)
    return CheckpointLinear(path, names, 64, 256, infos if files else None)


def layout(
    weight_format: WeightFormat, path: str, *suffixes: str, files: bool = True
) -> Layout | None:
    """Return the layout of a module."""
    return weight_format.layout(module(path, *suffixes, files=files))


INVALID_SETTINGS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (GPTQ, {"bits": 3}, "bits=3 is not allowed; allowed: 4, 8"),
    (GPTQ, {"bits": "4"}, "bits='4'"),
    (GPTQ, {"bits": True}, "bits=True"),
    (GPTQ, {"bits": None}, "bits=None"),
    (GPTQ, {"group_size": 48}, "group_size=48 is not allowed; allowed: -1, 32, 64, 128"),
    (GPTQ, {"group_size": 10**30}, "group_size="),
    (GPTQ, {"sym": "yes"}, "sym='yes'"),
    (GPTQ, {"desc_act": 1}, "desc_act=1"),
    (GPTQ, {"lm_head": []}, "lm_head="),
    (GPTQ, {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'.*'gptq', 'gptq_v2'"),
    (GPTQ, {"format": "bitblas"}, "format='bitblas'"),
    (GPTQ, {"pack_dtype": "int16"}, "pack_dtype='int16'"),
    (GPTQ, {"rotation": "hadamard"}, "rotation='hadamard'"),
    (GPTQ, {"is_marlin_format": True}, "is_marlin_format=True"),
    (GPTQ, {"dynamic": []}, "dynamic="),
    (GPTQ, {"dynamic": {"-:(": {}}}, r"dynamic='\('.*regular expressions"),
    (GPTQ, {"dynamic": {"a": 5}}, r"dynamic\['a'\]=5"),
    (GPTQ, {"dynamic": {"+:a": {"bits": 2}}}, r"dynamic\['\+:a'\].bits=2"),
    (GPTQ, {"modules_in_block_to_quantize": {"a": 1}}, "modules_in_block_to_quantize="),
    (GPTQ, {"modules_in_block_to_quantize": [5]}, "modules_in_block_to_quantize="),
    (AWQ, {"bits": 8}, "bits=8 is not allowed; allowed: 4"),
    (AWQ, {"bits": None, "w_bit": 3}, "w_bit=3"),
    (AWQ, {"group_size": None, "q_group_size": 7}, "q_group_size=7"),
    (AWQ, {"version": "gemv"}, "version='gemv'.*'gemm'"),
    (AWQ, {"zero_point": "x"}, "zero_point='x'"),
    (AWQ, {"modules_to_not_convert": 3}, "modules_to_not_convert=3"),
    (ROUND, {"bits": 2}, "bits=2"),
    (ROUND, {"data_type": "mx_fp"}, "data_type='mx_fp'"),
    (ROUND, {"packing_format": "auto_round:fp8"}, "packing_format='auto_round:fp8'"),
    (ROUND, {"packing_format": "auto_round:auto_awq", "bits": 8}, "bits=8.*4 with auto_round"),
    (ROUND, {"packing_format": "exllamav2"}, "packing_format='exllamav2'"),
    (ROUND, {"packing_format": 5}, "packing_format=5"),
    (ROUND, {"backend": "auto_round:marlin"}, "backend='auto_round:marlin'"),
    (ROUND, {"rotation_config": {"algorithm": "hadamard"}}, "rotation_config="),
    (ROUND, {"rotation_configs": [{"algorithm": "hadamard"}]}, "rotation_configs="),
    (ROUND, {"act_bits": "8"}, "act_bits='8'"),
    (ROUND, {"extra_config": {"a": {"super_bits": 6}}}, r"extra_config\['a'\].super_bits=6"),
    (ROUND, {"extra_config": {"a": {"rotation_config": {"b": 1}}}}, r"\['a'\].rotation_config="),
    (ROUND, {"extra_config": {"a": {"bits": 8, "data_type": "mx_fp"}}}, r"data_type='mx_fp'"),
    (ROUND, {"extra_config": {"a": {"bits": 3}}}, r"extra_config\['a'\].bits=3"),
    (ROUND, {"extra_config": {".*(": {"bits": 4}}}, "extra_config=.*regular expressions"),
    (ROUND, {"extra_config": [1]}, "extra_config="),
    (ROUND, {"block_name_to_quantize": 5}, "block_name_to_quantize=5"),
    ({}, {"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes'.*gptq, awq, auto-round"),
    ({}, {"quant_method": None}, "quant_method=None"),
    ({}, {"quant_method": ["gptq"]}, "quant_method="),
]


@pytest.mark.parametrize(
    ("base", "change", "received"), INVALID_SETTINGS, ids=lambda value: str(value)[:40]
)
def test_invalid_quantization_settings_are_refused(
    base: dict[str, Any], change: dict[str, Any], received: str
) -> None:
    with pytest.raises(CheckpointError, match=received) as caught:
        weight_format(base, **change)
    message = str(caught.value)
    assert message.startswith("config.json quantization_config.") and message.endswith(".")
    assert "allowed" in message and len(message) < 600 and "\n" not in message


def test_released_settings_without_effect_are_accepted() -> None:
    common = {"autoround_version": "0.9", "iters": 1000, "nsamples": 512, "seqlen": 2048}
    weight_format(ROUND, **common, amp=True, low_gpu_mem_usage=True, enable_quanted_input=False)
    weight_format(
        ROUND, extra_config={"a": {"bits": 16, "data_type": "bf16", "rotation_config": None}}
    )
    weight_format(
        GPTQ, damp_percent=0.1, static_groups=False, true_sequential=True, model_name_or_path=None
    )
    weight_format(
        GPTQ, meta={}, exllama_config={"version": 1}, format="gptq", method="gptq", dynamic=None
    )
    weight_format(
        AWQ, backend="autoawq", do_fuse=False, modules_to_not_convert=None, version="GEMM"
    )


FP8 = {"quant_method": "fp8"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": GROUP},
}


@pytest.mark.parametrize("settings", [GPTQ, AWQ, ROUND, FP8, MODELOPT, INT8])
def test_unread_quantization_setting_is_refused(settings: dict[str, Any]) -> None:
    message = "quantization_config.unheard_of='hadamard' is not allowed; .* null"
    with pytest.raises(CheckpointError, match=message):
        weight_format(settings, unheard_of="hadamard")
    for off in (None, False, [], {}):
        weight_format(settings, unheard_of=off)
    listed = BY_FORMAT[settings["quant_method"]]
    weight_format(settings, **dict.fromkeys(listed.keys() - READ_BY_SOME, "x"))
    assert all(listed.values())


FOREIGN = {
    "gptq": ("observer", "act_bits", "scale_dtype", "swap_weight_nibbles", "pre_quant_scale"),
    "awq": ("observer", "act_bits", "act_data_type", "pre_quant_scale"),
    "auto-round": ("exllama_config", "duo_scaling", "observer", "pre_quant_scale"),
    "fp8": ("damp_percent", "iters", "scale_dtype", "swap_weight_nibbles"),
    "modelopt": ("damp_percent", "has_zero_point", "scale_dtype", "swap_weight_nibbles"),
    "compressed-tensors": ("damp_percent", "iters", "checkpoint_weight_scale_layout"),
}
"""Settings that a format does not have, though another one may ignore them."""


@pytest.mark.parametrize("settings", [GPTQ, AWQ, ROUND, FP8, MODELOPT, INT8])
def test_settings_of_other_formats_are_refused(settings: dict[str, Any]) -> None:
    for name in FOREIGN[settings["quant_method"]]:
        with pytest.raises(CheckpointError, match=f"quantization_config.{name}='x'"):
            weight_format(settings, **{name: "x"})


def test_modelopt_config_groups_may_repeat_the_format() -> None:
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    groups = {"group_0": {"weights": weights, "input_activations": weights, "targets": ["Linear"]}}
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    producer = {"name": "modelopt", "version": "0.29.0"}
    settings = {"config_groups": groups, "kv_cache_scheme": scheme, "producer": producer}
    assert weight_format(MODELOPT, **settings).name == "modelopt-NVFP4"
    weight_format(MODELOPT, quant_algo="FP8", group_size=128, config_groups=groups)


def test_unread_nested_settings_are_refused() -> None:
    weights = {**GROUP["weights"], "smooth": 0.5}
    groups = {"group_0": {**GROUP, "weights": weights}}
    with pytest.raises(CheckpointError, match=r"config_groups\['group_0'\].weights.smooth=0.5"):
        weight_format(INT8, config_groups=groups)
    with pytest.raises(CheckpointError, match=r"config_groups\['group_0'\].smooth=0.5"):
        weight_format(INT8, config_groups={"group_0": {**GROUP, "smooth": 0.5}})
    with pytest.raises(CheckpointError, match=r"dynamic\['a'\].smooth=0.5"):
        weight_format(GPTQ, dynamic={"a": {"smooth": 0.5}})
    with pytest.raises(CheckpointError, match=r"extra_config\['a'\].smooth=0.5"):
        weight_format(ROUND, extra_config={"a": {"smooth": 0.5}})


DOWN = "layers.0.mlp.down_proj"
BLOCKS = "model.layers"


def label(value: object) -> str:
    """Return an id that is the same in every process, so that tests can be distributed."""
    return type(value).__name__ if isinstance(value, WeightFormat) else str(value)[:40]


CONTRADICTIONS: list[tuple[WeightFormat, tuple[str, ...], str]] = [
    (weight_format(GPTQ), (DOWN, *PACKED, "weight"), "has one or the other"),
    (
        weight_format(GPTQ, lm_head=True),
        ("lm_head", "weight"),
        "lm_head=True says that it is quantized",
    ),
    (
        weight_format(GPTQ, lm_head=False),
        ("lm_head", *PACKED),
        "lm_head=False says that it is not quantized",
    ),
    (
        weight_format(GPTQ, dynamic={"-:.*mlp.*": {}}),
        (DOWN, *PACKED),
        r"dynamic\['-:\.\*mlp\.\*'\] says that it is not quantized",
    ),
    (
        weight_format(GPTQ, modules_in_block_to_quantize=[["mlp.up_proj"], ["self_attn.q_proj"]]),
        (DOWN, *PACKED),
        "modules_in_block_to_quantize says that it is not quantized",
    ),
    (
        weight_format(AWQ, modules_to_not_convert=["mlp"]),
        (DOWN, *PACKED),
        r"modules_to_not_convert\['mlp'\] says that it is not quantized",
    ),
    (
        weight_format(ROUND, extra_config={f"model.{DOWN}": {"bits": 16}}),
        (DOWN, *PACKED),
        "says that it is not quantized",
    ),
    (
        weight_format(ROUND, extra_config={f"model.{DOWN}": {"bits": 8}}),
        (DOWN, "weight"),
        "says that it is quantized",
    ),
    (
        weight_format(ROUND, extra_config={".*down.*": {"data_type": "fp", "bits": 4}}),
        (DOWN, *PACKED),
        "says that it is not quantized",
    ),
    (
        weight_format(ROUND, block_name_to_quantize=["model.layers.1"]),
        (DOWN, *PACKED),
        "block_name_to_quantize says that it is not quantized",
    ),
]


@pytest.mark.parametrize(("actual", "read", "received"), CONTRADICTIONS, ids=label)
def test_settings_that_contradict_tensors_are_refused(
    actual: WeightFormat, read: tuple[str, ...], received: str
) -> None:
    with pytest.raises(CheckpointError, match=received) as caught:
        layout(actual, *read)
    message = str(caught.value)
    name = read[0] if read[0] == "lm_head" else f"model.language_model.{read[0]}"
    assert message.startswith(f"{read[0]} has the tensors {name}.") and message.endswith(".")


def test_tensors_decide_for_unlisted_modules() -> None:
    for actual in (weight_format(GPTQ), weight_format(AWQ), weight_format(ROUND)):
        for path in (DOWN, "mtp.layers.0.mlp.up_proj", "lm_head", "layers.1.linear_attn.in_proj_a"):
            assert layout(actual, path, "weight") is None
            assert layout(actual, path, *PACKED) is not None
            assert layout(actual, path) is None
        assert layout(actual, DOWN, "qweight") is not None
    wide = weight_format(GPTQ, dynamic={"+:.*layers.*": {"bits": 8}})
    assert layout(wide, DOWN, "weight") is None


@pytest.mark.parametrize(
    ("actual", "packed", "plain"),
    [
        (weight_format(GPTQ), (DOWN,), ("lm_head", "mtp.fc", "layers.0.linear_attn.in_proj_b")),
        (weight_format(GPTQ, lm_head=True), (DOWN, "lm_head"), ()),
        (
            weight_format(GPTQ, dynamic={"-:.*attn.*": {}, "lm_head": {}}),
            (DOWN,),
            ("layers.0.linear_attn.out_proj", "layers.3.self_attn.q_proj", "lm_head"),
        ),
        (
            weight_format(GPTQ, modules_in_block_to_quantize=["mlp.down_proj"]),
            (DOWN,),
            ("layers.0.mlp.up_proj",),
        ),
        (
            weight_format(AWQ, modules_to_not_convert=["attn"]),
            (DOWN,),
            ("layers.1.self_attn.q_proj", "lm_head"),
        ),
        (
            weight_format(
                ROUND, block_name_to_quantize=BLOCKS, extra_config={".*up": {"bits": 16}}
            ),
            (DOWN, "layers.0.linear_attn.in_proj_b"),
            ("layers.0.mlp.up_proj", "lm_head", "mtp.fc"),
        ),
        (
            weight_format(ROUND, extra_config={"lm_head": {"bits": 8}}),
            (DOWN, "lm_head"),
            ("mtp.fc",),
        ),
    ],
)
def test_settings_decide_without_files(
    actual: WeightFormat, packed: tuple[str, ...], plain: tuple[str, ...]
) -> None:
    assert all(layout(actual, path, files=False) is not None for path in packed)
    assert all(layout(actual, path, files=False) is None for path in plain)


def test_first_matching_rule_wins() -> None:
    rules = {"+:.*down.*": {"group_size": 64}, "-:.*mlp.*": {}, ".*": {"bits": 8}}
    actual = weight_format(GPTQ, dynamic=rules)
    options = [dict(one.options) for path in (DOWN, "layers.0.self_attn.q_proj")
               if (one := layout(actual, path, *PACKED))]  # fmt: skip
    assert [(one["bits"], one["group"]) for one in options] == [(4, 64), (8, 128)]
    assert layout(actual, "layers.0.mlp.up_proj", "weight") is None


def test_weights_with_different_layouts_are_not_fused() -> None:
    actual = weight_format(GPTQ, desc_act=True)
    first = layout(actual, "layers.0.self_attn.q_proj", *PACKED, "g_idx")
    second = layout(actual, "layers.0.self_attn.k_proj", *PACKED, "g_idx")
    assert first is not None and second is not None and first != second
    assert first.options == second.options and dict(first.options)["g_idx"]
    plain = weight_format(GPTQ)
    assert layout(plain, DOWN, *PACKED) == layout(plain, "layers.0.mlp.up_proj", *PACKED)
    other = plain.layout(module(DOWN, *PACKED, scales="BF16"))
    assert other != layout(plain, DOWN, *PACKED)
    assert other is not None and dict(other.options)["scale_dtype"] == torch.bfloat16
    with pytest.raises(CheckpointError, match="scales is F64, allowed: F16, BF16, F32"):
        plain.layout(module(DOWN, *PACKED, scales="F64"))
