"""A folder with a tiny model's config.json and tokenizer, for random weights (dummy)."""

import json
from pathlib import Path

from tests.text.tiny_tokenizer import make_folder

CONFIG = {
    "model_type": "qwen3_5_text",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "dtype": "bfloat16",
}

QWEN3 = {
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
    "max_window_layers": 3,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}

LLAMA = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

QWEN2 = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
    "max_window_layers": 3,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}

EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
}

QWEN3_MOE = {
    **QWEN3,
    **EXPERTS,
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 34,
    "max_position_embeddings": 4096,
    "num_attention_heads": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

HYBRID_MOE = {
    **{name: value for name, value in CONFIG.items() if name != "intermediate_size"},
    **EXPERTS,
    "model_type": "qwen3_5_moe_text",
    "shared_expert_intermediate_size": 14,
    "tie_word_embeddings": False,
}

NEXT = {
    **HYBRID_MOE,
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "intermediate_size": 64,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "mlp_only_layers": [2],
    "norm_topk_prob": True,
}

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 64,
    "kv_lora_rank": 40,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 22,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 5,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 5,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 28,
    "qk_rope_head_dim": 12,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 20,
}

KIMI = {
    **DEEPSEEK,
    "model_type": "kimi_k2",
    "first_k_dense_replace": 0,
    "n_group": 1,
    "n_shared_experts": 2,
    "num_attention_heads": 7,
    "num_key_value_heads": 7,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "tie_word_embeddings": True,
    "topk_group": 1,
}

NEMOTRON_H = {
    "model_type": "nemotron_h",
    "attention_bias": False,
    "conv_kernel": 4,
    "head_dim": 20,
    "hidden_size": 40,
    "hybrid_override_pattern": "M-M*ME*EM",
    "intermediate_size": 66,
    "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 10,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 6,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 22,
    "moe_latent_size": None,
    "moe_shared_expert_intermediate_size": 26,
    "n_group": 1,
    "n_groups": 2,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 5,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 1,
    "residual_in_fp32": False,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 12,
    "tie_word_embeddings": False,
    "time_step_min": 1e-30,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_conv_bias": True,
}

THREE_LAYERS: dict[str, object] = {"num_hidden_layers": 3, "full_attention_interval": 3}
"""Changes of a hybrid to two recurrent layers and one of attention, for tests of many steps."""
TWO_LAYERS: dict[str, object] = {"num_hidden_layers": 2, "full_attention_interval": 2}
"""Changes of a hybrid to one recurrent layer and one of attention, for tests of other parts."""


def make_model(folder: Path, base: dict[str, object] = CONFIG, **changes: object) -> Path:
    """Fill the folder; `changes` replace settings of `base`. Load it with load_format="dummy"."""
    folder.mkdir(exist_ok=True)
    make_folder(folder)
    size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]) + 64
    config = {"vocab_size": size, **base, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
