"""Write GGUF files of small transformers models with the gguf package, as llama.cpp's converter
does: its tensor names, row orders, and the values that its kernels need."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants
from safetensors.numpy import load_file

ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
"""model_type of config.json -> general.architecture."""
Array = np.ndarray[Any, Any]
Text = dict[str, Any]


def write_gguf(
    folder: Path,
    path: Path,
    kind: Callable[[str], str] = lambda name: "F32",
    text: Text | None = None,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> dict[str, Array]:
    """Convert a folder of transformers.

    kind: the type of a matrix by its name. text: metadata of the tokenizer. change: writes more.
    Returns the tensors by the names of the file, as they were before they were quantized.
    """
    config = json.loads((folder / "config.json").read_text())
    config |= config.get("text_config", {})
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    write_settings(writer, config)
    for key, value in (text or {}).items():
        write_value(writer, f"tokenizer.{key}", value)
    change(writer)
    tensors = dict(converted_tensors(config, architecture, load_weights(folder)))
    for name, array in tensors.items():
        number = GGMLQuantizationType[kind(name) if array.ndim > 1 else "F32"]
        data = np.ascontiguousarray(array.astype(np.float32))
        writer.add_tensor(name, quants.quantize(data, number), raw_dtype=number)
    finish(writer)
    return tensors


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Write one entry of metadata, with the type that llama.cpp's converter gives it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def load_weights(folder: Path) -> dict[str, Array]:
    """Return all tensors of a folder."""
    return {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }


def write_settings(w: gguf.GGUFWriter, c: dict[str, Any]) -> None:
    """Write the metadata of config.json's settings."""
    rope = {"rope_theta": c.get("rope_theta"), **(c.get("rope_parameters") or {})}
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    drafting = c.get("mtp_num_hidden_layers", 0)
    w.add_block_count(c["num_hidden_layers"] + drafting)
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    if c.get("intermediate_size") is not None:
        w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(rope["rope_theta"])
    w.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    w.add_file_type(0)
    if rope.get("rope_type") == "yarn":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(rope["factor"])
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "linear":
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(rope["factor"])
    if experts := c.get("num_experts") or c.get("num_local_experts"):
        w.add_expert_count(experts)
        w.add_expert_used_count(c["num_experts_per_tok"])
    if "moe_intermediate_size" in c:
        w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    if c.get("shared_expert_intermediate_size"):
        w.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    if "linear_num_key_heads" in c:
        w.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
        w.add_ssm_state_size(c["linear_key_head_dim"])
        w.add_ssm_group_count(c["linear_num_key_heads"])
        w.add_ssm_time_step_rank(c["linear_num_value_heads"])
        w.add_ssm_inner_size(c["linear_value_head_dim"] * c["linear_num_value_heads"])
        w.add_full_attention_interval(c["layer_types"].index("full_attention") + 1)
    if drafting:
        w.add_nextn_predict_layers(drafting)


def converted_tensors(
    c: dict[str, Any], architecture: str, weights: dict[str, Array]
) -> Iterator[tuple[str, Array]]:
    """Yield the tensors by the names and in the layouts of llama.cpp."""
    layers = c["num_hidden_layers"]
    arch = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(arch, layers + c.get("mtp_num_hidden_layers", 0))
    hybrid = "linear_num_key_heads" in c
    for name, weight in join_experts(named_as_layers(weights, layers)).items():
        if architecture == "llama":
            weight = permute_rotary(c, name, weight)
        elif hybrid:
            name, weight = hybrid_layout(c, name, weight)
        if name.endswith("in_proj_qkvz.weight"):
            block = name.split(".")[2]
            (qkv, z) = split_grouped_projection(c, weight)
            yield f"blk.{block}.attn_qkv.weight", qkv
            yield f"blk.{block}.attn_gate.weight", z
            continue
        # The gguf package 0.19 does not list a draft module's tensors for these architectures.
        if ".nextn." in name:
            yield name, weight
            continue
        result = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert result is not None, name
        yield result, weight
    rope = c.get("rope_parameters") or {}
    if architecture == "llama" and rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_divisors(c, rope)


