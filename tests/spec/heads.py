"""EAGLE-3 heads with random weights, and what one drafts, written from the paper."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tests.spec.drawn import Drawn

EPS = 1e-5
THETA = 10000.0
HEADS = 4
KV_HEADS = 2
DIM = 12
INNER = 40
KNOWN = 192
"""Tokens of a reduced head."""
Tensors = dict[str, Tensor]


def make_head(
    folder: Path, vocab: int, hidden: int, *, width: int = 0, known: int = KNOWN, **changes: Any
) -> Tensors:
    """Writes a head for a target of `hidden` into the folder, and returns its tensors by name.

    width: of the head, `hidden` if 0; then it reads the target's embedding. changes: of its config.
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
    taps = len(config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", (1, 2, 3)))
    tensors = random_head(vocab, hidden, width, known, taps)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": torch.rand(hidden) + 0.5 for i in range(taps)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = torch.rand(taps * hidden) + 0.5
    save_head(folder, tensors)
    return tensors


def random_head(vocab: int, hidden: int, width: int, known: int, taps: int) -> Tensors:
    """The tensors of the authors' files."""
    drawn = Drawn()
    matrix = drawn.matrix
    norm = drawn.norm
    tensors = {
        "fc.weight": matrix(width, taps * hidden),
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


def save_head(folder: Path, tensors: Tensors) -> None:
    """As published heads are saved."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


def drafts_of(
    head: Tensors,
    embedding: Tensor,
    residuals: list[Tensor],
    tokens: list[int],
    count: int,
    **flags: bool,
) -> list[int]:
    """`count` greedy drafts behind `tokens` [N + 1].

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
    given = tokens[1:]
    found: list[int] = []
    for _ in range(count):
        left, normed = layer(head, embedding[torch.tensor(given)], states, flags)
        recycled = normed if flags.get("norm_output") else left
        best = int((normed[-1] @ head["lm_head.weight"].T).argmax())
        found.append(best + int(head["d2t"][best]) if "d2t" in head else best)
        states = torch.cat([states, recycled[-1:]])
        given = [*given, found[-1]]
    return found


def layer(
    head: Tensors, embedded: Tensor, states: Tensor, flags: dict[str, bool]
) -> tuple[Tensor, Tensor]:
    """What the layer leaves, and its norm, both [N, W]."""
    part = {name.removeprefix("midlayer."): tensor for name, tensor in head.items()}
    hidden = rms(states, part["hidden_norm.weight"])
    residual = hidden if flags.get("norm_before_residual") else states
    x = torch.cat([rms(embedded, part["input_layernorm.weight"]), hidden], -1)

    def heads(name: str) -> Tensor:
        y = F.linear(x, part[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, DIM))
        return (rotated(y) if name != "v" else y).transpose(0, 1)

    seen = F.scaled_dot_product_attention(
        heads("q"), heads("k"), heads("v"), is_causal=True, enable_gqa=True
    )
    mixed = seen.transpose(0, 1).flatten(1)
    residual = residual + F.linear(mixed, part["self_attn.o_proj.weight"])
    y = rms(residual, part["post_attention_layernorm.weight"])
    gate = F.silu(F.linear(y, part["mlp.gate_proj.weight"]))
    up = F.linear(y, part["mlp.up_proj.weight"])
    left = residual + F.linear(gate * up, part["mlp.down_proj.weight"])
    return left, rms(left, head["norm.weight"])


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """x / rms(x) * weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotated(x: Tensor) -> Tensor:
    """x [N, heads, D] turned by the positions 0 to N - 1, halves against each other."""
    half = DIM // 2
    angles = torch.outer(
        torch.arange(len(x)).float(), THETA ** (-torch.arange(half).float() / half)
    )
    cos = angles.cos()[:, None]
    sin = angles.sin()[:, None]
    a = x[..., :half]
    b = x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
