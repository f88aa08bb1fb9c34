"""Both laws on a CPU: the references' bits from few torch calls, as lockstep.kernels.recurrent._cpu
has them for every recurrence."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.mamba2 import (
    Mamba2Weights,
    heads_of,
    mamba2_chunk,
    mamba2_step,
    time_steps,
)
from lockstep.kernels.recurrent._cpu import (
    Tokens,
    by_token,
    causal_convolution,
    replay,
    ring_places,
    round_rows,
    write,
)
from lockstep.kernels.recurrent.state import RecurrentState, expand
from lockstep.step import GRID


@mamba2_step.backend("cpu", supports=cpu_trait)
def mamba2_step_cpu(
    mixed: Tensor,
    dt: Tensor,
    weights: Mamba2Weights,
    state: RecurrentState,
    slots: Tensor,
    starts: Tensor,
    folded: Tensor,
    flush: int = 1,
) -> Tensor:
    """See lockstep.kernels.mamba2.mamba2_step."""
    mixed = mixed.transpose(0, 1)
    dt = dt.transpose(0, 1)
    length, rows, channels = mixed.shape
    heads = dt.shape[2]
    history = weights.conv.shape[1] - 1
    first = tuple(starts.tolist())
    most = max(0, *(starts - folded).tolist())
    own = tuple(slots.tolist())
    places = ring_places(state.k.shape[1], own, first, range(-most, length))
    raw_places = ring_places(state.conv.shape[1], own, first, range(-history, length))
    conv = state.conv.flatten(0, 1).index_select(0, raw_places[: history * rows])
    raw = torch.cat([conv.view(history, rows, channels), mixed])
    x, b, c = heads_of(causal_convolution(raw, weights.conv, weights.conv_bias), state)
    step, g = time_steps(dt, weights)
    s = replay(state, slots, starts, folded, places[: most * rows], flush)
    u = x * step[..., None]
    decay = torch.exp(g)
    y = _run(state, s, first, *(by_token(t, heads) for t in (b, c, u, decay[..., None])))
    state.conv.flatten(0, 1).index_copy_(
        0, raw_places[history * rows :], mixed.reshape(-1, channels)
    )
    for ring, line in ((state.u, u), (state.k, b), (state.decay, decay)):
        ring.flatten(0, 1).index_copy_(0, places[most * rows :], line.reshape(-1, *ring.shape[2:]))
    return y.view(x.shape).add_(weights.d[:, None] * x).transpose(0, 1)


def _run(
    state: RecurrentState,
    s: Tensor,
    starts: Sequence[int],
    b: Tokens,
    c: Tokens,
    u: Tokens,
    decay: Tokens,
) -> Tensor:
    """The recurrence in place on s [S, H, N, P]: b, c [S * H, 1, N], u [S * H, 1, P],
    decay [S * H, 1, 1] of each token -> y [Q * S * H, 1, P]."""
    out: list[Tensor] = []
    flat = s.flatten(0, 1)
    for t, (b_t, c_t, u_t, decay_t) in enumerate(zip(b, c, u, decay, strict=True)):
        flat.mul_(decay_t)
        write(flat, b_t, u_t)
        out.append(torch.bmm(c_t, flat))
        round_rows(state, s, [start + t + 1 for start in starts])
    return torch.cat(out)


@mamba2_chunk.backend("cpu", supports=cpu_trait)
def mamba2_chunk_cpu(
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
    """See lockstep.kernels.mamba2.mamba2_chunk."""
    out = torch.zeros(mixed.shape[0], *state.u.shape[2:])
    history = weights.conv.shape[1] - 1
    conv = state.conv.flatten(0, 1)
    step, g = time_steps(dt, weights)
    bounds = cu_seqlens.tolist()

    def last(slot: int, position: int) -> Tensor:
        return ring_places(state.conv.shape[1], (slot,), (position,), range(-history, 0))

    rows = (x.tolist() for x in (starts, state_src, state_slots, snapshot_slots))
    for i, (start, src, dst, snapshot) in enumerate(zip(*rows, strict=True)):
        begin = bounds[i]
        end = bounds[i + 1]
        if begin == end or dst == 0:
            continue
        past = conv[last(src, start)] if start else conv.new_zeros(history, conv.shape[1])
        s = state.recurrent[src].clone() if start else torch.zeros_like(state.recurrent[0])
        s = s.float()
        raw = torch.cat([past, mixed[begin:end]])
        x, b, c = heads_of(causal_convolution(raw, weights.conv, weights.conv_bias), state)
        u = x * step[begin:end, :, None]
        y, at_grid, s = _chunks(b, c, u, g[begin:end], s, state.rounded)
        out[begin:end] = y + weights.d[:, None] * x
        state.recurrent[dst] = s
        conv[last(dst, start + end - begin)] = raw[end - begin :]
        if snapshot:
            whole = (end - begin) // GRID * GRID
            state.recurrent[snapshot] = at_grid
            conv[last(snapshot, start + whole)] = raw[whole : whole + history]
    return out


def _chunks(
    b: Tensor, c: Tensor, u: Tensor, g: Tensor, s: Tensor, rounded: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """One row's chunks: b, c [T, G, N], u [T, H, P], g [T, H], s [H, N, P]
    -> y [T, H, P] without the skip, the state at the last grid point, that after the last token.

    rounded: a state as memory has it, which it is behind every chunk. Tokens past the end have
    b = 0, u = 0 and no decay: exact no-ops on the state.
    """
    length, heads = u.shape[:2]
    whole = length // GRID
    chunks = -(-length // GRID)
    short = chunks * GRID - length

    def chunked(x: Tensor) -> Tensor:
        """[T, H, ...] -> [chunks, H, GRID, ...]."""
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, short))
        return x.view(chunks, GRID, *x.shape[1:]).transpose(1, 2)

    b = chunked(expand(b, heads))
    c = chunked(expand(c, heads))
    u = chunked(u)
    g = chunked(g).cumsum(-1)
    causal = torch.ones(GRID, GRID, dtype=torch.bool).tril()
    decay = torch.exp((g[..., :, None] - g[..., None, :]).masked_fill(~causal, -torch.inf))
    scores = (c @ b.transpose(-1, -2)) * decay
    c = c * torch.exp(g)[..., None]
    left = b * torch.exp(g[..., -1:] - g)[..., None]
    out = torch.empty_like(u)
    at_grid = s
    for i in range(chunks):
        out[i] = c[i] @ s + scores[i] @ u[i]
        s = s * torch.exp(g[i, :, -1])[:, None, None] + left[i].transpose(-1, -2) @ u[i]
        s = rounded(s)
        if i + 1 == whole:
            at_grid = s
    return out.transpose(1, 2).reshape(chunks * GRID, heads, -1)[:length], at_grid, s
