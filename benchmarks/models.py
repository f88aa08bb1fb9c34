"""Folders with the config.json of real models, for benchmarks with random weights.

    python benchmarks/models.py FOLDER [--tokenizers]

FOLDER gets one folder for each model and weight format of the tables in RESULTS.md. Dimensions are
those of the published checkpoints, and so are the settings of each weight format: which modules are
quantized, in which groups, and which stay in bf16.
"""

import argparse
import json
from pathlib import Path
from typing import Any

CONTEXT = 262144
"""max_position_embeddings of Qwen3.6."""
VOCAB = 248320
"""Vocabulary size of Qwen3.6."""
END = 248044
"""End-of-text token of Qwen3.6."""
INTERVAL = 4
"""Every fourth layer of Qwen3.6 is attention; the others are Gated DeltaNet."""

QWEN3_6_27B = {
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
}
QWEN3_6_35B_A3B = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

NEMOTRON_3_SUPER = {
    "model_type": "nemotron_h",
    "attention_bias": False,
    "conv_kernel": 4,
    "head_dim": 128,
    "hidden_size": 4096,
    "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
    "EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "max_position_embeddings": CONTEXT,
    "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "mtp_hybrid_override_pattern": "*E",
    "n_groups": 8,
    "n_routed_experts": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 22,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 5.0,
    "ssm_state_size": 128,
    "time_step_limit": [0.0, float("inf")],
    "vocab_size": 131072,
}
KIMI_K2 = {
    "model_type": "kimi_k2",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 163840,
}

AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["lm_head", "in_proj_a", "in_proj_b", "mtp", "visual"],
}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
    "checkpoint_format": "gptq",
    "dynamic": {
        "-:.*lm_head.*": {},
        "-:.*attn.*": {},
        "-:.*shared_expert.*": {},
        "-:.*mlp\\.gate$": {},
        "-:.*mtp.*": {},
        "-:.*visual.*": {},
    },
}
"""Config of Qwen3.5-35B-A3B-GPTQ-Int4: only the routed experts are quantized."""
AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "packing_format": "auto_round:auto_gptq",
    "extra_config": {
        ".*(lm_head|in_proj_a|in_proj_b|mtp|visual).*": {"bits": 16},
    },
}
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 128,
            },
        },
    },
    "ignore": ["lm_head", "re:.*in_proj_[ab]", "re:mtp.*", "re:.*visual.*"],
}
"""Config of symmetric int4 as llm-compressor writes it. Scales have the model's dtype, bf16."""
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["lm_head", "*in_proj_a", "*in_proj_b", "mtp*", "*visual*"],
}
EXPERTS_NVFP4 = {
    **NVFP4,
    "ignore": [
        *("lm_head", "mtp*", "*shared_expert*", "*self_attn*", "*.gate", "*.mlp.gate_proj"),
        *("*.mlp.up_proj", "*.mlp.down_proj", "*.in_proj", "*.out_proj", "*_latent_proj"),
        *("*.mixer.q_proj", "*.mixer.k_proj", "*.mixer.v_proj", "*.mixer.o_proj"),
    ],
}
"""Config in which only the routed experts are quantized, most of a large mixture's weights.

Published files quantize some other modules too, in lists of thousands of names.
"""
NEMOTRON_AWQ = {**AWQ, "modules_to_not_convert": ["lm_head", "mtp", "conv1d", "mixer.gate"]}
BLOCK_PLAIN = ("in_proj_a", "in_proj_b", "mlp.gate", "mlp.shared_expert_gate")
"""Modules of a layer that FP8 checkpoints leave in bf16; a config lists their full names."""


def text_config(model: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a text model of the Qwen3.6 family."""
    layers = model["num_hidden_layers"]
    kinds = [
        "full_attention" if (layer + 1) % INTERVAL == 0 else "linear_attention"
        for layer in range(layers)
    ]
    return {
        **model,
        "vocab_size": VOCAB,
        "head_dim": 256,
        "layer_types": kinds,
        "full_attention_interval": INTERVAL,
        "attn_output_gate": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "bos_token_id": END,
        "eos_token_id": END,
        "dtype": "bfloat16",
    }


def blocks(model: dict[str, Any]) -> dict[str, Any]:
    """Return the FP8 config with blocks of 128 x 128 and the names of unquantized modules."""
    inner = ("linear_attn.", "linear_attn.", "", "")
    plain = ["lm_head", "model.embed_tokens", "mtp.fc"]
    for layer in range(model["num_hidden_layers"]):
        names = zip(inner, BLOCK_PLAIN, strict=True)
        plain += [f"model.layers.{layer}.{folder}{name}" for folder, name in names]
    plain += ["mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"]
    return {**FP8, "modules_to_not_convert": plain}


def folders() -> dict[str, dict[str, Any]]:
    """Return the config.json of each folder by its name."""
    dense = text_config(QWEN3_6_27B)
    sparse = text_config(QWEN3_6_35B_A3B)
    return {
        "27b": dense,
        "27b-int4": {**dense, "quantization_config": AWQ},
        "27b-auto-round": {**dense, "quantization_config": AUTO_ROUND},
        "27b-w4a16": {**dense, "quantization_config": W4A16},
        "27b-fp8": {**dense, "quantization_config": blocks(dense)},
        "27b-nvfp4": {**dense, "quantization_config": NVFP4},
        "35b-a3b": sparse,
        "35b-a3b-int4": {**sparse, "quantization_config": GPTQ},
        "35b-a3b-fp8": {**sparse, "quantization_config": blocks(sparse)},
        "nemotron-3-super-awq": {**NEMOTRON_3_SUPER, "quantization_config": NEMOTRON_AWQ},
        "nemotron-3-super-nvfp4": {**NEMOTRON_3_SUPER, "quantization_config": EXPERTS_NVFP4},
        "kimi-k2-nvfp4": {**KIMI_K2, "quantization_config": EXPERTS_NVFP4},
    }


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer with a word for each token id.

    A server streams the text of tokens, so that a model without a tokenizer streams nothing.
    """
    words = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(vocab_size)}}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    tokenizer |= {**empty, "model": {**words, "unk_token": "w0"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def main() -> None:
    """Write all folders."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="destination")
    parser.add_argument("--tokenizers", action="store_true", help="write tokenizers, for servers")
    args = parser.parse_args()
    for name, config in folders().items():
        folder = args.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        if args.tokenizers:
            write_tokenizer(folder, config["vocab_size"])


if __name__ == "__main__":
    main()
