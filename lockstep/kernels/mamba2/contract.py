"""mamba2_step and mamba2_chunk: recurrent form and chunked form of Mamba-2.

Both ops take the raw projections and compute convolution, SiLU, time steps and recurrence; the
gated norm comes after them (Dao and Gu, Transformers are SSMs, 2024; layout of Nemotron-H
checkpoints). Generated tokens take the recurrent form, token by token. Prompt tokens take the
chunked form (SSD) on the absolute 64-token grid.

H heads of P channels, G groups of N state dims; head h reads B and C of group h // (H / G). C = H P
+ 2 G N channels, ordered [all x | all B | all C]. W: maximum window tokens. R: convolution
kernel - 1. In the names of lockstep.kernels.recurrent, B is the key, C the query and dt x is u: HK
= G, HV = H, K = N and V = P.
"""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from lockstep.kernels.activations import softplus
from lockstep.kernels.mamba2.reference import chunk_ssm, heads_of, ssm_step
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
class Mamba2Weights:
    """Weights of a layer: conv [C, R + 1], conv_bias [C] or None; a_log, dt_bias, d [H] fp32.

    dt_min, dt_max: limits of the time step.
    """

    conv: Tensor
    conv_bias: Tensor | None
    a_log: Tensor
    dt_bias: Tensor
    d: Tensor
    dt_min: float = 0.0
    dt_max: float = inf


def discretize(dt: Tensor, weights: Mamba2Weights) -> tuple[Tensor, Tensor]:
    """Compute the time step and the log decay g [..., H] in fp32 from raw dt [..., H]."""
    step = softplus(dt.float() + weights.dt_bias).clamp(weights.dt_min, weights.dt_max)
    return step, step * -torch.exp(weights.a_log)


@op(writes=("state",), needed_for="Mamba-2 layers")
def mamba2_step(
    mixed: Tensor,
    dt: Tensor,
    weights: Mamba2Weights,
    state: RecurrentState,
    slots: Tensor,
    starts: Tensor,
    folded: Tensor,
    flush: int = 1,
    committed: Tensor | None = None,
) -> Tensor:
    """Step generated tokens: replay the tokens that the state lacks, then run the new window.

    mixed [S, Q, C], dt [S, Q, H]: raw projections.
    slots [S] int64; starts [S] int32: first positions of the window. folded [S] int32: tokens
    that the state in memory includes, at most max(flush, grid) - 1 + W fewer than starts. Q <= W.
    flush: tokens after which the state is written; the history has those in between.

    A state at a multiple of its grid is rounded to its dtype, both in replay and in the window;
    outputs use the state before rounding. The state is read once. It is written once if
    next_folded(starts, folded, flush, grid) is larger than folded, as of that token. No bit depends
    on flush. Slots may repeat only if they are null; results of a null row are undefined.

    committed [S] int32, 1 .. Q: number of leading tokens of each window that are certain to stay,
    see gated_delta_step. None: any token of the window may be rejected.

    Returns y [S, Q, H, P] fp32, before the gated norm.
    """
    out = torch.zeros(*dt.shape[:2], *state.u.shape[2:])
    conv_len = state.conv.shape[1]
    history = weights.conv.shape[1] - 1
    written = folded_after(starts, folded, flush, state.grid, committed)
    lengths = torch.full_like(starts, mixed.shape[1]) if committed is None else committed
    rows = zip(*(x.tolist() for x in (slots, starts, folded, written, lengths)), strict=True)
    for row, (slot, start, first, target, length) in enumerate(rows):
        s = replay_and_write(state, slot, first, start, target)
        past = state.conv[slot, past_indices(start, history, conv_len)]
        raw = torch.cat([past, mixed[row, :length]])
        x, b, c = heads_of(causal_convolution(raw, weights.conv, weights.conv_bias), state)
        step, g = discretize(dt[row, :length], weights)
        decay = torch.exp(g)
        for t in range(length):
            u = x[t] * step[t, :, None]
            s, y = ssm_step(s, b[t], c[t], u, decay[t])
            s = round_on_grid(state, s, start + t + 1)
            out[row, t] = y + weights.d[:, None] * x[t]
            if start + t + 1 == target:
                state.recurrent[slot] = s
            if committed is None or t >= length - history:
                state.conv[slot, (start + t) % conv_len] = mixed[row, t]
            if committed is None or start + t >= target:
                index = (start + t) % state.k.shape[1]
                state.u[slot, index] = u
                state.k[slot, index] = b[t]
                state.decay[slot, index] = decay[t]
    return out


@op(writes=("state",), needed_for="Mamba-2 layers")
def mamba2_chunk(
    mixed: Tensor,
    dt: Tensor,
    weights: Mamba2Weights,
    state: RecurrentState,
    cu_seqlens: Tensor,
    starts: Tensor,
    state_src: Tensor,
    state_slots: Tensor,
    snapshot_slots: Tensor,
) -> Tensor:
    """Run prompt tokens in the chunked form on the absolute grid.

    mixed [T, C], dt [T, H]: raw projections.
    cu_seqlens [S+1]; starts, state_src, state_slots, snapshot_slots [S], all int32. Row s begins at
    position starts[s], a multiple of the grid. It resumes from the state in slot state_src[s], or
    from zeros where starts[s] is 0, and saves its state to state_slots[s]. The state at its last
    grid point is saved to snapshot_slots[s] where that is not 0. A row without tokens or with state
    slot 0 does nothing.

    The state is fp32 inside of a chunk. It is rounded to its dtype in memory after every chunk,
    i.e. at every grid point and at the row's end.

    Returns y [T, H, P] fp32, before the gated norm.
    """
    out = torch.zeros(mixed.shape[0], *state.u.shape[2:])
    history = weights.conv.shape[1] - 1
    row_arguments = (cu_seqlens, starts, state_src, state_slots, snapshot_slots)
    for row in prompt_rows(mixed, state, history, *row_arguments):
        span = row.tokens
        x, b, c = heads_of(causal_convolution(row.raw, weights.conv, weights.conv_bias), state)
        step, g = discretize(dt[span], weights)
        s = at_grid = row.before
        for first in range(0, len(x), GRID):
            chunk = slice(first, first + GRID)
            u = x[chunk] * step[chunk, :, None]
            y, s = chunk_ssm(b[chunk], c[chunk], u, g[chunk], s)
            out[span][chunk] = y + weights.d[:, None] * x[chunk]
            s = state.rounded(s)
            if first + GRID == len(x) // GRID * GRID:
                at_grid = s
        row.save(at_grid, s)
    return out
