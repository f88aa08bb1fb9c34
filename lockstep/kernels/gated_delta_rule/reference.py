"""Math of Gated DeltaNet: the delta rule of one token, and its chunked form."""

import torch
from torch import Tensor

from lockstep.kernels.recurrent.state import (
    RecurrentState,
    expand_heads,
    pad_chunk,
    rank_one_update,
)
from lockstep.step import GRID

L2_EPS = 1e-6
"""Epsilon added to the sum of squares of q and k, as in Qwen3.5's l2norm."""


def heads_of(mixed: Tensor, state: RecurrentState) -> tuple[Tensor, Tensor, Tensor]:
    """Split convolved mixed [..., C] fp32 into q, k [..., HK, K] and v [..., HV, V].

    q and k are l2-normalized; q is then scaled by K^-1/2.
    """
    hk, hv, dk, dv = state.sizes()
    q, k, v = mixed.split([hk * dk, hk * dk, hv * dv], dim=-1)
    q = _l2_normalize(q.unflatten(-1, (hk, dk))) * dk**-0.5
    k = _l2_normalize(k.unflatten(-1, (hk, dk)))
    return q, k, v.unflatten(-1, (hv, dv))


def _l2_normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def delta_rule(
    s: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the gated delta rule to one token.

    s [HV, K, V], q, k [HK, K], v [HV, V], decay, beta [HV]. Returns the state after the token, u
    and o [HV, V].
    """
    q = expand_heads(q, len(s))[:, None]
    k = expand_heads(k, len(s))[:, None]
    s = s * decay[:, None, None]
    u = (v[:, None] - k @ s) * beta[:, None, None]
    s = rank_one_update(s, k, u)
    return s, u[:, 0], (q @ s)[:, 0]


def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor
) -> tuple[Tensor, Tensor]:
    """Run one chunk of up to GRID tokens by its WY representation.

    q, k [T, HK, K], v [T, HV, V], g, beta [T, HV], s [HV, K, V]. Returns o [T, HV, V] and the state
    after the chunk.
    """
    tokens, heads = v.shape[:2]
    q = pad_chunk(expand_heads(q, heads))
    k = pad_chunk(expand_heads(k, heads))
    v = pad_chunk(v)
    g = pad_chunk(g).cumsum(-1)
    beta = pad_chunk(beta)[..., None]
    causal = torch.ones(GRID, GRID, dtype=torch.bool).tril()
    decay = torch.exp((g[:, :, None] - g[:, None, :]).masked_fill(~causal, -torch.inf))
    # UT transform: u and w of the WY representation solve (I + A) [u | w] = [v | k exp(g)] beta.
    grown = torch.exp(g)[..., None]
    triangular = ((k * beta) @ k.transpose(1, 2) * decay).tril(-1) + torch.eye(GRID)
    right = torch.cat([v * beta, k * beta * grown], -1)
    solved = torch.linalg.solve_triangular(triangular, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    v_new = u - w @ s
    o = (q * grown) @ s + (q @ k.transpose(1, 2) * decay) @ v_new
    k_decayed = k * torch.exp(g[:, -1:] - g)[..., None]
    s = s * torch.exp(g[:, -1])[:, None, None] + k_decayed.transpose(1, 2) @ v_new
    return o.transpose(0, 1)[:tokens], s
