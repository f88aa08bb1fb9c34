"""Row tiles: batch-invariant matrix products on a CPU.

A BLAS library chooses its inner loops by the number of rows. So a row may have other bits in a
batch of 4 rows than in a batch of 40. Products are therefore cut into tiles of a few fixed numbers
of rows, padded with zeros. A tile of BASE rows on one thread defines the bits. Another size serves
a shape (K, N) only if a probe of that shape gives equal bits.

With the right operand stored [K, N], MKL gives equal bits from 2 rows up, until it blocks K. Stored
[N, K] it does so only from 16 rows up and is 3 times slower (docs/decisions/0003-cpu-row-tiles.md).
Threads split the columns. Where N is no multiple of the columns of a thread's loop, bits may
differ; such a product runs on one thread.

A right operand with few columns is padded with zeros. MKL has special loops for narrow operands, in
which a row's bits depend on its position in the tile (AMD Zen 5, 5 to 11 columns).
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.threads import one_thread

BASE = 8
"""Rows of the tile that defines the bits."""
SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 384)
"""Numbers of rows that are probed."""
MIN_COLUMNS = 16
"""Minimum columns of a right operand; narrower ones are padded."""


def pad_columns(right: Tensor) -> Tensor:
    """Pad right [..., K, N] with columns of zeros to MIN_COLUMNS."""
    missing = MIN_COLUMNS - right.shape[-1]
    return F.pad(right, (0, missing)) if missing > 0 else right


def exact_sizes(k: int, n: int) -> tuple[int, ...]:
    """Return the tile sizes that give the defined bits for a right operand [k, n], ascending.

    They are valid for this CPU and torch's current number of threads, which differs between steps.
    Empty where no size gives the bits of one thread.
    """
    return probed_sizes(k, max(n, MIN_COLUMNS), torch.get_num_threads())


@cache
def probed_sizes(k: int, n: int, threads: int) -> tuple[int, ...]:
    """Probe the sizes of exact_sizes. threads: torch's current number, part of the cache's key."""
    generator = torch.Generator().manual_seed(n * 65537 + k)
    x = wide_rows(SIZES[-1], k, generator)
    right = torch.randn(k, n, generator=generator)
    base = tile_mm(x, right)
    stacked = torch.stack([right, -right])
    exact = []
    for size in SIZES:
        tile = x[:size].expand(2, size, k)
        single = torch.equal(torch.mm(x[:size], right), base[:size])
        if single and torch.equal(torch.bmm(tile, stacked)[0], base[:size]):
            exact.append(size)
    if BASE in exact:
        return tuple(exact)
    return (BASE,) if threads == 1 else ()


def wide_rows(rows: int, k: int, generator: torch.Generator) -> Tensor:
    """Return random numbers [rows, k] over 41 powers of two.

    With such exponents another order of additions rounds differently somewhere.
    """
    x = torch.randn(rows, k, generator=generator)
    return x * torch.exp2(torch.randint(-20, 21, x.shape, generator=generator).float())


def tile_mm(x: Tensor, right: Tensor) -> Tensor:
    """Multiply x [T, K] @ right [K, N] -> [T, N] in fp32: the definition of the bits.

    One tile of BASE rows at a time, padded with zeros, on one thread.
    """
    columns = right.shape[1]
    right = pad_columns(right).contiguous()
    products = []
    with one_thread():
        for rows in x.split(BASE):
            tile = F.pad(rows, (0, 0, 0, BASE - len(rows)))
            products.append(torch.mm(tile, right)[: len(rows)])
    return torch.cat(products)[:, :columns].contiguous()


def padded_rows(rows: int, sizes: tuple[int, ...]) -> int:
    """Return the smallest of the sizes with at least `rows` rows, or the largest size."""
    return next((size for size in sizes if size >= rows), sizes[-1])


def tiled_mm(x: Tensor, right: Tensor) -> Tensor:
    """Multiply x [T, K] @ right [K, N] with tile_mm's bits, in the largest exact tiles that fit."""
    rows, k = x.shape
    columns = right.shape[1]
    if columns < MIN_COLUMNS:
        return tiled_mm(x, pad_columns(right))[:, :columns].contiguous()
    sizes = exact_sizes(k, columns)
    if not sizes:
        with one_thread():
            return tiled_mm(x, right)
    size = padded_rows(rows, sizes)
    if rows == size:
        return torch.mm(x, right)
    if rows < size:
        # expand copies no memory: rows of a tile do not influence each other, so any filler serves.
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
    """Multiply x [R, K] or [B, R, K] @ right [B, K, N] -> [B, R, N]; R is in exact_sizes(K, N)."""
    rows = x if x.dim() == 3 else x.expand(right.shape[0], *x.shape)
    columns = right.shape[-1]
    if columns < MIN_COLUMNS:
        return torch.bmm(rows, pad_columns(right))[..., :columns]
    return torch.bmm(rows, right)
