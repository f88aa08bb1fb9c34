"""A setting of config.json that no family code reads is refused by name, unless it is harmless."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import CheckpointError
from lockstep.models import architecture
from lockstep.models.ignored_settings import WITHOUT_EFFECT
from tests import tiny_model

FAMILIES = {
    "qwen3_5": tiny_model.CONFIG,
    "qwen3": tiny_model.QWEN3,
    "llama": tiny_model.LLAMA,
    "qwen2": tiny_model.QWEN2,
    "qwen3_moe": tiny_model.QWEN3_MOE,
    "mixtral": tiny_model.MIXTRAL,
    "qwen3_5_moe": tiny_model.HYBRID_MOE,
}
FOREIGN: dict[str, Any] = {
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "logit_softcap": 30.0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
    "logits_scaling": 8.0,
    "logit_scale": 0.0625,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "query_pre_attn_scalar": 256,
    "clip_qkv": 8.0,
    "use_parallel_residual": True,
    "parallel_attn": True,
    "qk_layernorm": True,
    "use_qk_norm": "layer",
    "qk_norm_type": "per_layer",
    "layer_norm_eps": 1e-5,
    "layernorm_zero_centered": True,
    "norm_after": True,
    "use_post_norm": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "activation_function": "gelu",
    "alibi": True,
    "position_embedding_type": "absolute",
    "no_rope_layers": [1, 1, 0],
    "no_rope_layer_interval": 4,
    "rotary_pct": 0.25,
    "rotary_dim": 64,
    "rotary_emb_base": 10000,
    "rope_local_base_freq": 10000.0,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "sliding_window_pattern": 6,
    "attention_sinks": 4,
    "use_sinks": True,
    "swiglu_limit": 7.0,
    "ssm_multipliers": [1.0, 2.0],
    "mup_enabled": True,
    "index_topk": 2048,
    "index_n_heads": 64,
    "num_kv_shared_layers": 10,
    "altup_num_inputs": 4,
    "hidden_size_per_layer_input": 256,
    "laurel_rank": 64,
    "activation_sparsity_pattern": [0.95],
    "moe_num_shared_experts": 2,
    "num_shared_experts": 1,
    "expert_bias": True,
    "router_scale": 2.5,
    "use_grouped_topk": True,
    "cross_attention_layers": [3],
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "multi_query": True,
    "q_norm_eps": 1e-5,
    "temperature": 0.3,
    "repetition_penalty": 1.3,
    "unheard_of": 1,
}


def read(raw: dict[str, Any]) -> Any:
    return architecture(raw["model_type"]).Config.read({"vocab_size": 96, **raw})


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_of_other_families_are_refused_by_name(family: str) -> None:
    read(FAMILIES[family])
    accepted = []
    for name, value in FOREIGN.items():
        for raw in (
            {**FAMILIES[family], name: value},
            {"model_type": FAMILIES[family]["model_type"], "text_config": FAMILIES[family]}
            | {name: value},
        ):
            try:
                read(raw)
            except CheckpointError as error:
                assert name in str(error) and "allowed" in str(error)
            else:
                accepted.append(name)
    assert accepted == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("off", [None, False, [], {}])
def test_a_setting_that_is_off_changes_nothing(family: str, off: Any) -> None:
    raw = {**FAMILIES[family], "unheard_of": off}
    assert read(raw) == read(FAMILIES[family])


def test_the_remedy_of_a_refusal_works() -> None:
    with pytest.raises(CheckpointError, match="hf_overrides: '..unheard_of.: null}'"):
        read({**tiny_model.QWEN3, "unheard_of": 5})


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_listed_as_without_effect_is_ignored(family: str) -> None:
    plain = FAMILIES[family]
    listed = {name: "x" for name in WITHOUT_EFFECT if name not in plain}
    listed.pop("text_config")
    listed.pop("max_position_embeddings", None)
    listed.pop("num_nextn_predict_layers")
    assert read({**listed, "image_token_id": 7, "_note": "x", **plain}) == read(plain)
    assert all(WITHOUT_EFFECT.values())


@pytest.mark.parametrize(
    "family",
    "llama qwen2 qwen3 qwen3_moe mixtral qwen3_next qwen3_5_text qwen3_5_moe_text nemotron_h "
    "deepseek_v3 qwen3_5 qwen3_5_moe".split(),
)
def test_the_defaults_of_transformers_are_known(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[family]()
    for raw in (config.to_dict(), json.loads(config.to_json_string(use_diff=False))):
        if family == "deepseek_v3":  # a file must say it: see deepseek_v3._read_mixture
            raw.setdefault("scoring_func", "sigmoid")
        raw["model_type"] = family
        architecture(family).Config.read(raw)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("default", "factor", 4.0),
        ("linear", "beta_fast", 32),
        ("llama3", "attention_factor", 1.2),
        ("yarn", "short_factor", [1.0]),
        ("yarn", "unheard_of", 1),
    ],
)
def test_rotary_settings_of_another_kind_are_refused(kind: str, name: str, value: Any) -> None:
    settings: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "default":
        settings.pop("factor")
    if kind == "llama3":
        settings |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    raw = {n: v for n, v in tiny_model.QWEN3.items() if not n.startswith("rope")}
    read({**raw, "rope_parameters": settings})
    with pytest.raises(CheckpointError, match=f"rope_parameters.{name}="):
        read({**raw, "rope_parameters": {**settings, name: value}})
