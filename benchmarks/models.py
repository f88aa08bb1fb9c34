"""Writes folders with the config.json of real models, for benchmarks with random weights.

    python benchmarks/models.py FOLDER

FOLDER gets one folder for each model and weight format of the tables in RESULTS.md. Dimensions are
those of the published checkpoints, and so are the settings of each weight format: which modules are
packed, in which groups, and which stay in bf16.
"""

import argparse
import json
from pathlib import Path
from typing import Any

CONTEXT = 262144
"""max_position_embeddings of Qwen3.6."""
VOCAB = 248320
END = 248044
INTERVAL = 4
"""Every fourth layer of Qwen3.6 is attention, the others are Gated DeltaNet."""

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
"""As Qwen3.5-35B-A3B-GPTQ-Int4: the routed experts alone are packed."""
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
BLOCK_PLAIN = ("in_proj_a", "in_proj_b", "mlp.gate", "mlp.shared_expert_gate")
"""Modules of a layer that FP8 checkpoints leave in bf16: their full names are listed."""


def text(model: dict[str, Any]) -> dict[str, Any]:
    """The config of a text model of the Qwen3.6 family."""
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
    """FP8 in blocks of 128 x 128, with the names of what is not packed."""
    inner = ("linear_attn.", "linear_attn.", "", "")
    plain = ["lm_head", "model.embed_tokens", "mtp.fc"]
    for layer in range(model["num_hidden_layers"]):
        names = zip(inner, BLOCK_PLAIN, strict=True)
        plain += [f"model.layers.{layer}.{folder}{name}" for folder, name in names]
    plain += ["mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"]
    return {**FP8, "modules_to_not_convert": plain}


def folders() -> dict[str, dict[str, Any]]:
    """Name -> config.json of each folder."""
    dense = text(QWEN3_6_27B)
    sparse = text(QWEN3_6_35B_A3B)
    return {
        "27b": dense,
        "27b-int4": {**dense, "quantization_config": AWQ},
        "27b-fp8": {**dense, "quantization_config": blocks(dense)},
        "27b-nvfp4": {**dense, "quantization_config": NVFP4},
        "35b-a3b": sparse,
        "35b-a3b-int4": {**sparse, "quantization_config": GPTQ},
        "35b-a3b-fp8": {**sparse, "quantization_config": blocks(sparse)},
    }


def main() -> None:
    """Writes them."""
    ask = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    ask.add_argument("folder", type=Path, help="gets a folder for each")
    given = ask.parse_args()
    for name, config in folders().items():
        folder = given.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    main()
