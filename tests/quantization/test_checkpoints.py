"""Whole packed checkpoints against the plain ones of their values, and against transformers."""

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
from tests.quantization.disk import Codes, awq, draw, gptq, names_in, write
from tests.quantization.models import random_model, same_answers, tensors_of
from tests.tiny_model import CONFIG, LLAMA, QWEN2, QWEN3

ODD = {"hidden_size": 72, "intermediate_size": 88}
"""No multiples of a group, but of the 8 codes of a word."""


def seed_of(name: str) -> int:
    """A seed of its own for every module."""
    return sum(map(ord, name)) * 31 + len(name)


def test_gptq_with_bits_by_layer_and_plain_parts(tmp_path: Path) -> None:
    """The head too; of one fused layer q and v are packed and k is not; layer 1 has 8 bits."""
    oracle = random_model(tmp_path / "model", "Qwen3", QWEN3, **ODD)

    def pick(name: str, n: int, k: int) -> Codes | None:
        if names_in(name, ("embed_tokens", "layers.0.self_attn.k_proj", "layers.2.mlp")):
            return None
        if ".layers.1." in name:
            return draw(n, k, 8, -1, sym=False, seed=seed_of(name))
        return draw(n, k, 4, 32, seed=seed_of(name))

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
    pair = write(tmp_path, tensors_of(tmp_path / "model"), tmp_path / "model", settings, pick, lay)
    llm = same_answers(pair, oracle)
    assert "/weights-float32+gptq-int4-g32/" in llm.engine.numerics
    assert llm.engine.plan.quantization == "gptq-int4-g32"
    layers = llm.engine.explain()["layers"]
    packings = [one["storage_format"] for one in layers if one["storage_format"]]
    assert any("bits=8" in one for one in packings) and any("bits=4" in one for one in packings)
    mixed = next(one for one in layers if one["layer"] == "layers.0" and one["op"] == "linear")
    assert mixed["storage_format"].count("rows") == 2 and mixed["storage_format"].endswith(
        "when loaded"
    )


@pytest.mark.parametrize("group", [32, -1])
def test_gptq_in_order_of_activation(tmp_path: Path, group: int) -> None:
    """Every map has an order of its own, fused ones too; and biases."""
    biases = {"attention_bias": True, "mlp_bias": True}
    oracle = random_model(tmp_path / "model", "Llama", LLAMA, **ODD, **biases)

    def pick(name: str, n: int, k: int) -> Codes | None:
        if names_in(name, ("embed_tokens", "lm_head")):
            return None
        seed = seed_of(name)
        return draw(n, k, 4, group, sym=False, shuffle=group > 0, dtype=torch.bfloat16, seed=seed)

    settings: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": group}
    settings |= {"desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"}
    plain = tensors_of(tmp_path / "model")
    pair = write(tmp_path, plain, tmp_path / "model", settings, pick, partial(gptq, less=0))
    same_answers(pair, oracle)


def test_awq(tmp_path: Path) -> None:
    """With biases, a tied head, and a module that is not converted."""
    oracle = random_model(tmp_path / "model", "Qwen2", QWEN2, **ODD, use_sliding_window=False)

    def pick(name: str, n: int, k: int) -> Codes | None:
        if names_in(name, ("embed_tokens", "lm_head", "layers.1.self_attn")):
            return None
        return draw(n, k, 4, 64, sym=False, seed=seed_of(name))

    settings = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
    settings |= {"version": "gemm", "modules_to_not_convert": ["visual", "layers.1.self_attn"]}
    plain = tensors_of(tmp_path / "model")
    pair = write(tmp_path, plain, tmp_path / "model", settings, pick, awq)
    same_answers(pair, oracle)


