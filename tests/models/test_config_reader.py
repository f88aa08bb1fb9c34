"""config.json is read strictly: every setting that matters is present, of its type, and known."""

import json
from pathlib import Path

import pytest
import torch

from lockstep import EngineConfig
from lockstep.errors import CheckpointError
from lockstep.layers.build_context import BuildContext
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.config_reader import ConfigReader
from lockstep.models.loader import build_model
from lockstep.models.qwen3_5 import Config
from lockstep.worker.build import pick_dtype, pick_length
from tests.tiny_model import CONFIG

HYBRID = {**CONFIG, "vocab_size": 300}
ROPE = CONFIG["rope_parameters"]


def test_text_config_overrides_top_level() -> None:
    c = ConfigReader({"a": 1, "b": 2, "text_config": {"b": 3}})
    assert (c.get("a", int), c.get("b", int)) == (1, 3)


@pytest.mark.parametrize(
    ("value", "kind"),
    [("4", int), (True, int), (4.0, int), (True, float), ("1e-6", float), (1, bool), ({}, list)],
)
def test_mistyped_setting_is_refused(value: object, kind: type) -> None:
    with pytest.raises(CheckpointError, match=r"config.json x=.*allowed: " + kind.__name__):
        ConfigReader({"x": value}).get("x", kind)


def test_null_uses_the_default() -> None:
    c = ConfigReader({"x": None})
    assert c.get("x", int, 7) == c.size("x", 7) == 7
    with pytest.raises(CheckpointError, match="x=None"):
        c.get("x", int)


def test_integer_is_accepted_as_float() -> None:
    actual = ConfigReader({"x": 1000000}).get("x", float)
    assert actual == 1e6 and isinstance(actual, float)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_positive_refuses_other_numbers(value: float) -> None:
    with pytest.raises(CheckpointError, match="above 0"):
        ConfigReader({"x": value}).positive("x")


@pytest.mark.parametrize("value", [0, 1.0, None, "false", []])
def test_only_requires_exact_type(value: object) -> None:
    with pytest.raises(CheckpointError, match="allowed: False, 1"):
        ConfigReader({"x": value}).one_of("x", False, 1, default=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16'"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers=2.*0, 1"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True"),
        ({"layer_scale": True}, "layer_scale=True"),
        ({"layer_types": ["full_attention"] * 3}, "one for each of 4 layers"),
        ({"layer_types": ["full_attention"] * 3 + ["mamba"]}, "layer_types='mamba'"),
        ({"full_attention_interval": 0}, "full_attention_interval=0.*1 or more"),
        ({"full_attention_interval": 7}, "full_attention_interval=7.*at least one layer attends"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types=.*at least one layer attends"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3.*multiples"),
        ({"num_key_value_heads": 4}, "num_attention_heads=6.*multiples"),
        ({"hidden_size": -48}, "hidden_size=-48.*1 or more"),
        ({"hidden_size": 48.0}, "hidden_size=48.0.*int"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0.*above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'.*bool"),
        ({"rope_parameters": {**ROPE, "partial_rotary_factor": 1.5}}, "partial_rotary_factor=1.5"),
        ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.2}}, "partial_rotary_factor=0.2"),
        ({"rope_parameters": {**ROPE, "rope_type": "mrope"}}, "rope_type='mrope'.*'default'"),
        ({"rope_parameters": {**ROPE, "type": "mrope"}}, "rope_parameters.type='mrope'"),
        ({"rope_parameters": {"rope_type": "default"}}, "no rope_parameters.rope_theta"),
        ({"rope_theta": 5000.0}, "rope_theta=10000.0.*5000.0 as elsewhere"),
        ({"text_config": [1]}, "text_config=.*dict"),
    ],
)
def test_unsupported_settings_are_refused(changes: dict[str, object], message: str) -> None:
    Config.read(HYBRID)
    with pytest.raises(CheckpointError, match=message):
        Config.read({**HYBRID, **changes})


@pytest.mark.parametrize("inner", ["qwen3", "qwen3_5_moe_text"])
def test_text_config_of_other_architecture_is_refused(inner: str) -> None:
    raw = {"model_type": "qwen3_5", "text_config": {**HYBRID, "model_type": inner}}
    with pytest.raises(CheckpointError, match=f"model_type='{inner}'"):
        build_model(raw, BuildContext("cpu", torch.float32, 1, 64))


@pytest.mark.parametrize("text", ["[1]", "{", '"qwen3"'])
def test_config_without_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
        Checkpoint.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    assert Checkpoint.read(tmp_path).raw == json.loads(json.dumps(HYBRID))


def test_overrides_merge_by_key(tmp_path: Path) -> None:
    raw = {"model_type": "qwen3", "rope_parameters": {"rope_theta": 1.0, "rope_type": "yarn"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    changes = {"rope_parameters": {"rope_theta": 2.0}, "head_dim": 8}
    actual = Checkpoint.read(tmp_path, changes).raw
    assert actual["rope_parameters"] == {"rope_theta": 2.0, "rope_type": "yarn"}
    assert actual["head_dim"] == 8 and Checkpoint.read(tmp_path).raw == raw
    with pytest.raises(CheckpointError, match="model_type='none'"):
        Checkpoint.read(tmp_path, {"model_type": "none"})


def test_dtype_and_length_from_config() -> None:
    config = EngineConfig()
    raw = {"text_config": {"torch_dtype": "float16", "max_position_embeddings": 99}}
    assert str(pick_dtype(config, raw, "cuda")) == "torch.float16"
    assert str(pick_dtype(config, {}, "cuda")) == "torch.bfloat16"
    assert pick_length(config, raw) == 99
    with pytest.raises(CheckpointError, match="dtype='float8_e4m3fn'.*'bfloat16'"):
        pick_dtype(config, {"dtype": "float8_e4m3fn"}, "cuda")
    with pytest.raises(CheckpointError, match="no max_position_embeddings"):
        pick_length(config, {})
