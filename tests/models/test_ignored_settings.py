"""A setting of config.json that the family's code does not read is refused by name, unless it is
known to be harmless."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.errors import CheckpointError
from lockstep.models import architecture, dflash, eagle3
from lockstep.models.ignored_settings import WITHOUT_EFFECT
from tests import tiny_model
from tests.spec import blocks, heads

FAMILIES = {
    "qwen3_5": tiny_model.CONFIG,
    "qwen3": tiny_model.QWEN3,
    "llama": tiny_model.LLAMA,
    "qwen2": tiny_model.QWEN2,
    "qwen3_moe": tiny_model.QWEN3_MOE,
    "mixtral": tiny_model.MIXTRAL,
    "qwen3_5_moe": tiny_model.HYBRID_MOE,
    "qwen3_next": tiny_model.NEXT,
    "deepseek_v3": tiny_model.DEEPSEEK,
    "kimi_k2": tiny_model.KIMI,
    "nemotron_h": tiny_model.NEMOTRON_H,
}
"""A small config.json of each family; draft modules read their settings from it too."""
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "initializer_range": 0.02,
        "output_router_logits": False,
        "rope_scaling": None,
        "router_aux_loss_coef": 0.001,
        "transformers_version": "4.57.0.dev0",
        "use_cache": True,
        "use_sliding_window": False,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "bos_token_id": 0,
        "ep_size": 1,
        "initializer_range": 0.02,
        "moe_layer_freq": 1,
        "transformers_version": "4.33.1",
        "use_cache": True,
    },
    "kimi_k2": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "aux_loss_alpha": 0.001,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "bos_token_id": 163584,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "seq_aux": True,
        "transformers_version": "4.48.3",
    },
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
        "chunk_size": 128,
        "expand": 2,
        "hidden_dropout": 0.0,
        "initializer_range": 0.02,
        "mamba_proj_bias": False,
        "num_logits_to_keep": 1,
        "rescale_prenorm_residual": True,
        "sliding_window": None,
        "time_step_floor": 0.0001,
        "time_step_max": 0.1,
        "use_cache": True,
        "use_mamba_kernels": True,
    },
}
"""Further settings in config.json of released checkpoints."""
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


@pytest.mark.parametrize("family", PUBLISHED)
def test_settings_of_released_checkpoints_change_nothing(family: str) -> None:
    assert read({**FAMILIES[family], **PUBLISHED[family]}) == read(FAMILIES[family])


def test_unsupported_family_is_refused_by_name() -> None:
    """For example gpt-oss, whose attention sinks no family here has."""
    with pytest.raises(CheckpointError, match="model_type='gpt_oss' is not allowed"):
        read({**tiny_model.MIXTRAL, "model_type": "gpt_oss", "swiglu_limit": 7.0})


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
def test_disabled_unknown_setting_is_ignored(family: str, off: Any) -> None:
    raw = {**FAMILIES[family], "unheard_of": off}
    assert read(raw) == read(FAMILIES[family])


def test_refusal_names_hf_overrides_remedy() -> None:
    with pytest.raises(CheckpointError, match="hf_overrides: '..unheard_of.: null}'"):
        read({**tiny_model.QWEN3, "unheard_of": 5})


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_without_effect_are_ignored(family: str) -> None:
    plain = FAMILIES[family]
    listed = {name: "x" for name in WITHOUT_EFFECT if name not in plain}
    listed.pop("text_config")
    listed.pop("max_position_embeddings", None)
    listed.pop("num_nextn_predict_layers", None)
    assert read({**listed, "image_token_id": 7, "_note": "x", **plain}) == read(plain)
    assert all(WITHOUT_EFFECT.values())


@pytest.mark.parametrize(
    "family",
    "llama qwen2 qwen3 qwen3_moe mixtral qwen3_next qwen3_5_text qwen3_5_moe_text nemotron_h "
    "deepseek_v3 qwen3_5 qwen3_5_moe".split(),
)
def test_transformers_defaults_are_accepted(family: str, tmp_path: Path) -> None:
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
def test_rotary_settings_of_other_types_are_refused(kind: str, name: str, value: Any) -> None:
    settings: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "default":
        settings.pop("factor")
    if kind == "llama3":
        settings |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    raw = {n: v for n, v in tiny_model.QWEN3.items() if not n.startswith("rope")}
    read({**raw, "rope_parameters": settings})
    with pytest.raises(CheckpointError, match=f"rope_parameters.{name}="):
        read({**raw, "rope_parameters": {**settings, name: value}})


FOREIGN_TO_DRAFTERS: dict[str, Any] = {
    "final_logit_softcapping": 30.0,
    "residual_multiplier": 0.22,
    "query_pre_attn_scalar": 256,
    "use_sinks": True,
    "rotary_dim": 64,
    "parallel_heads": 3,
    "unheard_of": 1,
}
TARGET = SimpleNamespace(config=SimpleNamespace(hidden_size=40, vocab_size=96), blocks=[None] * 12)
"""Sizes of a target, for reading a drafter's settings."""


def read_head(folder: Path, **changes: Any) -> Any:
    heads.make_head(folder, 96, 40, known=48, **changes)
    return eagle3.Config.read(eagle3.HeadCheckpoint.at(folder), cast(Any, TARGET))


def read_block(folder: Path, **changes: Any) -> Any:
    blocks.make_block_model(folder, 96, 40, [1, 5, 9], **changes)
    return dflash.Config.read(dflash.BlockCheckpoint.at(folder), cast(Any, TARGET))


@pytest.mark.parametrize(
    ("read_drafter", "published"),
    [
        (
            read_head,
            {
                "architectures": ["Eagle3DraftModel"],
                "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
                "embed_requires_grad": False,
                "has_no_defaults_at_init": False,
                "speculators_config": {"algorithm": "eagle3"},
                "speculators_model_type": "eagle3",
                "speculators_version": "0.1.0.dev42",
                "norm_before_residual": True,
                "target_hidden_size": None,
            },
        ),
        (
            read_head,
            {
                "eagle_config": {
                    "eagle_aux_hidden_state_layer_ids": [1, 5, 9],
                    "use_aux_hidden_state": True,
                    "use_input_layernorm_in_first_layer": True,
                    "use_last_layernorm": True,
                    "use_mtp_layernorm": False,
                },
                "attention_dropout": 0.0,
                "initializer_range": 0.02,
                "mlp_bias": False,
                "n_routed_experts": 256,
                "pretraining_tp": 1,
                "sliding_window": 4096,
                "transformers_version": "4.53.1",
                "use_cache": True,
            },
        ),
        (
            read_block,
            {
                "attention_dropout": 0.0,
                "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
                "bos_token_id": 1,
                "initializer_range": 0.02,
                "layer_types": ["full_attention"] * blocks.LAYERS,
                "max_window_layers": 5,
                "num_target_layers": 12,
                "rope_scaling": None,
                "sliding_window": None,
                "transformers_version": "4.57.1",
                "use_cache": True,
                "use_sliding_window": False,
            },
        ),
    ],
    ids=["speculators", "eagle", "dflash"],
)
def test_settings_of_drafters_are_read_strictly(
    read_drafter: Callable[..., Any], published: dict[str, Any], tmp_path: Path
) -> None:
    read_drafter(tmp_path, **published)
    for name, value in FOREIGN_TO_DRAFTERS.items():
        with pytest.raises(CheckpointError, match=f"{name}=.*in the drafter's config.json"):
            read_drafter(tmp_path, **published, **{name: value})
