# mypy: ignore-errors
"""Split-KV work of the kernels whose every KV split becomes a partial, in Gluon.

For quantized_hopper.py and quantized_decode_hopper.py: a CTA takes the (token, query head of the
group) rows of one KV head, ROWS of them in registers, and a run of KV splits. The combine kernel of
triton.py combines the partials.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lockstep.kernels.attention import KV_SPLIT
from lockstep.kernels.attention.triton import empty_partials
from lockstep.kernels.attention.warpgroup import TILES_PER_SPLIT
from lockstep.kernels.device.ragged_rows import row_of
from lockstep.kernels.formats.kv import QuantizedKV
from lockstep.kernels.integers import ceil_div


@gluon.jit
def cta_work(cu_seqlens, starts, HKV: gl.constexpr):
    """Return the work of this CTA, one of num_programs(1) equal parts of a row's context.

    Returns: batch row, KV head; the row's first token, token count and start; first tile of the
    CTA, tiles per CTA, tiles of the row.
    """
    s = (gl.program_id(0) // HKV).to(gl.int64)
    kv = gl.program_id(0) % HKV
    first_token, count, start = row_of(cu_seqlens, starts, s)
    tiles = (start + count + 63) // 64
    num_splits = (tiles + TILES_PER_SPLIT - 1) // TILES_PER_SPLIT
    # Whole splits: a partial never spans two CTAs.
    tiles_per_cta = (num_splits + gl.num_programs(1) - 1) // gl.num_programs(1) * TILES_PER_SPLIT
    first_tile = gl.program_id(1) * tiles_per_cta
    return s, kv, first_token, count, start, first_tile, tiles_per_cta, tiles


@gluon.jit
def identity_column(i, D: gl.constexpr):
    """Return row i of an accumulator as its column, for tiles dequantized in order."""
    return i


@gluon.jit
def store_partial(
    row_max, row_sum, acc, partials, first_key, count, start, kv,
    num_partials, runtime_zero, H: gl.constexpr, GROUP: gl.constexpr, COLUMN: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Store the partial of the KV split that ends with the tile at first_key.

    partials: pointers to the row's partial maxima, sums and accumulators. row_max: [ROWS]. row_sum:
    [.., ROWS], equal rows. acc: [D, ROWS], whose row i is column
    COLUMN(i). runtime_zero: 0, not known to the compiler, so that it does not hoist addresses that
    do not depend on the tile into registers across the loop.
    """
    ROWS: gl.constexpr = acc.shape[1]
    D: gl.constexpr = acc.shape[0]
    split = first_key // (TILES_PER_SPLIT * 64)
    m = runtime_zero + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    # Rows that see no key of this split have no such partial.
    stores = (m < count * GROUP) & (split * (TILES_PER_SPLIT * 64) <= start + m // GROUP)
    partial = (m // GROUP * num_partials + split) * H + kv * GROUP + m % GROUP
    partial = partial.to(gl.int64)
    column = COLUMN(gl.arange(0, D, gl.SliceLayout(1, layout)), D).to(gl.int64)
    sum_row = runtime_zero + gl.arange(0, row_sum.shape[0], gl.SliceLayout(1, layout))
    gl.store(partials[0] + partial, row_max, mask=stores)
    # One of the equal rows is stored.
    sum_mask = (sum_row == 0)[:, None] & stores[None, :]
    gl.store(partials[1] + partial[None, :] + sum_row.to(gl.int64)[:, None], row_sum, mask=sum_mask)
    gl.store(partials[2] + (partial * D)[None, :] + column[:, None], acc, mask=stores[None, :])


class SplitKVSizes(NamedTuple):
    """Sizes of a step whose rows store every KV split as a partial.

    count: (token, query head) rows of a KV head. num_splits: of the longest row that the page table
    has room for.
    """

    rows: int
    heads: int
    kv_heads: int
    dim: int
    count: int
    num_splits: int

    @classmethod
    def from_arguments(
        cls, q: Tensor, k_cache: QuantizedKV, page_table: Tensor, starts: Tensor, query_len: int
    ) -> "SplitKVSizes":
        """Return the sizes of paged_attention's arguments."""
        _, heads, dim = q.shape
        _, page, kv_heads, _ = k_cache.shape
        count = query_len * (heads // kv_heads)
        num_splits = ceil_div(page_table.shape[1] * page, KV_SPLIT)
        return cls(starts.shape[0], heads, kv_heads, dim, count, num_splits)

    def head_sizes(self) -> tuple[int, int, int]:
        """Return (H, HKV, D)."""
        return self.heads, self.kv_heads, self.dim

    def num_partials(self) -> int:
        """Return the number of split-KV partials over all rows."""
        return self.rows * self.kv_heads * self.count * self.num_splits

    def partial_bytes(self) -> int:
        """Return the bytes of all partials."""
        return self.num_partials() * (self.dim + 2) * 4

    def empty_partials(self, device: torch.device) -> list[Tensor]:
        """Allocate all partials."""
        return empty_partials(self.num_partials(), self.dim, device)
