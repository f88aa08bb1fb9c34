"""Whole quantized checkpoints equal the dense ones with their values, and transformers."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lockstep.errors import CheckpointError
from lockstep.models.checkpoint import Checkpoint
from lockstep.quantization import read_weight_format
from tests.quantization.disk import Codes, awq, gptq, names_in, random_codes, write
from tests.quantization.models import check_answers, load_tensors, random_model
from tests.tiny_model import CONFIG, LLAMA, QWEN2, QWEN3

ODD_SIZES = {"hidden_size": 72, "intermediate_size": 88}
"""No multiples of a group, but of the 8 codes of a word."""


def seed_of(name: str) -> int:
    """Return a distinct seed for every module."""
    return sum(map(ord, name)) * 31 + len(name)


def test_gptq_with_bits_per_layer_and_dense_modules(tmp_path: Path) -> None:
    """The head is quantized too; of one fused layer q and v are quantized and k is not; layer 1 has
    8 bits."""
    oracle = random_model(tmp_path / "model", "Qwen3", QWEN3, **ODD_SIZES)

    def pick(name: str, n: int, k: int) -> Codes | None:
        if names_in(name, ("embed_tokens", "layers.0.self_attn.k_proj", "layers.2.mlp")):
            return None
        if ".layers.1." in name:
            return random_codes(n, k, 8, -1, sym=False, seed=seed_of(name))
        return random_codes(n, k, 4, 32, seed=seed_of(name))

    settings = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "lm_head": True,
        "desc_act": False,
        "damp_percent": 0.05,
        "static_groups": False,
        "true_sequential": True,
        "meta": {"quantizer": ["gptqmodel:2.0.0"]},
        "dynamic": {
            "lm_head": {},
            r"-:.*\.0\.self_attn\.k_proj": {},
            r"-:model\.layers\.2\.mlp\..*": {},
            r"+:.*\.layers\.1\..*": {"bits": 8, "group_size": -1, "sym": False},
            r".*layers\.1.*": {"bits": 4},
        },
    }
    lay = partial(gptq, less=1)
    pair = write(
        tmp_path, load_tensors(tmp_path / "model"), tmp_path / "model", settings, pick, lay
    )
    llm = check_answers(pair, oracle)
    assert "/weights-float32+gptq-int4-g32/" in llm.engine.numerics
    assert llm.engine.plan.quantization == "gptq-int4-g32"
    layers = llm.engine.explain()["layers"]
    packings = [one["storage_format"] for one in layers if one["storage_format"]]
    assert any("bits=8" in one for one in packings) and any("bits=4" in one for one in packings)
    mixed = next(one for one in layers if one["layer"] == "layers.0" and one["op"] == "linear")
    assert mixed["storage_format"].count("rows") == 2 and mixed["storage_format"].endswith(
        "when loaded"
    )


@pytest.mark.slow
@pytest.mark.parametrize("group", [32, -1])
def test_gptq_with_activation_order(tmp_path: Path, group: int) -> None:
    """Every linear layer has its own order, fused ones too; with biases."""
    biases = {"attention_bias": True, "mlp_bias": True}
    oracle = random_model(tmp_path / "model", "Llama", LLAMA, **ODD_SIZES, **biases)

    def pick(name: str, n: int, k: int) -> Codes | None:
        if names_in(name, ("embed_tokens", "lm_head")):
            return None
        seed = seed_of(name)
        return random_codes(
            n, k, 4, group, sym=False, shuffle=group > 0, dtype=torch.bfloat16, seed=seed
        )

    settings: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": group}
    settings |= {"desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"}
    dense = load_tensors(tmp_path / "model")
    pair = write(tmp_path, dense, tmp_path / "model", settings, pick, partial(gptq, less=0))
    check_answers(pair, oracle)


def test_awq_checkpoint(tmp_path: Path) -> None:
    """With biases, a tied head, and a module that is not converted."""
    oracle = random_model(tmp_path / "model", "Qwen2", QWEN2, **ODD_SIZES, use_sliding_window=False)

    def pick(name: str, n: int, k: int) -> Codes | None:
        if names_in(name, ("embed_tokens", "lm_head", "layers.1.self_attn")):
            return None
        return random_codes(n, k, 4, 64, sym=False, seed=seed_of(name))

    settings = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
    settings |= {"version": "gemm", "modules_to_not_convert": ["visual", "layers.1.self_attn"]}
    dense = load_tensors(tmp_path / "model")
    pair = write(tmp_path, dense, tmp_path / "model", settings, pick, awq)
    check_answers(pair, oracle)


def test_auto_round_of_hybrid(tmp_path: Path) -> None:
    """With names and patterns in extra_config, and an extra file of tensors."""
    oracle = random_model(tmp_path / "model", "Qwen3_5", CONFIG)
    remaining = re.compile(r"embed_tokens|in_proj_[ab]$|conv1d|layers\.2\.mlp\.down_proj")

    def pick(name: str, n: int, k: int) -> Codes | None:
        if remaining.search(name):
            return None
        bits, group = (8, 64) if name.endswith("up_proj") else (4, 32)
        return random_codes(n, k, bits, group, seed=seed_of(name))

    settings = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "data_type": "int",
        "iters": 200,
        "autoround_version": "0.9.0",
        "packing_format": "auto_round:auto_gptq",
        "block_name_to_quantize": "model.layers,model.language_model.layers",
        "extra_config": {
            "model.layers.2.mlp.down_proj": {"bits": 16, "data_type": "fp"},
            r".*in_proj_[ab]$": {"bits": 16},
            r".*\.up_proj": {"bits": 8, "group_size": 64},
        },
    }
    dense = load_tensors(tmp_path / "model")
    lay = partial(gptq, g_idx=False)
    pair = write(tmp_path, dense, tmp_path / "model", settings, pick, lay)
    aside = {name: pair.tensors.pop(name) for name in list(pair.tensors) if "norm" in name}
    save_file(pair.tensors, pair.quantized / "model.safetensors")
    save_file(aside, pair.quantized / "model_extra_tensors.safetensors")
    llm = check_answers(pair, oracle)
    assert "+auto-round-int4-g32/" in llm.engine.numerics


PLAIN_GPTQ = {"bits": 4, "group_size": 128, "sym": True, "desc_act": False}
PLAIN_AWQ = {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}
FP8_ALL = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}


@pytest.mark.parametrize(
    ("file", "settings", "name"),
    [
        ("quantize_config.json", PLAIN_GPTQ, "gptq-int4-g128"),
        ("quant_config.json", PLAIN_AWQ, "awq-int4-g64"),
        ("hf_quant_config.json", FP8_ALL, "modelopt-FP8"),
    ],
)
def test_settings_in_separate_file(
    tmp_path: Path, file: str, settings: dict[str, Any], name: str
) -> None:
    """Older tools write such files; config.json has precedence."""
    (tmp_path / file).write_text(json.dumps(settings))
    actual = read_weight_format(Checkpoint(tmp_path, {"model_type": "llama"}).quantization())
    assert actual is not None and actual.name == name
    inner = {"quantization_config": {"quant_method": "fp8"}}
    for raw in (inner, {"text_config": inner}):
        actual = read_weight_format(Checkpoint(tmp_path, raw).quantization())
        assert actual is not None and actual.name == "fp8"


LAYERS = {"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}}
MIXED = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS}}


def settings_of(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the quantization settings of a folder with this config.json."""
    result = Checkpoint(folder, {"model_type": "llama", **raw}).quantization()
    assert result is not None
    return result


