"""gated_delta_step and gated_delta_chunk on a CPU, with the references' bits in few torch calls.

The recurrent form works token-major, [Q, S, ...], so that one call serves all rows and heads of a
token. The chunked form computes all of a row's chunks at once; only the state goes from chunk to
chunk. Times are in docs/kernels/gated_delta_rule.md.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.gated_delta_rule import (
    L2_EPS,
    GatedDeltaWeights,
    add_partials,
    gated_delta_chunk,
    gated_delta_step,
    gates,
)
from lockstep.kernels.norm import gated_rms_norm
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

EPS = torch.tensor(L2_EPS)
"""L2_EPS as a tensor, which torch adds faster than a number: see lockstep.kernels.activations.ONE.
"""


def _heads(mixed: Tensor, state: RecurrentState) -> tuple[Tensor, Tensor, Tensor]:
    """Compute heads_of in place: the results are views of mixed, which is overwritten."""
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
    committed: Tensor | None = None,
) -> Tensor:
    """Run the window of all rows at once: see gated_delta_rule.gated_delta_step."""
    b, a = add_partials(b, a, mixed)
    mixed, z, b, a = (x.transpose(0, 1) for x in (mixed, z, b, a))
    history = weights.conv.shape[1] - 1
    window = open_window(mixed, state, slots, starts, folded, history, flush, committed)
    q, k, v = _heads(causal_convolution(window.raw, weights.conv), state)
    g, beta = gates(b, a, weights)
    s = replay(state, slots, starts, folded, window.replayed, window.written)
    decay = torch.exp(g)
    by_token = (
        split_tokens(x, b.shape[2]) for x in (q, k, v, decay.unsqueeze(-1), beta.unsqueeze(-1))
    )
    o, u = _step_tokens(state, s, window.first, window.write_states, *by_token)
    window.append(u, k, decay)
    out = gated_rms_norm(o.view(z.shape), z, weights.norm, weights.eps)
    return window.clear_padding(out).transpose(0, 1)


def _step_tokens(
    state: RecurrentState,
    s: Tensor,
    starts: Sequence[int],
    write_states: WriteStates,
    q: Tokens,
    k: Tokens,
    v: Tokens,
    decay: Tokens,
    beta: Tokens,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token, updating s [S, HV, K, V] in place.

    write_states: see Window.write_states.
    q, k [N, 1, K], v [N, 1, V], decay, beta [N, 1, 1]: per token; N = S * HV.

    Returns o, u [Q * N, 1, V].
    """
    out: list[Tensor] = []
    u: list[Tensor] = []
    flat = s.flatten(0, 1)
    for t, (q_t, k_t, v_t, decay_t, beta_t) in enumerate(zip(q, k, v, decay, beta, strict=True)):
        flat.mul_(decay_t)
        u.append((v_t - torch.bmm(k_t, flat)).mul_(beta_t))
        add_rank_one(flat, k_t, u[-1])
        out.append(torch.bmm(q_t, flat))
        round_rows(state, s, [start + t + 1 for start in starts])
        write_states(s, t)
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
    """Run prompt chunks row by row: see gated_delta_rule.gated_delta_chunk."""
    out = torch.zeros(mixed.shape[0], *state.u.shape[2:])
    history = weights.conv.shape[1] - 1
    g, beta = gates(*add_partials(b, a, mixed), weights)
    row_arguments = (cu_seqlens, starts, state_src, state_slots, snapshot_slots)
    for row in prompt_rows(mixed, state, history, *row_arguments):
        span = row.tokens
        heads = _heads(causal_convolution(row.raw, weights.conv), state)
        out[span], at_grid, s = _run_chunks(*heads, g[span], beta[span], row.before, state.rounded)
        row.save(at_grid, s)
    return out


def _run_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    s: Tensor,
    rounded: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the chunks of one row by their WY representation.

    q, k [T, HK, K], v [T, HV, V], g, beta [T, HV], s [HV, K, V]. rounded: rounds a state to its
    dtype in memory. Returns o [T, HV, V], the state at the last grid point and the state after the
    last token.
    """
    length, hv = v.shape[:2]
    whole_chunks = length // GRID
    chunks = -(-length // GRID)
    q = split_chunks(q, hv // q.shape[1])
    k = split_chunks(k, hv // k.shape[1])
    v = split_chunks(v)
    g = split_chunks(g).cumsum(-1)
    beta = split_chunks(beta)[..., None]
    causal = torch.ones(GRID, GRID, dtype=torch.bool).tril()
    decay = torch.exp((g[..., :, None] - g[..., None, :]).masked_fill_(~causal, -torch.inf))
    k_beta = k * beta
    triangular = (k_beta @ k.transpose(-1, -2) * decay).tril_(-1).add_(torch.eye(GRID))
    grown = torch.exp(g)[..., None]
    # BLAS solves in place, column by column; torch would copy a right-hand side of another layout.
    rhs = v.new_empty(chunks, hv, v.shape[-1] + k.shape[-1], GRID).mT
    torch.mul(v, beta, out=rhs[..., : v.shape[-1]])
    torch.mul(k_beta, grown, out=rhs[..., v.shape[-1] :])
    solved = torch.linalg.solve_triangular(
        triangular, rhs, upper=False, unitriangular=True, out=rhs
    )
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = (q @ k.transpose(-1, -2)) * decay
    q = q * grown
    k_decayed = k * torch.exp(g[..., -1:] - g)[..., None]
    out = torch.empty_like(v)
    at_grid = s
    for c in range(chunks):
        v_new = u[c] - w[c] @ s
        out[c] = q[c] @ s + scores[c] @ v_new
        s = s * torch.exp(g[c, :, -1])[:, None, None] + k_decayed[c].transpose(-1, -2) @ v_new
        s = rounded(s)
        if c + 1 == whole_chunks:
            at_grid = s
    return out.transpose(1, 2).reshape(chunks * GRID, hv, -1)[:length], at_grid, s
