"""gated_delta_step and gated_delta_chunk: the two laws of a Gated DeltaNet mixer.

Both take the raw projections and do gates, convolution, SiLU, l2 norm and recurrence (Yang et al.,
Gated Delta Networks, 2024; layout of Qwen3.5 checkpoints). Generated tokens go through the
token-by-token update; prompt tokens through the chunked (WY) form on the absolute 64-token grid.
HK key heads of K, HV value heads of V; value head h reads key head h // (HV / HK).
C = 2 HK K + HV V channels, ordered [all q | all k | all v]. W window tokens, R conv kernel - 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.activations import sigmoid, softplus
from lockstep.kernels.gated_delta_rule.reference import (
    _chunk,
    _delta_rule,
    heads_of,
)
from lockstep.kernels.norm import gated_rms_norm
from lockstep.kernels.recurrent.convolution import causal_convolution
from lockstep.kernels.recurrent.history import next_folded, past_slots
from lockstep.kernels.recurrent.prompt_rows import prompt_rows
from lockstep.kernels.recurrent.state import RecurrentState, on_grid, replay
from lockstep.kernels.registry import op
from lockstep.step import GRID


@dataclass(frozen=True)
class GatedDeltaWeights:
    """A layer's own weights: conv [C, R + 1]; a_log, dt_bias [HV] fp32; norm [V], with its eps."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


def gates(b: Tensor, a: Tensor, weights: GatedDeltaWeights) -> tuple[Tensor, Tensor]:
    """Raw b, a [..., HV] -> g, the log decay, and beta [..., HV], both fp32."""
    g = -torch.exp(weights.a_log) * softplus(a.float() + weights.dt_bias)
    return g, sigmoid(b.float())


@op(writes=("state",))
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
) -> Tensor:
    """Generated tokens: replay those that the state lacks, run the new window, and norm.

    mixed [S, Q, C], z [S, Q, HV, V], b, a [S, Q, HV] raw; slots [S] int64; starts [S] int32 the
    window's first positions; folded [S] int32: how many tokens the state holds, up to
    max(flush, grid) - 1 + W fewer than starts -> [S, Q, HV, V] of z's dtype, after the gated norm.

    A state behind a multiple of its grid of tokens is rounded to its dtype, in replay and window
    alike; outputs are of the state before that. The state is read once, and written once where
    next_folded(starts, folded, flush, grid) is more than folded: as it is behind so many tokens. No
    bit depends on flush. Q <= W. Slots may repeat only if null; a null row's results are undefined.
    """
    out = torch.empty_like(z)
    ring_length = state.conv.shape[1]
    history = weights.conv.shape[1] - 1
    written = next_folded(starts, folded, flush, state.grid)
    rows = zip(slots.tolist(), starts.tolist(), folded.tolist(), written.tolist(), strict=True)
    for row, (slot, start, held, due) in enumerate(rows):
        s = replay(state, slot, state.recurrent[slot].float(), held, due)
        if due > held:
            state.recurrent[slot] = s
        s = replay(state, slot, s, due, start)
        past = state.conv[slot, past_slots(start, history, ring_length)]
        q, k, v = heads_of(causal_convolution(torch.cat([past, mixed[row]]), weights.conv), state)
        g, beta = gates(b[row], a[row], weights)
        for t in range(mixed.shape[1]):
            s, u, o = _delta_rule(s, q[t], k[t], v[t], torch.exp(g[t]), beta[t])
            s = on_grid(state, s, start + t + 1)
            out[row, t] = gated_rms_norm(o, z[row, t], weights.norm, weights.eps)
            state.conv[slot, (start + t) % ring_length] = mixed[row, t]
            ring_slot = (start + t) % state.k.shape[1]
            state.u[slot, ring_slot] = u
            state.k[slot, ring_slot] = k[t]
            state.decay[slot, ring_slot] = torch.exp(g[t])
    return out


@op(writes=("state",))
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
    """Prompt tokens: the chunked form on the absolute grid; between chunks the state is fp32, with
    numbers of its dtype in memory.

    mixed [T, C], b, a [T, HV] raw; cu_seqlens [S+1], the rest [S], all int32
    -> o [T, HV, V] fp32, before the gated norm. Row s begins at position starts[s], a multiple of
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
        q, k, v = heads_of(causal_convolution(row.raw, weights.conv), state)
        g, beta = gates(b[own], a[own], weights)
        s = at_grid = row.before
        for first in range(0, len(v), GRID):
            chunk = slice(first, first + GRID)
            o, s = _chunk(q[chunk], k[chunk], v[chunk], g[chunk], beta[chunk], s)
            out[own][chunk] = o
            s = state.rounded(s)
            if first + GRID == len(v) // GRID * GRID:
                at_grid = s
        row.keep(at_grid, s)
    return out
