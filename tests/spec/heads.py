"""EAGLE-3 heads with random weights, and an independent forward pass written from the paper."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tests.spec.drawn import RandomTensors

EPS = 1e-5
THETA = 10000.0
HEADS = 4
KV_HEADS = 2
DIM = 12
INNER = 40
DRAFT_VOCAB = 192
"""Tokens of a reduced head."""
LATENT: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "kv_lora_rank": 14,
    "model_type": "kimi_k2",
    "q_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
}
"""Settings of a head with latent attention, which add to or replace those of other heads."""
LATENT_EPS = 1e-6
"""Epsilon of the norms of latents."""
Tensors = dict[str, Tensor]


def make_head(
    folder: Path,
    vocab: int,
    hidden: int,
    *,
    width: int = 0,
    known: int = DRAFT_VOCAB,
    **changes: Any,
) -> Tensors:
    """Write a head for a target of width `hidden` into the folder; return its tensors by name.

    width: of the head, `hidden` if 0, in which case it uses the target's embedding. changes: of its
    config. The first layer is `midlayer`, as in the authors' files; further ones are `layers.1` and
    so on.
    """
    folder.mkdir(exist_ok=True)
    width = width or hidden
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": known,
        "head_dim": DIM,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": INNER,
        "max_position_embeddings": 2048,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": vocab,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    named = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    aux_layers = len(named or (1, 2, 3))
    tensors = random_head(vocab, hidden, width, known, aux_layers)
    for index in range(1, config["num_hidden_layers"]):
        tensors |= later_layer(index, width)
    if "kv_lora_rank" in config:
        tensors = with_latents(tensors, width)
    if config.get("attention_bias"):
        tensors |= biases(tensors)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": torch.rand(hidden) + 0.5 for i in range(aux_layers)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = torch.rand(aux_layers * hidden) + 0.5
    save_head(folder, tensors)
    return tensors


def random_head(vocab: int, hidden: int, width: int, known: int, aux_layers: int) -> Tensors:
    """Return random tensors with the names of the authors' files."""
    drawn = RandomTensors()
    matrix = drawn.matrix
    norm = drawn.norm
    tensors = {
        "fc.weight": matrix(width, aux_layers * hidden),
        "norm.weight": norm(width),
        "lm_head.weight": matrix(known, width),
        "midlayer.hidden_norm.weight": norm(width),
        "midlayer.input_layernorm.weight": norm(width),
        "midlayer.post_attention_layernorm.weight": norm(width),
        "midlayer.self_attn.q_proj.weight": matrix(HEADS * DIM, 2 * width),
        "midlayer.self_attn.k_proj.weight": matrix(KV_HEADS * DIM, 2 * width),
        "midlayer.self_attn.v_proj.weight": matrix(KV_HEADS * DIM, 2 * width),
        "midlayer.self_attn.o_proj.weight": matrix(width, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": matrix(INNER, width),
        "midlayer.mlp.up_proj.weight": matrix(INNER, width),
        "midlayer.mlp.down_proj.weight": matrix(width, INNER),
    }
    if width != hidden:
        tensors["embed_tokens.weight"] = matrix(vocab, width)
    if known < vocab:
        ids = torch.randperm(vocab, generator=drawn.generator)[:known].sort().values
        tensors["d2t"] = ids - torch.arange(known)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def later_layer(index: int, width: int) -> Tensors:
    """Return the tensors of a layer that reads only the hidden state."""
    drawn = RandomTensors(seed=5 + index)
    sizes = {
        "self_attn.q_proj": (HEADS * DIM, width),
        "self_attn.k_proj": (KV_HEADS * DIM, width),
        "self_attn.v_proj": (KV_HEADS * DIM, width),
        "self_attn.o_proj": (width, HEADS * DIM),
        "mlp.gate_proj": (INNER, width),
        "mlp.up_proj": (INNER, width),
        "mlp.down_proj": (width, INNER),
    }
    result = {f"layers.{index}.{name}.weight": drawn.matrix(*size) for name, size in sizes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        result[f"layers.{index}.{name}.weight"] = drawn.norm(width)
    return result


def biases(tensors: Tensors) -> Tensors:
    """Return biases of a head's attention."""
    result = {}
    for name, weight in tensors.items():
        if ".self_attn." in name:
            result[name.replace("weight", "bias")] = torch.randn(len(weight))
    return result


def with_latents(tensors: Tensors, width: int) -> Tensors:
    """Return the same head with latent attention, with the names of Kimi-K2's heads."""
    generator = torch.Generator().manual_seed(6)
    nope = LATENT["qk_nope_head_dim"]
    rope = LATENT["qk_rope_head_dim"]
    value = LATENT["v_head_dim"]
    kept = {name: t for name, t in tensors.items() if ".self_attn." not in name}
    mixers = {name.partition(".self_attn.")[0] for name in tensors if name not in kept}
    for mixer in sorted(mixers, reverse=True):
        inputs = 2 * width if mixer == "midlayer" else width
        sizes = {
            "q_a_proj": (LATENT["q_lora_rank"], inputs),
            "q_b_proj": (HEADS * (nope + rope), LATENT["q_lora_rank"]),
            "kv_a_proj_with_mqa": (LATENT["kv_lora_rank"] + rope, inputs),
            "kv_b_proj": (HEADS * (nope + value), LATENT["kv_lora_rank"]),
            "o_proj": (width, HEADS * value),
        }
        for name, (n, k) in sizes.items():
            matrix = torch.randn(n, k, generator=generator) * 1.5 * k**-0.5
            kept[f"{mixer}.self_attn.{name}.weight"] = matrix
        for name, size in (("q_a", LATENT["q_lora_rank"]), ("kv_a", LATENT["kv_lora_rank"])):
            norm = torch.rand(size, generator=generator) + 0.5
            kept[f"{mixer}.self_attn.{name}_layernorm.weight"] = norm
    return kept


def save_head(folder: Path, tensors: Tensors) -> None:
    """Save a head as published heads are."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


def drafts_of(
    head: Tensors,
    embedding: Tensor,
    residuals: list[Tensor],
    tokens: list[int],
    count: int,
    **flags: bool,
) -> list[int]:
    """Return `count` greedy drafts after `tokens` [N + 1].

    residuals: the target's at each tap, [N, H], of all tokens but the last one. flags:
    norm_before_residual, norm_before_fc, fc_norm, norm_output.
    """
    embedding = head.get("embed_tokens.weight", embedding)
    if flags.get("fc_norm"):
        residuals = [rms(r, head[f"fc_norm.{i}.weight"]) for i, r in enumerate(residuals)]
    joined = torch.cat(residuals, -1)
    if flags.get("norm_before_fc"):
        joined = rms(joined, head["input_norm.weight"])
    states = F.linear(joined, head["fc.weight"])
    arguments = tokens[1:]
    results: list[int] = []
    for _ in range(count):
        remaining, normed = layers(head, embedding[torch.tensor(arguments)], states, flags)
        recycled = normed if flags.get("norm_output") else remaining
        best = int((normed[-1] @ head["lm_head.weight"].T).argmax())
        results.append(best + int(head["d2t"][best]) if "d2t" in head else best)
        states = torch.cat([states, recycled[-1:]])
        arguments = [*arguments, results[-1]]
    return results


def layers(
    head: Tensors, embedded: Tensor, states: Tensor, flags: dict[str, bool]
) -> tuple[Tensor, Tensor]:
    """Return the layers' output and its norm, both [N, W]."""
    part = part_of(head, "midlayer.")
    hidden = rms(states, part["hidden_norm.weight"])
    residual = hidden if flags.get("norm_before_residual") else states
    x = torch.cat([rms(embedded, part["input_layernorm.weight"]), hidden], -1)
    remaining = layer(part, residual, x)
    index = 1
    while part := part_of(head, f"layers.{index}."):
        remaining = layer(part, remaining, rms(remaining, part["input_layernorm.weight"]))
        index += 1
    return remaining, rms(remaining, head["norm.weight"])


def part_of(head: Tensors, prefix: str) -> Tensors:
    """Return the tensors of a layer, by their names within it."""
    return {n.removeprefix(prefix): t for n, t in head.items() if n.startswith(prefix)}


def layer(part: Tensors, residual: Tensor, x: Tensor) -> Tensor:
    """Return a layer's output [N, W], whose attention reads x."""
    mixed = attention(part, x) if "self_attn.q_proj.weight" in part else latent_attention(part, x)
    out = "self_attn.o_proj"
    residual = residual + F.linear(mixed, part[f"{out}.weight"], part.get(f"{out}.bias"))
    y = rms(residual, part["post_attention_layernorm.weight"])
    gate = F.silu(F.linear(y, part["mlp.gate_proj.weight"]))
    up = F.linear(y, part["mlp.up_proj.weight"])
    return residual + F.linear(gate * up, part["mlp.down_proj.weight"])


def attention(part: Tensors, x: Tensor) -> Tensor:
    """Return Llama's attention over x, [N, 2 W] or [N, W], before o_proj."""

    def heads(name: str) -> Tensor:
        at = f"self_attn.{name}_proj"
        y = F.linear(x, part[f"{at}.weight"], part.get(f"{at}.bias")).unflatten(-1, (-1, DIM))
        return (rotated(y) if name != "v" else y).transpose(0, 1)

    seen = F.scaled_dot_product_attention(
        heads("q"), heads("k"), heads("v"), is_causal=True, enable_gqa=True
    )
    return seen.transpose(0, 1).flatten(1)


def latent_attention(part: Tensors, x: Tensor) -> Tensor:
    """Return latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) with expanded keys and
    values; adjacent rotary dims are pairs."""
    nope = LATENT["qk_nope_head_dim"]
    mine = {n.removeprefix("self_attn."): t for n, t in part.items() if n.startswith("self_attn.")}
    q = rms(F.linear(x, mine["q_a_proj.weight"]), mine["q_a_layernorm.weight"], LATENT_EPS)
    q = F.linear(q, mine["q_b_proj.weight"]).unflatten(-1, (HEADS, -1))
    both = F.linear(x, mine["kv_a_proj_with_mqa.weight"])
    latent = rms(both[:, : LATENT["kv_lora_rank"]], mine["kv_a_layernorm.weight"], LATENT_EPS)
    shared = rotated(halves(both[:, None, LATENT["kv_lora_rank"] :]))
    kv = F.linear(latent, mine["kv_b_proj.weight"]).unflatten(-1, (HEADS, -1))
    keys = torch.cat([kv[..., :nope], shared.expand(-1, HEADS, -1)], -1)
    queries = torch.cat([q[..., :nope], rotated(halves(q[..., nope:]))], -1)
    seen = F.scaled_dot_product_attention(
        queries.transpose(0, 1),
        keys.transpose(0, 1),
        kv[..., nope:].transpose(0, 1),
        is_causal=True,
    )
    return seen.transpose(0, 1).flatten(1)


def halves(x: Tensor) -> Tensor:
    """Return the even elements, then the odd ones."""
    return torch.cat([x[..., ::2], x[..., 1::2]], -1)


def rms(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    """Return x / rms(x) * weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor) -> Tensor:
    """Return x [N, heads, D] rotated by the positions 0 to N - 1, with halves as pairs."""
    half = x.shape[-1] // 2
    angles = torch.outer(
        torch.arange(len(x)).float(), THETA ** (-torch.arange(half).float() / half)
    )
    cos = angles.cos()[:, None]
    sin = angles.sin()[:, None]
    a = x[..., :half]
    b = x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
