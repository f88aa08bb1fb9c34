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
    length, rows, channels = mixed.shape
    hv = b.shape[2]
    history = weights.conv.shape[1] - 1
    first = tuple(starts.tolist())
    most = max(0, *(starts - folded).tolist())
    own = tuple(slots.tolist())
    places = ring_places(state.k.shape[1], own, first, range(-most, length))
    raw_places = ring_places(state.conv.shape[1], own, first, range(-history, length))
    conv = state.conv.flatten(0, 1).index_select(0, raw_places[: history * rows])
    raw = torch.cat([conv.view(history, rows, channels), mixed])
    q, k, v = _heads(causal_convolution(raw, weights.conv), state)
    g, beta = gates(b, a, weights)
    s = replay(state, slots, starts, folded, places[: most * rows], flush)
    decay = torch.exp(g)
    each = (by_token(x, hv) for x in (q, k, v, decay.unsqueeze(-1), beta.unsqueeze(-1)))
    o, u = _run(state, s, first, *each)
    state.conv.flatten(0, 1).index_copy_(
        0, raw_places[history * rows :], mixed.reshape(-1, channels)
    )
    for ring, x in ((state.u, u), (state.k, k), (state.decay, decay)):
        ring.flatten(0, 1).index_copy_(0, places[most * rows :], x.reshape(-1, *ring.shape[2:]))
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
    conv = state.conv.flatten(0, 1)
    g, beta = gates(b, a, weights)
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
        heads = _heads(causal_convolution(raw, weights.conv), state)
        gated = g[begin:end], beta[begin:end]
        out[begin:end], at_grid, s = _chunks(*heads, *gated, s, state.rounded)
        state.recurrent[dst] = s
        conv[last(dst, start + end - begin)] = raw[end - begin :]
        if snapshot:
            whole = (end - begin) // GRID * GRID
            state.recurrent[snapshot] = at_grid
            conv[last(snapshot, start + whole)] = raw[whole : whole + history]
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
