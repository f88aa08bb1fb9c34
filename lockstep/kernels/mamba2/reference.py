"""The chunked form of Mamba-2."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.recurrent.state import RecurrentState, expand, write
from lockstep.step import GRID


def heads_of(mixed: Tensor, state: RecurrentState) -> tuple[Tensor, Tensor, Tensor]:
    """Convolved mixed [..., C] fp32 -> x [..., H, P], B and C [..., G, N]."""
    groups, heads, n, p = state.sizes()
    x, b, c = mixed.split([heads * p, groups * n, groups * n], dim=-1)
    return x.unflatten(-1, (heads, p)), *(y.unflatten(-1, (groups, n)) for y in (b, c))


def _ssm(s: Tensor, b: Tensor, c: Tensor, u: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """One token: s [H, N, P], b, c [G, N], u [H, P], decay [H] -> the state after it, y [H, P]."""
    b = expand(b, len(s))[:, None]
    c = expand(c, len(s))[:, None]
    s = write(s * decay[:, None, None], b, u[:, None])
    return s, (c @ s)[:, 0]


def _chunk(b: Tensor, c: Tensor, u: Tensor, g: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Up to GRID tokens at once: b, c [T, G, N], u [T, H, P], g [T, H], s [H, N, P]
    -> y [T, H, P] without the skip, the state after them.

    A short chunk is filled up with u = 0, b = 0 and no decay: exact no-ops.
    """
    tokens, heads = u.shape[:2]

    def filled(x: Tensor) -> Tensor:
        """[T, H, ...] -> [H, GRID, ...]."""
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, GRID - tokens)).transpose(0, 1)

    b = filled(expand(b, heads))
    c = filled(expand(c, heads))
    u = filled(u)
    g = filled(g).cumsum(-1)
    causal = torch.ones(GRID, GRID, dtype=torch.bool).tril()
    decay = torch.exp((g[:, :, None] - g[:, None, :]).masked_fill(~causal, -torch.inf))
    y = (c * torch.exp(g)[..., None]) @ s + (c @ b.transpose(1, 2) * decay) @ u
    left = b * torch.exp(g[:, -1:] - g)[..., None]
    s = s * torch.exp(g[:, -1])[:, None, None] + left.transpose(1, 2) @ u
    return y.transpose(0, 1)[:tokens], s
