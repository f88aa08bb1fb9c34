"""Row tiles: how a CPU matrix product keeps its bits whatever rows stand beside a row.

A BLAS library picks its inner loops by the number of rows, so the same row may give other bits in a
batch of 4 than in a batch of 40. Products are therefore cut into tiles of a few fixed sizes, padded
where rows are short. A tile of BASE rows on one thread defines the bits; the other sizes serve a
(K, N) only where a probe of that very shape shows the same bits. With the right operand stored
[K, N], MKL gives the same bits from 2 rows up (until it blocks K); stored [N, K] only from 16 up,
and 3 times slower (docs/decisions/0003-cpu-row-tiles.md). Several threads share the columns: where
N is no multiple of what a thread's loop takes, bits may differ, and such a product keeps to one.

A right operand of few columns is filled up with columns of zeros: MKL has loops of their own for
them, in which a row's bits depend on its place in the tile (AMD Zen 5, 5 to 11 columns).
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.threads import one_thread

BASE = 8
SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 384)
NARROWEST = 16
"""Columns that a right operand is filled up to."""


def filled_up(right: Tensor) -> Tensor:
    """right [..., K, N] with columns of zeros behind its own, where it has fewer than NARROWEST."""
    short = NARROWEST - right.shape[-1]
    return F.pad(right, (0, short)) if short > 0 else right


def exact_sizes(k: int, n: int) -> tuple[int, ...]:
    """The tile sizes, ascending, that give BASE's bits for a right operand [k, n] on this CPU, on
    torch's present number of threads: steps differ in it. None: they differ from those on one."""
    return probed_sizes(k, max(n, NARROWEST), torch.get_num_threads())


@cache
def probed_sizes(k: int, n: int, threads: int) -> tuple[int, ...]:
    """exact_sizes; threads: as many as torch has now."""
    generator = torch.Generator().manual_seed(n * 65537 + k)
    x = torch.randn(SIZES[-1], k, generator=generator)
    x = x * torch.exp2(torch.randint(-20, 21, x.shape, generator=generator).float())
    right = torch.randn(k, n, generator=generator)
    base = tile_mm(x, right)
    stacked = torch.stack([right, -right])
    good = []
    for size in SIZES:
        tile = x[:size].expand(2, size, k)
        single = torch.equal(torch.mm(x[:size], right), base[:size])
        if single and torch.equal(torch.bmm(tile, stacked)[0], base[:size]):
            good.append(size)
    if BASE in good:
        return tuple(good)
    return (BASE,) if threads == 1 else ()


def tile_mm(x: Tensor, right: Tensor) -> Tensor:
    """x [T, K] @ right [K, N] -> [T, N], fp32: the definition.

    A tile of BASE rows at a time, padded with zeros, on one thread.
    """
    columns = right.shape[1]
    right = filled_up(right).contiguous()
    done = []
    with one_thread():
        for rows in x.split(BASE):
            tile = F.pad(rows, (0, 0, 0, BASE - len(rows)))
            done.append(torch.mm(tile, right)[: len(rows)])
    return torch.cat(done)[:, :columns].contiguous()


def padded_rows(rows: int, sizes: tuple[int, ...]) -> int:
    """The smallest exact size that holds `rows`; the largest one where none does."""
    return next((size for size in sizes if size >= rows), sizes[-1])


def tiled_mm(x: Tensor, right: Tensor) -> Tensor:
    """tile_mm's bits, contiguous, in tiles of the sizes that a probe found to give them."""
    rows, k = x.shape
    columns = right.shape[1]
    if columns < NARROWEST:
        return tiled_mm(x, filled_up(right))[:, :columns].contiguous()
    sizes = exact_sizes(k, columns)
    if not sizes:
        with one_thread():
            return tiled_mm(x, right)
    size = padded_rows(rows, sizes)
    if rows == size:
        return torch.mm(x, right)
    if rows < size:
        tile = x.expand(size, k) if rows == 1 else F.pad(x, (0, 0, 0, size - rows))
        return torch.mm(tile, right)[:rows]
    return torch.cat([tiled_mm(part, right) for part in x.split(size)])


def tiled_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [T, K] with weight [N, K] in tiled_mm's bits, rounded to the weight's dtype.

    It is fast where weight is a transposed view of [K, N] storage.
    """
    if not weight.t().is_contiguous():
        weight = weight.t().contiguous().t()
    return tiled_mm(x.float(), weight.float().t()).to(weight.dtype)


def tiled_bmm(x: Tensor, right: Tensor) -> Tensor:
    """x [R, K], or [B, R, K], @ right [B, K, N] -> [B, R, N]. R is a size of exact_sizes(K, N)."""
    rows = x.expand(right.shape[0], *x.shape[-2:])
    return torch.bmm(rows, filled_up(right))[..., : right.shape[-1]]
