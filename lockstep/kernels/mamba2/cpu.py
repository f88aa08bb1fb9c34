"""mamba2_step and mamba2_chunk on a CPU, with the references' bits in few torch calls."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.mamba2 import (
    Mamba2Weights,
    discretize,
    heads_of,
    mamba2_chunk,
    mamba2_step,
)
from lockstep.kernels.recurrent.cpu import (
    Tokens,
    WriteStates,
    add_rank_one,
    causal_convolution,
    open_window,
    replay,
    round_rows,
    split_chunks,
    split_tokens,
)
from lockstep.kernels.recurrent.prompt_rows import prompt_rows
from lockstep.kernels.recurrent.state import RecurrentState
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
    committed: Tensor | None = None,
) -> Tensor:
    """Run the window of all rows at once: see lockstep.kernels.mamba2.mamba2_step."""
    mixed = mixed.transpose(0, 1)
    dt = dt.transpose(0, 1)
    history = weights.conv.shape[1] - 1
    window = open_window(mixed, state, slots, starts, folded, history, flush, committed)
    x, b, c = heads_of(causal_convolution(window.raw, weights.conv, weights.conv_bias), state)
    step, g = discretize(dt, weights)
    s = replay(state, slots, starts, folded, window.replayed, window.written)
    u = x * step[..., None]
    decay = torch.exp(g)
    by_token = (split_tokens(t, dt.shape[2]) for t in (b, c, u, decay[..., None]))
    y = _step_tokens(state, s, window.first, window.write_states, *by_token)
    window.append(u, b, decay)
    out = y.view(x.shape).add_(weights.d[:, None] * x)
    return window.clear_padding(out).transpose(0, 1)


def _step_tokens(
    state: RecurrentState,
    s: Tensor,
    starts: Sequence[int],
    write_states: WriteStates,
    b: Tokens,
    c: Tokens,
    u: Tokens,
    decay: Tokens,
) -> Tensor:
    """Run the recurrence token by token, updating s [S, H, N, P] in place.

    write_states: see Window.write_states. b, c [S * H, 1, N], u [S * H, 1, P], decay [S * H, 1, 1]
    per token. Returns y [Q * S * H, 1, P].
    """
    out: list[Tensor] = []
    flat = s.flatten(0, 1)
    for t, (b_t, c_t, u_t, decay_t) in enumerate(zip(b, c, u, decay, strict=True)):
        flat.mul_(decay_t)
        add_rank_one(flat, b_t, u_t)
        out.append(torch.bmm(c_t, flat))
        round_rows(state, s, [start + t + 1 for start in starts])
        write_states(s, t)
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
    """Run prompt chunks row by row: see lockstep.kernels.mamba2.mamba2_chunk."""
    out = torch.zeros(mixed.shape[0], *state.u.shape[2:])
    history = weights.conv.shape[1] - 1
    step, g = discretize(dt, weights)
    row_arguments = (cu_seqlens, starts, state_src, state_slots, snapshot_slots)
    for row in prompt_rows(mixed, state, history, *row_arguments):
        span = row.tokens
        x, b, c = heads_of(causal_convolution(row.raw, weights.conv, weights.conv_bias), state)
        u = x * step[span, :, None]
        y, at_grid, s = _run_chunks(b, c, u, g[span], row.before, state.rounded)
        out[span] = y + weights.d[:, None] * x
        row.save(at_grid, s)
    return out


def _run_chunks(
    b: Tensor, c: Tensor, u: Tensor, g: Tensor, s: Tensor, rounded: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the chunks of one row.

    b, c [T, G, N], u [T, H, P], g [T, H], s [H, N, P]. rounded: rounds a state to its dtype in
    memory. Returns y [T, H, P] without the skip connection, the state at the last grid point and
    the state after the last token.
    """
    length, heads = u.shape[:2]
    whole_chunks = length // GRID
    chunks = -(-length // GRID)
    b = split_chunks(b, heads // b.shape[1])
    c = split_chunks(c, heads // c.shape[1])
    u = split_chunks(u)
    g = split_chunks(g).cumsum(-1)
    causal = torch.ones(GRID, GRID, dtype=torch.bool).tril()
    decay = torch.exp((g[..., :, None] - g[..., None, :]).masked_fill_(~causal, -torch.inf))
    scores = (c @ b.transpose(-1, -2)) * decay
    c = c * torch.exp(g)[..., None]
    b_decayed = b * torch.exp(g[..., -1:] - g)[..., None]
    out = torch.empty_like(u)
    at_grid = s
    for i in range(chunks):
        out[i] = c[i] @ s + scores[i] @ u[i]
        s = s * torch.exp(g[i, :, -1])[:, None, None] + b_decayed[i].transpose(-1, -2) @ u[i]
        s = rounded(s)
        if i + 1 == whole_chunks:
            at_grid = s
    return out.transpose(1, 2).reshape(chunks * GRID, heads, -1)[:length], at_grid, s