def test_auto_round_on_a_hybrid(tmp_path: Path) -> None:
    """Names and patterns of extra_config, and a file of tensors beside the model's."""
    oracle = random_model(tmp_path / "model", "Qwen3_5", CONFIG)
    left = re.compile(r"embed_tokens|in_proj_[ab]$|conv1d|layers\.2\.mlp\.down_proj")

    def pick(name: str, n: int, k: int) -> Codes | None:
        if left.search(name):
            return None
        bits, group = (8, 64) if name.endswith("up_proj") else (4, 32)
        return draw(n, k, bits, group, seed=seed_of(name))

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
    plain = tensors_of(tmp_path / "model")
    lay = partial(gptq, g_idx=False)
    pair = write(tmp_path, plain, tmp_path / "model", settings, pick, lay)
    aside = {name: pair.tensors.pop(name) for name in list(pair.tensors) if "norm" in name}
    save_file(pair.tensors, pair.packed / "model.safetensors")
    save_file(aside, pair.packed / "model_extra_tensors.safetensors")
    llm = same_answers(pair, oracle)
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
def test_settings_in_a_file_of_their_own(
    tmp_path: Path, file: str, settings: dict[str, Any], name: str
) -> None:
    """As older tools write them; what config.json says goes first."""
    (tmp_path / file).write_text(json.dumps(settings))
    found = read_weight_format(Checkpoint(tmp_path, {"model_type": "llama"}).quantization())
    assert found is not None and found.name == name
    inner = {"quantization_config": {"quant_method": "fp8"}}
    for raw in (inner, {"text_config": inner}):
        found = read_weight_format(Checkpoint(tmp_path, raw).quantization())
        assert found is not None and found.name == "fp8"


LAYERS = {"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}}
MIXED = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS}}


def settings_of(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Those of a folder with this config.json."""
    found = Checkpoint(folder, {"model_type": "llama", **raw}).quantization()
    assert found is not None
    return found


def test_a_file_adds_what_config_json_does_not_say(tmp_path: Path) -> None:
    """ModelOpt's older mixed checkpoints have the map of layers in the file alone."""
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(MIXED))
    inner = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": None}
    found = settings_of(tmp_path, {"quantization_config": inner})
    assert found["quantized_layers"] == LAYERS
    assert read_weight_format(found) is not None
    other = {**inner, "quantized_layers": {"lm_head": {"quant_algo": "FP8"}}}
    assert settings_of(tmp_path, {"quantization_config": other})["quantized_layers"] != LAYERS
    plain = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    weight_format = read_weight_format(settings_of(tmp_path, {"quantization_config": plain}))
    assert weight_format is not None and weight_format.name == "modelopt-NVFP4"


def test_older_settings_of_modelopt_name_their_producer_alone(tmp_path: Path) -> None:
    inner = {"quant_algo": "FP8", "producer": {"name": "modelopt", "version": "0.29.0"}}
    raw = {"quantization_config": inner}
    assert settings_of(tmp_path, raw) == {"quant_method": "modelopt", **inner}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(FP8_ALL))
    found = read_weight_format(settings_of(tmp_path, raw))
    assert found is not None and found.name == "modelopt-FP8"
    with pytest.raises(CheckpointError, match="quant_method=None"):
        read_weight_format(settings_of(tmp_path, {"quantization_config": {"producer": "modelopt"}}))


def test_a_file_says_which_version_of_zero_points_config_json_means(tmp_path: Path) -> None:
    newer = {**PLAIN_GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}
    (tmp_path / "quantize_config.json").write_text(json.dumps(newer))
    inner = {"quant_method": "gptq", **PLAIN_GPTQ, "sym": False}
    found = settings_of(tmp_path, {"quantization_config": inner})
    assert found["checkpoint_format"] == "gptq_v2"
    awq_of = {"quant_method": "awq", "bits": 4}
    assert settings_of(tmp_path, {"quantization_config": awq_of}) == awq_of


def test_the_older_name_of_compressed_tensors_settings(tmp_path: Path) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
    inner = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {**group, "input_activations": None}},
    }
    found = read_weight_format(settings_of(tmp_path, {"compression_config": inner}))
    assert found is not None and found.name == "compressed-tensors-float-quantized"
    with pytest.raises(CheckpointError, match="config.json compression_config=5 is not allowed"):
        settings_of(tmp_path, {"compression_config": 5})
