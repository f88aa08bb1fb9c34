"""Both laws on a CPU: the references' bits from few torch calls, whose number is what costs there.

The step works token-major, [Q, S, ...], so that one call serves all rows and heads of a token; the
chunked form makes all of a row's chunks at once and walks the state alone through them. Times are
in docs/kernels/gated_delta_rule.md.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.gated_delta_rule import (
    L2_EPS,
    GatedDeltaWeights,
    gated_delta_chunk,
    gated_delta_step,
    gates,
)
from lockstep.kernels.norm import gated_rms_norm
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

EPS = torch.tensor(L2_EPS)
"""As a tensor, which is added sooner than a number (lockstep.kernels.activations.ONE)."""


def _heads(mixed: Tensor, state: RecurrentState) -> tuple[Tensor, Tensor, Tensor]:
    """lockstep.kernels.gated_delta_rule.heads_of, as views of mixed, which is written over."""
    hk, hv, dk, dv = state.sizes()
    qk, v = mixed.split([2 * hk * dk, hv * dv], dim=-1)
    qk = qk.unflatten(-1, (2 * hk, dk))
    qk.mul_((qk * qk).sum(-1, keepdim=True).add_(EPS).rsqrt_())
    q, k = qk.split([hk, hk], dim=-2)
    return q.mul_(dk**-0.5), k, v.unflatten(-1, (hv, dv))


@gated_delta_step.backend("cpu", supports=cpu_trait)
def gated_delta_step_cpu(
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
    """See lockstep.kernels.gated_delta_rule.gated_delta_step."""
    mixed, z, b, a = (x.transpose(0, 1) for x in (mixed, z, b, a))
    window = Window(mixed, state, slots, starts, folded, weights.conv.shape[1] - 1)
    q, k, v = _heads(causal_convolution(window.raw, weights.conv), state)
    g, beta = gates(b, a, weights)
    s = replay(state, slots, starts, folded, window.replayed, flush)
    decay = torch.exp(g)
    each = (by_token(x, b.shape[2]) for x in (q, k, v, decay.unsqueeze(-1), beta.unsqueeze(-1)))
    o, u = _run(state, s, window.first, *each)
    window.keep(u, k, decay)
    return gated_rms_norm(o.view(z.shape), z, weights.norm, weights.eps).transpose(0, 1)


def _run(
    state: RecurrentState,
    s: Tensor,
    starts: Sequence[int],
    q: Tokens,
    k: Tokens,
    v: Tokens,
    decay: Tokens,
    beta: Tokens,
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token, in place on s [S, HV, K, V], N = S * HV: q, k [N, 1, K],
    v [N, 1, V], decay, beta [N, 1, 1] -> o, u [Q * N, 1, V]."""
    out: list[Tensor] = []
    u: list[Tensor] = []
    flat = s.flatten(0, 1)
    for t, (q_t, k_t, v_t, decay_t, beta_t) in enumerate(zip(q, k, v, decay, beta, strict=True)):
        flat.mul_(decay_t)
        u.append((v_t - torch.bmm(k_t, flat)).mul_(beta_t))
        write(flat, k_t, u[-1])
        out.append(torch.bmm(q_t, flat))
        round_rows(state, s, [start + t + 1 for start in starts])
    return torch.cat(out), torch.cat(u)


@gated_delta_chunk.backend("cpu", supports=cpu_trait)
def gated_delta_chunk_cpu(
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
    """See lockstep.kernels.gated_delta_rule.gated_delta_chunk."""
    out = torch.zeros(mixed.shape[0], *state.u.shape[2:])
    history = weights.conv.shape[1] - 1
    g, beta = gates(b, a, weights)
    places = (cu_seqlens, starts, state_src, state_slots, snapshot_slots)
    for row in prompt_rows(mixed, state, history, *places):
        own = row.tokens
        heads = _heads(causal_convolution(row.raw, weights.conv), state)
        out[own], at_grid, s = _chunks(*heads, g[own], beta[own], row.before, state.rounded)
        row.keep(at_grid, s)
    return out


def _chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    s: Tensor,
    rounded: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """One row's chunks: q, k [T, HK, K], v [T, HV, V], g, beta [T, HV], s [HV, K, V]
    -> o [T, HV, V], the state at the last grid point, the state after the last token.

    rounded: a state as memory has it, which it is behind every chunk.
    Tokens past the end have k = 0, beta = 0 and no decay: exact no-ops on the state.
    """
    length, hv = v.shape[:2]
    whole = length // GRID
    chunks = -(-length // GRID)
    short = chunks * GRID - length

    def chunked(x: Tensor) -> Tensor:
        """[T, HV, ...] -> [chunks, HV, GRID, ...]."""
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, short))
        return x.view(chunks, GRID, *x.shape[1:]).transpose(1, 2)

    q = chunked(expand(q, hv))
    k = chunked(expand(k, hv))
    v = chunked(v)
    g = chunked(g).cumsum(-1)
    beta = chunked(beta)[..., None]
    causal = torch.ones(GRID, GRID, dtype=torch.bool).tril()
    decay = torch.exp((g[..., :, None] - g[..., None, :]).masked_fill(~causal, -torch.inf))
    inner = ((k * beta) @ k.transpose(-1, -2) * decay).tril(-1) + torch.eye(GRID)
    grown = torch.exp(g)[..., None]
    solved = torch.linalg.solve_triangular(
        inner, torch.cat([v * beta, k * beta * grown], -1), upper=False, unitriangular=True
    )
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = (q @ k.transpose(-1, -2)) * decay
    q = q * grown
    left = k * torch.exp(g[..., -1:] - g)[..., None]
    out = torch.empty_like(v)
    at_grid = s
    for c in range(chunks):
        new = u[c] - w[c] @ s
        out[c] = q[c] @ s + scores[c] @ new
        s = s * torch.exp(g[c, :, -1])[:, None, None] + left[c].transpose(-1, -2) @ new
        s = rounded(s)
        if c + 1 == whole:
            at_grid = s
    return out.transpose(1, 2).reshape(chunks * GRID, hv, -1)[:length], at_grid, s
