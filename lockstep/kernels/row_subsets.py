"""Rows of an op's arguments: calls with some of the rows, for comparisons of bits between batches.

Rows describes an op once, by its per-row arguments. All subsets follow from it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.activations import relu2, silu_mul
from lockstep.kernels.attention import paged_attention
from lockstep.kernels.experts import experts
from lockstep.kernels.fp8_linear import (
    fp8_linear,
    quantize_add_rms_norm,
    quantize_rows,
    quantize_silu_mul,
)
from lockstep.kernels.gated_delta_rule import gated_delta_chunk, gated_delta_step
from lockstep.kernels.head_linear import head_linear
from lockstep.kernels.latent_attention import latent_attention, latent_rope_and_cache
from lockstep.kernels.linear import linear
from lockstep.kernels.lora import lora
from lockstep.kernels.mamba2 import mamba2_chunk, mamba2_step
from lockstep.kernels.norm import add_rms_norm, gated_group_norm, gated_rms_norm, rms_norm
from lockstep.kernels.registry import Op
from lockstep.kernels.rotary import rope_and_cache
from lockstep.kernels.route import route
from lockstep.kernels.sampling import sample

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """Per-row arguments of an op.

    tokens: arguments with one line per token, or per row if a row never has several.
    rows: arguments with one line per row of a ragged batch, whose bounds are cu_seqlens.
    indices: those of them that index the tensors of `storage` (slots of a state, tokens or pages of
    a cache); index 0 is null.
    spread: maximum absolute exponent that the op's values may be scaled by.
    numbers: further arguments to scale.
    """

    tokens: tuple[str, ...]
    rows: tuple[str, ...] = ()
    indices: tuple[str, ...] = ()
    storage: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    spread: int = 40

    @property
    def ragged(self) -> bool:
        return bool(self.rows)


STEP = ("slots", "starts", "folded", "committed")
CHUNK = ("starts", "state_src", "state_slots", "snapshot_slots")
CACHES = ("k_cache", "v_cache")
LATENTS = ("latents", "ropes")
ROWS: dict[Op, Rows] = {
    linear: Rows(("x",), numbers=("weight",)),
    quantize_rows: Rows(("x",)),
    quantize_silu_mul: Rows(("gate_up",)),
    quantize_add_rms_norm: Rows(("x", "delta"), numbers=("weight",)),
    fp8_linear: Rows(("x",)),
    lora: Rows(("y", "x", "adapter_ids"), numbers=("a", "b")),
    rms_norm: Rows(("x",), numbers=("weight",)),
    add_rms_norm: Rows(("x", "delta"), numbers=("weight",)),
    gated_rms_norm: Rows(("x", "gate"), numbers=("weight",)),
    gated_group_norm: Rows(("x", "gate"), numbers=("weight",)),
    silu_mul: Rows(("gate_up",)),
    relu2: Rows(("x",)),
    route: Rows(("logits", "shared", "shared_gate"), spread=4),
    experts: Rows(
        ("x", "ids", "weights", "shared", "shared_gate"), numbers=("up", "down"), spread=2
    ),
    rope_and_cache: Rows(
        ("qkv", "positions", "slot_mapping"), indices=("slot_mapping",), storage=CACHES
    ),
    paged_attention: Rows(
        ("q",), ("page_table", "starts"), ("page_table",), CACHES, numbers=CACHES
    ),
    head_linear: Rows(("x",), numbers=("weight",)),
    latent_rope_and_cache: Rows(
        ("q", "kv", "positions", "slot_mapping"), indices=("slot_mapping",), storage=LATENTS
    ),
    latent_attention: Rows(
        ("q_latent", "q_rope"), ("page_table", "starts"), ("page_table",), LATENTS, numbers=LATENTS
    ),
    gated_delta_step: Rows(("mixed", "z", "b", "a", *STEP), (), ("slots",), ("state",), spread=8),
    gated_delta_chunk: Rows(("mixed", "b", "a"), CHUNK, CHUNK[1:], ("state",), spread=8),
    mamba2_step: Rows(("mixed", "dt", *STEP), (), ("slots",), ("state",), spread=8),
    mamba2_chunk: Rows(("mixed", "dt"), CHUNK, CHUNK[1:], ("state",), spread=8),
    sample: Rows(("logits", "positions", "drafts", "row_ids", "allowed")),
}


def count_rows(op: Op, arguments: Arguments) -> int:
    """Return the number of rows of the arguments."""
    spec = ROWS[op]
    if spec.ragged:
        return len(arguments[spec.rows[0]])
    first = spec.tokens[0]
    return arguments[first].shape[row_dim(op, arguments, first)]


def take_rows(op: Op, arguments: Arguments, rows: list[int]) -> tuple[Arguments, Tensor]:
    """Return (the same call with only these rows, in this order; the indices of their lines in the
    result).

    What rows share (weights, storage) is shared with `arguments`.
    """
    spec = ROWS[op]
    picked = dict(arguments)
    lines = torch.tensor(rows, dtype=torch.int64)
    if spec.ragged:
        bounds = arguments["cu_seqlens"].tolist()
        spans = [range(bounds[row], bounds[row + 1]) for row in rows]
        picked |= {name: arguments[name][lines] for name in spec.rows}
        lengths = torch.tensor([0, *map(len, spans)])
        picked["cu_seqlens"] = lengths.cumsum(0).to(arguments["cu_seqlens"])
        if "query_len" in picked:
            picked["query_len"] = max(1, *map(len, spans))
        lines = torch.tensor([i for span in spans for i in span], dtype=torch.int64)
    for name in present_names(spec.tokens, arguments):
        picked[name] = arguments[name].index_select(row_dim(op, arguments, name), lines)
    return picked, lines


def present_names(names: tuple[str, ...], arguments: Arguments) -> list[str]:
    """Return the names whose arguments are not None."""
    return [name for name in names if arguments[name] is not None]


def row_dim(op: Op, arguments: Arguments, name: str) -> int:
    """Return the dimension of an argument's lines: 1 for partials [P, T, ...], which have it after
    their first."""
    if op is route or (op is experts and name == "shared"):
        return arguments[name].dim() - 2
    if op in (gated_delta_step, gated_delta_chunk) and name in ("b", "a"):
        return arguments[name].dim() - arguments["mixed"].dim()
    return int(name == "delta" and arguments[name].dim() > arguments["x"].dim())
