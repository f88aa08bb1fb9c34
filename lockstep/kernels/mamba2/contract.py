"""mamba2_step and mamba2_chunk: the two laws of a Mamba-2 mixer.

They stand between its projections and its gated norm.

Both take the raw projections and do convolution, SiLU, time steps and recurrence (Dao and Gu,
Transformers are SSMs, 2024; layout of Nemotron-H checkpoints). Generated tokens go through the
token-by-token update; prompt tokens through the chunked (SSD) form on the absolute 64-token grid.
H heads of P channels, G groups of N state numbers; head h reads B and C of group h // (H / G).
C = H P + 2 G N channels, ordered [all x | all B | all C]. W window tokens, R conv kernel - 1.

In lockstep.kernels.recurrent's words B is a key, C a query, dt x what is written: HK = G, HV = H,
K = N and V = P.
"""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from lockstep.kernels.activations import softplus
from lockstep.kernels.mamba2.reference import _chunk, _ssm, heads_of
from lockstep.kernels.recurrent.convolution import causal_convolution
from lockstep.kernels.recurrent.history import next_folded, past_slots
from lockstep.kernels.recurrent.prompt_rows import prompt_rows
from lockstep.kernels.recurrent.state import RecurrentState, on_grid, replay
from lockstep.kernels.registry import op
from lockstep.step import GRID


@dataclass(frozen=True)
class Mamba2Weights:
    """A layer's own weights: conv [C, R + 1], conv_bias [C] or None; a_log, dt_bias, d [H] fp32.

    shortest, longest: between which a time step is held."""

    conv: Tensor
    conv_bias: Tensor | None
    a_log: Tensor
    dt_bias: Tensor
    d: Tensor
    shortest: float = 0.0
    longest: float = inf


def time_steps(dt: Tensor, weights: Mamba2Weights) -> tuple[Tensor, Tensor]:
    """Raw dt [..., H] -> the time step and g, the log decay [..., H], both fp32."""
    step = softplus(dt.float() + weights.dt_bias).clamp(weights.shortest, weights.longest)
    return step, step * -torch.exp(weights.a_log)


@op(writes=("state",))
def mamba2_step(
    mixed: Tensor,
    dt: Tensor,
    weights: Mamba2Weights,
    state: RecurrentState,
    slots: Tensor,
    starts: Tensor,
    folded: Tensor,
    flush: int = 1,
) -> Tensor:
    """Generated tokens: replay those that the state lacks and run the new window.

    mixed [S, Q, C], dt [S, Q, H] raw; slots [S] int64; starts [S] int32 the window's first
    positions; folded [S] int32: how many tokens the state holds, up to max(flush, grid) - 1 + W
    fewer than starts -> y [S, Q, H, P] fp32, before the gated norm.

    A state behind a multiple of its grid of tokens is rounded to its dtype, in replay and window
    alike; outputs are of the state before that. The state is read once, and written once where
    next_folded(starts, folded, flush, grid) is more than folded: as it is behind so many tokens. No
    bit depends on flush. Q <= W. Slots may repeat only if null; a null row's results are undefined.
    """
    rows, length = dt.shape[:2]
    out = torch.empty(rows, length, *state.u.shape[2:])
    ring_length = state.conv.shape[1]
    history = weights.conv.shape[1] - 1
    written = next_folded(starts, folded, flush, state.grid)
    places = zip(slots.tolist(), starts.tolist(), folded.tolist(), written.tolist(), strict=True)
    for row, (slot, start, held, due) in enumerate(places):
        s = replay(state, slot, state.recurrent[slot].float(), held, due)
        if due > held:
            state.recurrent[slot] = s
        s = replay(state, slot, s, due, start)
        past = state.conv[slot, past_slots(start, history, ring_length)]
        raw = torch.cat([past, mixed[row]])
        x, b, c = heads_of(causal_convolution(raw, weights.conv, weights.conv_bias), state)
        step, g = time_steps(dt[row], weights)
        decay = torch.exp(g)
        for t in range(length):
            u = x[t] * step[t, :, None]
            s, y = _ssm(s, b[t], c[t], u, decay[t])
            s = on_grid(state, s, start + t + 1)
            out[row, t] = y + weights.d[:, None] * x[t]
            state.conv[slot, (start + t) % ring_length] = mixed[row, t]
            ring_slot = (start + t) % state.k.shape[1]
            state.u[slot, ring_slot] = u
            state.k[slot, ring_slot] = b[t]
            state.decay[slot, ring_slot] = decay[t]
    return out


@op(writes=("state",))
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
    """Prompt tokens: the chunked form on the absolute grid; between chunks the state is fp32, with
    numbers of its dtype in memory.

    mixed [T, C], dt [T, H] raw; cu_seqlens [S+1], the rest [S], all int32
    -> y [T, H, P] fp32, before the gated norm. Row s begins at position starts[s], a multiple of
    the grid, from the state in slot state_src[s] (zeros where starts[s] == 0), and leaves its state
    in state_slots[s]; the state at its last grid point goes to snapshot_slots[s] where that is not
    0. A row without tokens, or whose state slot is 0, does nothing. A state is rounded to its dtype
    at every grid point and at the row's end.
    """
    out = torch.zeros(mixed.shape[0], *state.u.shape[2:])
    history = weights.conv.shape[1] - 1
    places = (cu_seqlens, starts, state_src, state_slots, snapshot_slots)
    for row in prompt_rows(mixed, state, history, *places):
        own = row.tokens
        x, b, c = heads_of(causal_convolution(row.raw, weights.conv, weights.conv_bias), state)
        step, g = time_steps(dt[own], weights)
        s = at_grid = row.before
        for first in range(0, len(x), GRID):
            chunk = slice(first, first + GRID)
            u = x[chunk] * step[chunk, :, None]
            y, s = _chunk(b[chunk], c[chunk], u, g[chunk], s)
            out[own][chunk] = y + weights.d[:, None] * x[chunk]
            s = state.rounded(s)
            if first + GRID == len(x) // GRID * GRID:
                at_grid = s
        row.keep(at_grid, s)
    return out