def named_as_layers(weights: dict[str, Array], layers: int) -> dict[str, Array]:
    """Give the tensors of an MTP module the names of a layer after the last."""
    modules = {
        "mtp.fc.": f"blk.{layers}.nextn.eh_proj.",
        "mtp.pre_fc_norm_embedding.": f"blk.{layers}.nextn.enorm.",
        "mtp.pre_fc_norm_hidden.": f"blk.{layers}.nextn.hnorm.",
        "mtp.norm.": f"blk.{layers}.nextn.shared_head_norm.",
        "mtp.layers.0.": f"model.layers.{layers}.",
    }
    result = {}
    for name, weight in weights.items():
        for begin, other in modules.items():
            if name.startswith(begin):
                name = other + name.removeprefix(begin)
        result[name] = weight
    return result


def join_experts(weights: dict[str, Array]) -> dict[str, Array]:
    """Join the experts of a layer."""
    result: dict[str, Array] = {}
    experts: dict[str, list[Array]] = {}
    for name, weight in weights.items():
        before, inside, after = name.partition(".experts.")
        if not inside:
            result[name] = weight
        elif after == "gate_up_proj":
            gate, up = np.split(weight, 2, axis=1)
            result[f"{before}.experts.gate_proj.weight"] = gate
            result[f"{before}.experts.up_proj.weight"] = up
        elif after == "down_proj":
            result[f"{name}.weight"] = weight
        else:
            number, _, module = after.partition(".")
            full = f"{before}.experts.{module}"
            if before.endswith("block_sparse_moe"):
                full = f"{before.removesuffix('block_sparse_moe')}feed_forward.experts.{module}"
                full = full.removeprefix("model.")
            experts.setdefault(full, []).insert(int(number), weight)
    return result | {name: np.stack(parts) for name, parts in experts.items()}


def permute_rotary(c: dict[str, Any], name: str, weight: Array) -> Array:
    """Interleave the two halves of each rotary pair."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for module, setting in heads.items():
        if module in name:
            parts = weight.reshape(c[setting], 2, len(weight) // c[setting] // 2, *weight.shape[1:])
            return parts.swapaxes(1, 2).reshape(weight.shape)
    return weight


def llama3_divisors(c: dict[str, Any], rope: dict[str, Any]) -> Array:
    """Return the divisor of each pair's frequency under llama3 scaling."""
    width = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, width, 2) / width)
    turns = rope["original_max_position_embeddings"] / waves
    smooth = (turns - rope["low_freq_factor"]) / (
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    smooth = smooth.clip(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def hybrid_layout(c: dict[str, Any], name: str, weight: Array) -> tuple[str, Array]:
    """Convert one tensor of a hybrid."""
    if c["model_type"] != "qwen3_next" and ".linear_attn." in name:
        weight = tile_value_heads(c, name, weight)
    if name.endswith(".A_log"):
        weight = -np.exp(weight)
    elif name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    elif "conv1d" in name:
        weight = weight.squeeze()
    elif name.endswith("norm.weight") and ".linear_attn." not in name:
        weight = weight + 1
    return name, weight


def tile_value_heads(c: dict[str, Any], name: str, weight: Array) -> Array:
    """Order value heads by their index within a key head: the first of every key head, then the
    second, and so on."""
    keys = c["linear_num_key_heads"]
    item = c["linear_num_value_heads"] // keys
    width = c["linear_value_head_dim"]
    before = 2 * keys * c["linear_key_head_dim"]

    def order(count: int, first: int = 0) -> Array:
        rows = np.arange(keys * item * count).reshape(keys, item, count).swapaxes(0, 1)
        return np.concatenate([np.arange(first), first + rows.flatten()])

    if "in_proj_qkv" in name or "conv1d" in name:
        return weight[order(width, before)]
    if "in_proj_z" in name:
        return weight[order(width)]
    if "out_proj" in name:
        return weight[:, order(width)]
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return weight[order(1)]
    return weight


def split_grouped_projection(c: dict[str, Any], weight: Array) -> tuple[Array, Array]:
    """Split Qwen3-Next's projection, which is grouped by key head, into q, k, v of all heads, and z
    of all heads."""
    keys = c["linear_num_key_heads"]
    width = c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] // keys * c["linear_value_head_dim"]
    groups = weight.reshape(keys, 2 * (width + values), -1)
    parts = np.split(groups, [width, 2 * width, 2 * width + values], axis=1)
    flat = [part.reshape(-1, weight.shape[-1]) for part in parts]
    return np.concatenate(flat[:3]), flat[3]
