# mypy: ignore-errors
"""Programs that share a row's segments, and leave each as an entry for triton.py's second kernel.

In Gluon, for quantized_decode_hopper.py and quantized_hopper.py: a program takes the
(token, head of a group) rows of one KV head, ROWS of them in registers.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lockstep.kernels.attention import SEGMENT
from lockstep.kernels.attention.triton import empty_entries
from lockstep.kernels.attention.warpgroup import TILES
from lockstep.kernels.device.ragged_rows import row_of
from lockstep.kernels.formats.kv import PackedKV

MULTIPROCESSORS = 132
"""Of an H200."""


@gluon.jit
def part_of(cu_seqlens, starts, HKV: gl.constexpr):
    """A program's row and KV head; the row's first token, tokens and start; of num_programs(1)
    equal parts of its context the program's first tile, and how many a part has; the row's tiles.
    """
    s = (gl.program_id(0) // HKV).to(gl.int64)
    kv = gl.program_id(0) % HKV
    begin, count, start = row_of(cu_seqlens, starts, s)
    tiles = (start + count + 63) // 64
    segments = (tiles + TILES - 1) // TILES
    share = (segments + gl.num_programs(1) - 1) // gl.num_programs(1) * TILES
    first = gl.program_id(1) * share
    return s, kv, begin, count, start, first, share, tiles


@gluon.jit
def place_as_is(i, D: gl.constexpr):
    """The column of a sum's i-th line, where codes are unpacked in order."""
    return i


@gluon.jit
def leave(
    top, norm, total, tops, norms, parts, at, count, start, kv, entries, zero, H: gl.constexpr,
    GROUP: gl.constexpr, PLACE: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The entry of the segment that the tile at `at` ends. top [ROWS], norm [.., ROWS], total
    [D, ROWS], whose i-th line is column PLACE(i). zero: 0, not a constant where what does not
    depend on the tile would be held in registers around a loop."""
    ROWS: gl.constexpr = total.shape[1]
    D: gl.constexpr = total.shape[0]
    segment = at // (TILES * 64)
    m = zero + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    used = (m < count * GROUP) & (segment * (TILES * 64) <= start + m // GROUP)
    to = (m // GROUP * entries + segment) * H + kv * GROUP + m % GROUP
    to = to.to(gl.int64)
    d = PLACE(gl.arange(0, D, gl.SliceLayout(1, layout)), D).to(gl.int64)
    line = zero + gl.arange(0, norm.shape[0], gl.SliceLayout(1, layout))
    gl.store(tops + to, top, mask=used)
    first = (line == 0)[:, None] & used[None, :]
    gl.store(norms + to[None, :] + line.to(gl.int64)[:, None], norm, mask=first)
    gl.store(parts + (to * D)[None, :] + d[:, None], total, mask=used[None, :])


class Sizes(NamedTuple):
    """Of a step whose rows all leave entries.

    count: (token, head of a group) rows of a KV head. segments: of the longest row that the page
    table has room for.
    """

    rows: int
    heads: int
    kv_heads: int
    dim: int
    count: int
    segments: int

    @classmethod
    def of(
        cls, q: Tensor, k_cache: PackedKV, page_table: Tensor, starts: Tensor, query_len: int
    ) -> "Sizes":
        """Those of paged_attention's arguments."""
        _, heads, dim = q.shape
        _, page, kv_heads, _ = k_cache.shape
        count = query_len * (heads // kv_heads)
        segments = triton.cdiv(page_table.shape[1] * page, SEGMENT)
        return cls(starts.shape[0], heads, kv_heads, dim, count, segments)

    def layer(self) -> tuple[int, int, int]:
        """H, HKV, D."""
        return self.heads, self.kv_heads, self.dim

    def entries(self) -> int:
        """As many as all rows leave."""
        return self.rows * self.kv_heads * self.count * self.segments

    def entry_bytes(self) -> int:
        """Of all of them."""
        return self.entries() * (self.dim + 2) * 4

    def empty_entries(self, device: torch.device) -> list[Tensor]:
        """Memory for them."""
        return empty_entries(self.entries(), self.dim, device)
