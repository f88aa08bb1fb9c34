"""The delta rule of one token, and its chunked form."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.recurrent.state import RecurrentState, expand, write
from lockstep.step import GRID

L2_EPS = 1e-6
"""Added to the sum of squares of q and k before the root, as in Qwen3.5's l2norm."""


def heads_of(mixed: Tensor, state: RecurrentState) -> tuple[Tensor, Tensor, Tensor]:
    """Convolved mixed [..., C] fp32 -> q, k [..., HK, K] of length 1 (q times K^-1/2 then), and
    v [..., HV, V]."""
    hk, hv, dk, dv = state.sizes()
    q, k, v = mixed.split([hk * dk, hk * dk, hv * dv], dim=-1)
    q = _l2_normalised(q.unflatten(-1, (hk, dk))) * dk**-0.5
    k = _l2_normalised(k.unflatten(-1, (hk, dk)))
    return q, k, v.unflatten(-1, (hv, dv))


def _l2_normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def _delta_rule(
    s: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One token: s [HV, K, V], q, k [HK, K], v [HV, V], decay, beta [HV]
    -> the state after it, u and o [HV, V]: the gated delta rule."""
    q = expand(q, len(s))[:, None]
    k = expand(k, len(s))[:, None]
    s = s * decay[:, None, None]
    u = (v[:, None] - k @ s) * beta[:, None, None]
    s = write(s, k, u)
    return s, u[:, 0], (q @ s)[:, 0]


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor
) -> tuple[Tensor, Tensor]:
    """Up to GRID tokens at once, by the WY form: q, k [T, HK, K],
    v [T, HV, V], g, beta [T, HV], s [HV, K, V] -> o [T, HV, V], the state after them.

    A short chunk is filled up with k = 0, beta = 0 and no decay: exact no-ops.
    """
    tokens, heads = v.shape[:2]

    def filled(x: Tensor) -> Tensor:
        """[T, HV, ...] -> [HV, GRID, ...]."""
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, GRID - tokens)).transpose(0, 1)

    q = filled(expand(q, heads))
    k = filled(expand(k, heads))
    v = filled(v)
    g = filled(g).cumsum(-1)
    beta = filled(beta)[..., None]
    causal = torch.ones(GRID, GRID, dtype=torch.bool).tril()
    decay = torch.exp((g[:, :, None] - g[:, None, :]).masked_fill(~causal, -torch.inf))
    grown = torch.exp(g)[..., None]
    inner = ((k * beta) @ k.transpose(1, 2) * decay).tril(-1) + torch.eye(GRID)
    right = torch.cat([v * beta, k * beta * grown], -1)
    solved = torch.linalg.solve_triangular(inner, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    new = u - w @ s
    o = (q * grown) @ s + (q @ k.transpose(1, 2) * decay) @ new
    left = k * torch.exp(g[:, -1:] - g)[..., None]
    s = s * torch.exp(g[:, -1])[:, None, None] + left.transpose(1, 2) @ new
    return o.transpose(0, 1)[:tokens], s