def test_separate_file_adds_missing_settings(tmp_path: Path) -> None:
    """ModelOpt's older mixed checkpoints have the map of layers only in the file."""
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(MIXED))
    inner = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": None}
    actual = settings_of(tmp_path, {"quantization_config": inner})
    assert actual["quantized_layers"] == LAYERS
    assert read_weight_format(actual) is not None
    other = {**inner, "quantized_layers": {"lm_head": {"quant_algo": "FP8"}}}
    assert settings_of(tmp_path, {"quantization_config": other})["quantized_layers"] != LAYERS
    dense = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    weight_format = read_weight_format(settings_of(tmp_path, {"quantization_config": dense}))
    assert weight_format is not None and weight_format.name == "modelopt-NVFP4"


def test_older_modelopt_settings_name_only_the_producer(tmp_path: Path) -> None:
    inner = {"quant_algo": "FP8", "producer": {"name": "modelopt", "version": "0.29.0"}}
    raw = {"quantization_config": inner}
    assert settings_of(tmp_path, raw) == {"quant_method": "modelopt", **inner}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(FP8_ALL))
    actual = read_weight_format(settings_of(tmp_path, raw))
    assert actual is not None and actual.name == "modelopt-FP8"
    with pytest.raises(CheckpointError, match="quant_method=None"):
        read_weight_format(settings_of(tmp_path, {"quantization_config": {"producer": "modelopt"}}))


def test_separate_file_gives_gptq_zero_point_version(tmp_path: Path) -> None:
    newer = {**PLAIN_GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}
    (tmp_path / "quantize_config.json").write_text(json.dumps(newer))
    inner = {"quant_method": "gptq", **PLAIN_GPTQ, "sym": False}
    actual = settings_of(tmp_path, {"quantization_config": inner})
    assert actual["checkpoint_format"] == "gptq_v2"
    awq_of = {"quant_method": "awq", "bits": 4}
    assert settings_of(tmp_path, {"quantization_config": awq_of}) == awq_of


def test_older_name_of_compressed_tensors_settings(tmp_path: Path) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
    inner = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {**group, "input_activations": None}},
    }
    actual = read_weight_format(settings_of(tmp_path, {"compression_config": inner}))
    assert actual is not None and actual.name == "compressed-tensors-float-quantized"
    with pytest.raises(CheckpointError, match="config.json compression_config=5 is not allowed"):
        settings_of(tmp_path, {"compression_config": 5})
