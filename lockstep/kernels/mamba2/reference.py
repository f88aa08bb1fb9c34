"""Math of Mamba-2: the state-space recurrence of one token, and its chunked (SSD) form."""

import torch
from torch import Tensor

from lockstep.kernels.recurrent.state import (
    RecurrentState,
    expand_heads,
    pad_chunk,
    rank_one_update,
)
from lockstep.step import GRID


def heads_of(mixed: Tensor, state: RecurrentState) -> tuple[Tensor, Tensor, Tensor]:
    """Split convolved mixed [..., C] fp32 into x [..., H, P], B and C [..., G, N]."""
    groups, heads, n, p = state.sizes()
    x, b, c = mixed.split([heads * p, groups * n, groups * n], dim=-1)
    return x.unflatten(-1, (heads, p)), *(y.unflatten(-1, (groups, n)) for y in (b, c))


def ssm_step(s: Tensor, b: Tensor, c: Tensor, u: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the recurrence to one token: s [H, N, P], b, c [G, N], u [H, P], decay [H].

    Returns the state after the token and y [H, P].
    """
    b = expand_heads(b, len(s))[:, None]
    c = expand_heads(c, len(s))[:, None]
    s = rank_one_update(s * decay[:, None, None], b, u[:, None])
    return s, (c @ s)[:, 0]


def chunk_ssm(b: Tensor, c: Tensor, u: Tensor, g: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Run one chunk of up to GRID tokens.

    b, c [T, G, N], u [T, H, P], g [T, H], s [H, N, P]. Returns y [T, H, P] without the skip
    connection, and the state after the chunk.
    """
    tokens, heads = u.shape[:2]
    b = pad_chunk(expand_heads(b, heads))
    c = pad_chunk(expand_heads(c, heads))
    u = pad_chunk(u)
    g = pad_chunk(g).cumsum(-1)
    causal = torch.ones(GRID, GRID, dtype=torch.bool).tril()
    decay = torch.exp((g[:, :, None] - g[:, None, :]).masked_fill(~causal, -torch.inf))
    y = (c * torch.exp(g)[..., None]) @ s + (c @ b.transpose(1, 2) * decay) @ u
    b_decayed = b * torch.exp(g[:, -1:] - g)[..., None]
    s = s * torch.exp(g[:, -1])[:, None, None] + b_decayed.transpose(1, 2) @ u
    return y.transpose(0, 1)[:tokens], s
