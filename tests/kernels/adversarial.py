"""Inputs that try to make a row depend on others: any op's cases, made worse, cut and moved.

An op is described once, by the arguments that belong to its rows; the rest follows.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels import Op
from lockstep.kernels.activations import relu2, silu_mul
from lockstep.kernels.attention import paged_attention
from lockstep.kernels.experts import experts
from lockstep.kernels.formats.kv.cases import UNWRITTEN_BYTE
from lockstep.kernels.gated_delta_rule import gated_delta_chunk, gated_delta_step
from lockstep.kernels.head_linear import head_linear
from lockstep.kernels.latent_attention import latent_attention, latent_rope_and_cache
from lockstep.kernels.linear import linear
from lockstep.kernels.mamba2 import mamba2_chunk, mamba2_step
from lockstep.kernels.norm import add_rms_norm, gated_group_norm, gated_rms_norm, rms_norm
from lockstep.kernels.rotary import rope_and_cache
from lockstep.kernels.route import route
from lockstep.kernels.sampling import sample
from tests.kernels.backends import tensors_of

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """tokens: arguments with a line per token, or per row where no row has several. rows: with a
    line per row of a ragged batch, whose bounds are cu_seqlens. places: those of them that are
    indices of what `storage` names (a state's slots, a cache's tokens or pages); 0 is null.
    spread: the exponents that the op's numbers bear. numbers: further arguments to spread.
    """

    tokens: tuple[str, ...]
    rows: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    storage: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    spread: int = 40

    @property
    def ragged(self) -> bool:
        return bool(self.rows)


STEP = ("slots", "starts", "folded")
CHUNK = ("starts", "state_src", "state_slots", "snapshot_slots")
CACHES = ("k_cache", "v_cache")
LATENTS = ("latents", "ropes")
ROWS: dict[Op, Rows] = {
    linear: Rows(("x",), numbers=("weight",)),
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
        ("qkv", "positions", "slot_mapping"), places=("slot_mapping",), storage=CACHES
    ),
    paged_attention: Rows(
        ("q",), ("page_table", "starts"), ("page_table",), CACHES, numbers=CACHES
    ),
    head_linear: Rows(("x",), numbers=("weight",)),
    latent_rope_and_cache: Rows(
        ("q", "kv", "positions", "slot_mapping"), places=("slot_mapping",), storage=LATENTS
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


def count(op: Op, arguments: Arguments) -> int:
    """How many rows the arguments hold."""
    own = ROWS[op]
    if own.ragged:
        return len(arguments[own.rows[0]])
    first = own.tokens[0]
    return arguments[first].shape[lines_at(op, arguments, first)]


def take(op: Op, arguments: Arguments, rows: list[int]) -> tuple[Arguments, Tensor]:
    """The same call with these rows only, in this order; and the lines of its result that it gives.

    What rows share (weights, storage) is shared with `arguments`.
    """
    own = ROWS[op]
    picked = dict(arguments)
    lines = torch.tensor(rows, dtype=torch.int64)
    if own.ragged:
        bounds = arguments["cu_seqlens"].tolist()
        spans = [range(bounds[row], bounds[row + 1]) for row in rows]
        picked |= {name: arguments[name][lines] for name in own.rows}
        lengths = torch.tensor([0, *map(len, spans)])
        picked["cu_seqlens"] = lengths.cumsum(0).to(arguments["cu_seqlens"])
        if "query_len" in picked:
            picked["query_len"] = max(1, *map(len, spans))
        lines = torch.tensor([i for span in spans for i in span], dtype=torch.int64)
    for name in given(own.tokens, arguments):
        picked[name] = arguments[name].index_select(lines_at(op, arguments, name), lines)
    return picked, lines


def given(names: tuple[str, ...], arguments: Arguments) -> list[str]:
    """Those of the names whose arguments are not None."""
    return [name for name in names if arguments[name] is not None]


def lines_at(op: Op, arguments: Arguments, name: str) -> int:
    """The dim of an argument's lines: partials [P, T, ...] have it behind their first."""
    if op is route or (op is experts and name == "shared"):
        return arguments[name].dim() - 2
    return int(name == "delta" and arguments[name].dim() > arguments["x"].dim())


def repeated(op: Op, arguments: Arguments, times: int) -> list[int]:
    """All rows over and over, but for ops whose rows write: a place has one writer."""
    rows = list(range(count(op, arguments)))
    return rows * (1 if op.writes else times)


def worse(op: Op, arguments: Arguments, how: str, dtype: torch.dtype) -> Arguments:
    """The same call with other numbers: "spread" over 2^-40 .. 2^40, or so that sums "cancel"."""
    own = ROWS[op]
    changed = dict(arguments)
    generator = torch.Generator().manual_seed(7)
    bears = min(5, own.spread) if dtype == torch.float16 else own.spread
    for name in given((*own.tokens, *own.numbers), arguments):
        x = arguments[name]
        if isinstance(x, Tensor) and x.is_floating_point():
            exponents = torch.randint(-bears, bears + 1, x.shape, generator=generator)
            wide = x.float() * torch.exp2(exponents.float())
            if how == "cancel":
                wide = torch.where(torch.arange(x.shape[-1]) % 2 > 0, -wide.roll(1, -1), wide)
                wide = wide * (1 + (torch.rand(x.shape, generator=generator) < 0.1) * 2.0**-6)
            changed[name] = wide.to(x.dtype)
    return changed


def surrounded(op: Op, arguments: Arguments) -> Arguments:
    """Per-row arguments as views of longer ones: numbers that are NaN and indices that are 1
    stand before and behind."""
    own = ROWS[op]
    around = dict(arguments)
    for name in given((*own.tokens, *own.rows), arguments):
        x = arguments[name]
        dim = lines_at(op, arguments, name)
        shape = (*x.shape[:dim], x.shape[dim] + 8, *x.shape[dim + 1 :])
        longer = torch.full(shape, float("nan") if x.is_floating_point() else 1, dtype=x.dtype)
        around[name] = longer.narrow(dim, 4, x.shape[dim]).copy_(x)
    return around


def order(lines: int) -> Tensor:
    """A random order of a storage's lines, the null one first."""
    drawn = torch.randperm(lines - 1, generator=torch.Generator().manual_seed(11)) + 1
    return torch.cat([torch.zeros(1, dtype=torch.int64), drawn])


def moved(op: Op, arguments: Arguments) -> Arguments:
    """The same call on storage whose lines stand in random order; the null line is NaN."""
    own = ROWS[op]
    other = copy.deepcopy(arguments)
    for tensor in storage(op, other):
        tensor.copy_(tensor[order(len(tensor))])
        tensor[0] = float("nan") if tensor.is_floating_point() else UNWRITTEN_BYTE
    for name in own.places:
        first = storage(op, other)[0]
        size = first.shape[1] if op in (rope_and_cache, latent_rope_and_cache) else 1
        place = torch.argsort(order(len(first)))
        at = other[name].long()
        other[name] = (place[at // size] * size + at % size).to(other[name].dtype)
    return other


def storage(op: Op, arguments: Arguments) -> list[Tensor]:
    """The tensors whose lines are pages or slots."""
    return tensors_of(*(arguments[name] for name in ROWS[op].storage))


def at_home(op: Op, arguments: Arguments) -> list[Tensor]:
    """The storage of a moved call, back in the order of the call that was moved."""
    return [tensor[torch.argsort(order(len(tensor)))] for tensor in storage(op, arguments)]
