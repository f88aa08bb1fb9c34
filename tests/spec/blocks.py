"""DFlash draft models with random weights, and an independent forward pass written from the
paper."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tests.spec.drawn import RandomTensors
from tests.spec.heads import rms

EPS = 1e-5
THETA = 20000.0
HEADS = 6
KV_HEADS = 2
DIM = 12
INNER = 40
MASK = 7
BLOCK = 16
LAYERS = 2
Tensors = dict[str, Tensor]


def make_block_model(
    folder: Path, vocab: int, hidden: int, aux_layers: list[int], inner: bool = True, **changes: Any
) -> Tensors:
    """Write a draft model for a target of width `hidden`; return its tensors by name.

    aux_layers: target_layer_ids. inner: whether block_size is inside of dflash_config. changes:
    settings of config.json that differ.
    """
    folder.mkdir(exist_ok=True)
    settings = {"mask_token_id": MASK, "target_layer_ids": aux_layers}
    sizes = {"block_size": BLOCK}
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "dflash_config": settings | sizes if inner else settings,
        "head_dim": DIM,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "max_position_embeddings": 2048,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": vocab,
        **({} if inner else sizes),
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_model(hidden, len(aux_layers), config["head_dim"])
    save_file(tensors, folder / "model.safetensors")
    return tensors


def random_model(hidden: int, aux_layers: int, dim: int) -> Tensors:
    """Return random tensors with the names of the authors' files."""
    random_tensors = RandomTensors()
    matrix = random_tensors.matrix
    norm = random_tensors.norm
    tensors = {
        "fc.weight": matrix(hidden, aux_layers * hidden),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    for layer in range(LAYERS):
        tensors |= {
            f"layers.{layer}.input_layernorm.weight": norm(hidden),
            f"layers.{layer}.post_attention_layernorm.weight": norm(hidden),
            f"layers.{layer}.self_attn.q_proj.weight": matrix(HEADS * dim, hidden),
            f"layers.{layer}.self_attn.k_proj.weight": matrix(KV_HEADS * dim, hidden),
            f"layers.{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * dim, hidden),
            f"layers.{layer}.self_attn.o_proj.weight": matrix(hidden, HEADS * dim),
            f"layers.{layer}.self_attn.q_norm.weight": norm(dim),
            f"layers.{layer}.self_attn.k_norm.weight": norm(dim),
            f"layers.{layer}.mlp.gate_proj.weight": matrix(INNER, hidden),
            f"layers.{layer}.mlp.up_proj.weight": matrix(INNER, hidden),
            f"layers.{layer}.mlp.down_proj.weight": matrix(hidden, INNER),
        }
    return tensors


def drafts_of(
    model: Tensors,
    embedding: Tensor,
    head: Tensor,
    residuals: list[Tensor],
    last: int,
    count: int,
) -> list[int]:
    """Return `count` greedy drafts after the token `last`.

    residuals: auxiliary hidden states of the target [N, H], one per layer, of all tokens before
    `last`.
    """
    block = torch.tensor([[last] + [MASK] * count])
    starts = torch.tensor([len(residuals[0])])
    logits = logits_of(model, embedding, head, torch.cat(residuals, -1), block, starts)
    result: list[int] = logits[0].argmax(-1).tolist()
    return result


def logits_of(
    model: Tensors, embedding: Tensor, head: Tensor, joined: Tensor, blocks: Tensor, starts: Tensor
) -> Tensor:
    """Return the logits [A, B - 1, V] of all tokens but the first of independent blocks [A, B].

    joined [N, layers * H]: the target's auxiliary hidden states. starts [A]: position of each
    block's first token.
    """
    count, width = blocks.shape
    context = rms(F.linear(joined, model["fc.weight"]), model["hidden_norm.weight"])
    x = embedding[blocks.flatten()]
    positions = torch.cat(
        [torch.arange(len(context)), (starts[:, None] + torch.arange(width)).flatten()]
    )
    before = torch.arange(len(context)) < starts.repeat_interleave(width)[:, None]
    same_block = torch.block_diag(*[torch.ones(width, width)] * count).bool()
    mask = torch.cat([before, same_block], 1)
    for index in range(LAYERS):
        prefix = f"layers.{index}."
        part = {n.removeprefix(prefix): t for n, t in model.items() if n.startswith(prefix)}
        x = x + attention(part, rms(x, part["input_layernorm.weight"]), context, positions, mask)
        y = rms(x, part["post_attention_layernorm.weight"])
        gate = F.silu(F.linear(y, part["mlp.gate_proj.weight"]))
        up = F.linear(y, part["mlp.up_proj.weight"])
        x = x + F.linear(gate * up, part["mlp.down_proj.weight"])
    logits: Tensor = rms(x, model["norm.weight"]) @ head.T
    return logits.unflatten(0, (count, width))[:, 1:]


def attention(part: Tensors, x: Tensor, context: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """Return attention of x [A * B, H] over the context [N, H] and itself.

    positions [N + A * B]: of all keys. mask [A * B, N + A * B]: keys that each query reads.
    """
    both = torch.cat([context, x])

    def heads(name: str, y: Tensor) -> Tensor:
        return F.linear(y, part[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, DIM))

    q = rotated(rms(heads("q", x), part["self_attn.q_norm.weight"]), positions[len(context) :])
    k = rotated(rms(heads("k", both), part["self_attn.k_norm.weight"]), positions)
    v = heads("v", both)
    q, k, v = (y.transpose(0, 1) for y in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return F.linear(mixed.transpose(0, 1).flatten(1), part["self_attn.o_proj.weight"])


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Return x [N, heads, D] rotated by its positions, with halves as pairs."""
    half = DIM // 2
    angles = torch.outer(positions.float(), THETA ** (-torch.arange(half).float() / half))
    cos = angles.cos()[:, None]
    sin = angles.sin()[:, None]
    a = x[..., :half]
    b = x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
