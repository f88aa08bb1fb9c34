"""Row tiles: how a CPU matrix product keeps its bits whatever rows stand beside a row.

A BLAS library picks its inner loops by the number of rows, so the same row gives other bits in a
batch of 4 than in a batch of 40. Cut into tiles of one fixed, zero-padded size, every row goes
through the same inner loops. Tiles of SMALL rows define the bits; where a probe of this very
(N, K) shows that a tile of LARGE rows gives the same, long batches take those.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

SMALL = 16
LARGE = 256


@cache
def large_tile_is_exact(n: int, k: int) -> bool:
    """Whether tiles of LARGE and SMALL rows give the same bits for weights [n, k] on this CPU."""
    generator = torch.Generator().manual_seed(n * 65537 + k)
    x = torch.randn(LARGE, k, generator=generator)
    x = x * torch.exp2(torch.randint(-20, 21, x.shape, generator=generator).float())
    weight = torch.randn(n, k, generator=generator)
    small = torch.cat([F.linear(rows, weight) for rows in x.split(SMALL)])
    return torch.equal(F.linear(x, weight), small)


def tiled_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] @ weight [N, K]^T -> [T, N] fp32; every row's bits depend on that row alone."""
    rows, k = x.shape
    n = weight.shape[0]
    out = x.new_empty(rows, n)
    done = 0
    if rows >= LARGE and large_tile_is_exact(n, k):
        while rows - done >= LARGE:
            torch.mm(x[done : done + LARGE], weight.t(), out=out[done : done + LARGE])
            done += LARGE
    while rows - done >= SMALL:
        torch.mm(x[done : done + SMALL], weight.t(), out=out[done : done + SMALL])
        done += SMALL
    if done < rows:
        tail = x.new_zeros(SMALL, k)
        tail[: rows - done] = x[done:]
        out[done:] = F.linear(tail, weight)[: rows - done]
    return out
