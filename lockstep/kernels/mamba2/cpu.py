"""Both laws on a CPU: the references' bits from few torch calls, as lockstep.kernels.recurrent.cpu
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
from lockstep.kernels.recurrent.cpu import (
    Tokens,
    Window,
    by_token,
    causal_convolution,
    replay,
    round_rows,
    write,
)
from lockstep.kernels.recurrent.prompt_rows import prompt_rows
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
    window = Window(mixed, state, slots, starts, folded, weights.conv.shape[1] - 1)
    x, b, c = heads_of(causal_convolution(window.raw, weights.conv, weights.conv_bias), state)
    step, g = time_steps(dt, weights)
    s = replay(state, slots, starts, folded, window.replayed, flush)
    u = x * step[..., None]
    decay = torch.exp(g)
    each = (by_token(t, dt.shape[2]) for t in (b, c, u, decay[..., None]))
    y = _run(state, s, window.first, *each)
    window.keep(u, b, decay)
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
    step, g = time_steps(dt, weights)
    places = (cu_seqlens, starts, state_src, state_slots, snapshot_slots)
    for row in prompt_rows(mixed, state, history, *places):
        own = row.tokens
        x, b, c = heads_of(causal_convolution(row.raw, weights.conv, weights.conv_bias), state)
        u = x * step[own, :, None]
        y, at_grid, s = _chunks(b, c, u, g[own], row.before, state.rounded)
        out[own] = y + weights.d[:, None] * x
        row.keep(at_grid, s)
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
