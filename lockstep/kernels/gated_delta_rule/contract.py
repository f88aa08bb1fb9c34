"""gated_delta_step and gated_delta_chunk: recurrent form and chunked form of Gated DeltaNet.

Both ops take the raw projections and compute gates, convolution, SiLU, l2 norm and recurrence
(Yang et al., Gated Delta Networks, 2024; layout of Qwen3.5 checkpoints). Generated tokens take the
recurrent form, token by token. Prompt tokens take the chunked form (WY representation, UT
transform) on the absolute 64-token grid.

HK key heads of K, HV value heads of V; value head h reads key head h // (HV / HK). C = 2 HK K + HV
V channels, ordered [all q | all k | all v]. W: maximum window tokens. R: convolution kernel - 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.activations import sigmoid, softplus
from lockstep.kernels.gated_delta_rule.reference import (
    chunk_delta_rule,
    delta_rule,
    heads_of,
)
from lockstep.kernels.linear import sum_partials
from lockstep.kernels.norm import gated_rms_norm
from lockstep.kernels.recurrent.convolution import causal_convolution
from lockstep.kernels.recurrent.history import folded_after, past_indices
from lockstep.kernels.recurrent.prompt_rows import prompt_rows
from lockstep.kernels.recurrent.state import (
    RecurrentState,
    replay_and_write,
    round_on_grid,
)
from lockstep.kernels.registry import op
from lockstep.step import GRID


@dataclass(frozen=True)
class GatedDeltaWeights:
    """Weights of a layer: conv [C, R + 1]; a_log, dt_bias [HV] fp32; norm [V], with its eps."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


def gates(b: Tensor, a: Tensor, weights: GatedDeltaWeights) -> tuple[Tensor, Tensor]:
    """Compute the log decay g and the write strength beta [..., HV] in fp32 from raw b, a."""
    g = -torch.exp(weights.a_log) * softplus(a.float() + weights.dt_bias)
    return g, sigmoid(b.float())


def add_partials(b: Tensor, a: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
    """Return b and a with mixed's dimensions and dtype, where they may be partials of a linear."""
    dims = mixed.dim()
    return sum_partials(b, mixed.dtype, dims), sum_partials(a, mixed.dtype, dims)


@op(writes=("state",), needed_for="Gated DeltaNet layers")
def gated_delta_step(
    mixed: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: RecurrentState,
    slots: Tensor,
    starts: Tensor,
    folded: Tensor,
    flush: int = 1,
    committed: Tensor | None = None,
) -> Tensor:
    """Step generated tokens: replay the tokens that the state lacks, then run the new window.

    mixed [S, Q, C], z [S, Q, HV, V], b, a [S, Q, HV]: raw projections. b and a may be partials
    [P, S, Q, HV] fp32 of a linear, P 2 or more: their tree_sum is rounded to mixed's dtype first.
    slots [S] int64; starts [S] int32: first positions of the window. folded [S] int32: tokens
    that the state in memory includes, at most max(flush, grid) - 1 + W fewer than starts. Q <= W.
    flush: tokens after which the state is written; the history has those in between.

    A state at a multiple of its grid is rounded to its dtype, both in replay and in the window;
    outputs use the state before rounding. The state is read once. It is written once if
    next_folded(starts, folded, flush, grid) is larger than folded, as of that token. No bit depends
    on flush. Slots may repeat only if they are null; results of a null row are undefined.

    committed [S] int32, 1 .. Q: number of leading tokens of each window that are certain to stay.
    Q may then exceed W. The tokens after them are padding: they may hold anything, and their
    results are 0. The state is written as of next_folded(starts + committed, folded, 1, grid) if
    that is larger than folded, inside of the window too. The histories take only what later steps
    read: raw inputs of the last R committed tokens, and u, k and decay of committed tokens that the
    state in memory lacks. The bits are those of windows of W tokens. None: any token of the window
    may be rejected.

    Returns [S, Q, HV, V] in z's dtype, after the gated norm.
    """
    out = torch.zeros_like(z)
    b, a = add_partials(b, a, mixed)
    conv_len = state.conv.shape[1]
    history = weights.conv.shape[1] - 1
    written = folded_after(starts, folded, flush, state.grid, committed)
    lengths = torch.full_like(starts, mixed.shape[1]) if committed is None else committed
    rows = zip(*(x.tolist() for x in (slots, starts, folded, written, lengths)), strict=True)
    for row, (slot, start, first, target, length) in enumerate(rows):
        s = replay_and_write(state, slot, first, start, target)
        past = state.conv[slot, past_indices(start, history, conv_len)]
        raw = torch.cat([past, mixed[row, :length]])
        q, k, v = heads_of(causal_convolution(raw, weights.conv), state)
        g, beta = gates(b[row, :length], a[row, :length], weights)
        for t in range(length):
            s, u, o = delta_rule(s, q[t], k[t], v[t], torch.exp(g[t]), beta[t])
            s = round_on_grid(state, s, start + t + 1)
            out[row, t] = gated_rms_norm(o, z[row, t], weights.norm, weights.eps)
            if start + t + 1 == target:
                state.recurrent[slot] = s
            if committed is None or t >= length - history:
                state.conv[slot, (start + t) % conv_len] = mixed[row, t]
            if committed is None or start + t >= target:
                index = (start + t) % state.k.shape[1]
                state.u[slot, index] = u
                state.k[slot, index] = k[t]
                state.decay[slot, index] = torch.exp(g[t])
    return out


@op(writes=("state",), needed_for="Gated DeltaNet layers")
def gated_delta_chunk(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: RecurrentState,
    cu_seqlens: Tensor,
    starts: Tensor,
    state_src: Tensor,
    state_slots: Tensor,
    snapshot_slots: Tensor,
) -> Tensor:
    """Run prompt tokens in the chunked form on the absolute grid.

    mixed [T, C], b, a [T, HV]: raw projections. b and a may be partials [P, T, HV] fp32: see
    gated_delta_step.
    cu_seqlens [S+1]; starts, state_src, state_slots, snapshot_slots [S], all int32. Row s begins at
    position starts[s], a multiple of the grid. It resumes from the state in slot state_src[s], or
    from zeros where starts[s] is 0, and saves its state to state_slots[s]. The state at its last
    grid point is saved to snapshot_slots[s] where that is not 0. A row without tokens or with state
    slot 0 does nothing.

    The state is fp32 inside of a chunk. It is rounded to its dtype in memory after every chunk,
    i.e. at every grid point and at the row's end.

    Returns o [T, HV, V] fp32, before the gated norm.
    """
    out = torch.zeros(mixed.shape[0], *state.u.shape[2:])
    b, a = add_partials(b, a, mixed)
    history = weights.conv.shape[1] - 1
    row_arguments = (cu_seqlens, starts, state_src, state_slots, snapshot_slots)
    for row in prompt_rows(mixed, state, history, *row_arguments):
        span = row.tokens
        q, k, v = heads_of(causal_convolution(row.raw, weights.conv), state)
        g, beta = gates(b[span], a[span], weights)
        s = at_grid = row.before
        for first in range(0, len(v), GRID):
            chunk = slice(first, first + GRID)
            o, s = chunk_delta_rule(q[chunk], k[chunk], v[chunk], g[chunk], beta[chunk], s)
            out[span][chunk] = o
            s = state.rounded(s)
            if first + GRID == len(v) // GRID * GRID:
                at_grid = s
        row.save(at_grid, s)
    return out
