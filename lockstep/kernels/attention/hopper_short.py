# mypy: ignore-errors
"""paged_attention for few short queries on Hopper, in Gluon: the bits of triton.py.

A program owns all of a row's (token, head of a group), up to 64, of one KV head, and some of its
segments. One warp keeps a ring of keys and values full, far ahead of the warpgroup that uses them:
few rows give few programs, and each must draw on memory with all it has. Every segment is left as
an entry; triton.py's second kernel adds them. See docs/kernels/attention.md.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from lockstep.kernels.attention import SEGMENT
from lockstep.kernels.attention.hopper_tiles import (
    O_LAYOUT,
    S_ROW,
    TILES,
    WIDTH,
    bring,
    copy,
    maps,
    segment_values,
    segment_weights,
)
from lockstep.kernels.attention.triton import ENTRY_BYTES, LOG2E, fold, room

ROWS = 64
PROGRAMS = 132
"""Multiprocessors: a program fills one."""


@gluon.jit
def _fetch(k_map, v_map, ring, full, empty, pages, tiles, column, PARTS: gl.constexpr):
    """The segments of a program: keys tile by tile, then values column part by column part."""
    i = 0
    for base in range(gl.program_id(1) * TILES, tiles, gl.num_programs(1) * TILES):
        stop = gl.minimum(base + TILES, tiles)
        for t in range(base, stop):
            row = gl.load(pages + t) * 64
            for part in gl.static_range(PARTS):
                i = copy(k_map, row, column + part * WIDTH, ring, full, empty, i)
        for part in gl.static_range(PARTS):
            for t in range(base, stop):
                row = gl.load(pages + t) * 64
                i = copy(v_map, row, column + part * WIDTH, ring, full, empty, i)


@gluon.jit
def _attend(
    q, queries, weights, fades, ones, ring, full, empty, tops, norms, parts, count, start, tiles,
    kv, scale, entries, H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """The warpgroup: leaves max, sum of weights and output of the program's segments."""
    PARTS: gl.constexpr = D // WIDTH
    bring(q, queries, 0, count, kv, H, GROUP, D)
    fence_async_shared()
    m = gl.arange(0, 64, S_ROW)
    last, keys = start + m // GROUP, start + count
    line, mine = m // GROUP * entries * H + kv * GROUP + m % GROUP, m < count * GROUP
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, O_LAYOUT))[None, :]
    i = 0
    for base in range(gl.program_id(1) * TILES, tiles, gl.num_programs(1) * TILES):
        at, tile_count = base * 64, gl.minimum(TILES, tiles - base)
        i, top, norm = segment_weights(
            queries, weights, fades, ones, ring, full, empty, i, tile_count, last, start, at, scale,
            PARTS,
        )  # fmt: skip
        entry, used = line + base // TILES * H, mine & (at <= last)
        gl.store(tops + entry, top, mask=used)
        gl.store(norms + entry, gl.convert_layout(gl.max(norm, 1), S_ROW), mask=used)
        place = gl.convert_layout(entry, gl.SliceLayout(1, O_LAYOUT))[:, None] * D + d
        used = gl.convert_layout(used, gl.SliceLayout(1, O_LAYOUT))[:, None]
        for part in gl.static_range(PARTS):
            total = segment_values(weights, fades, ring, full, empty, i, tile_count, at, keys)
            gl.store(parts + place + part * WIDTH, total, mask=used)
            i += tile_count


@gluon.jit(do_not_specialize=["table_stride", "entries", "Q"])
def _short_kernel(
    q, k_map, v_map, page_table, cu_seqlens, starts, tops, norms, parts, scale, table_stride,
    entries, Q, H: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """One row and KV head, some of its segments."""
    GROUP: gl.constexpr = H // HKV
    PARTS: gl.constexpr = D // WIDTH
    dtype: gl.constexpr = q.dtype.element_ty
    s, kv = (gl.program_id(0) // HKV).to(gl.int64), gl.program_id(0) % HKV
    first = gl.load(cu_seqlens + s).to(gl.int64)
    count = (gl.load(cu_seqlens + s + 1) - first).to(gl.int32)
    start = gl.load(starts + s).to(gl.int32)
    tiles = (start + count + 63) // 64
    if (count > 0) & (gl.program_id(1) * TILES < tiles):
        square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        queries = gl.allocate_shared_memory(dtype, [PARTS, 64, WIDTH], square)
        weights = gl.allocate_shared_memory(dtype, [TILES, 64, 64], square)
        ring = gl.allocate_shared_memory(dtype, [SLOTS, 64, WIDTH], square)
        ones = gl.allocate_shared_memory(dtype, [8, 64], square)
        fades = gl.allocate_shared_memory(
            gl.float32, [3, 64], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(SLOTS):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=1)
        ones.store(gl.full((8, 64), 1.0, dtype, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
        fence_async_shared()
        left = s * Q * entries * H
        gl.warp_specialize(
            [
                (_attend, (
                    q + first * (H * D), queries, weights, fades, ones, ring, full, empty,
                    tops + left, norms + left, parts + left * D, count, start, tiles, kv, scale,
                    entries, H, GROUP, D,
                )),
                (_fetch, (
                    k_map, v_map, ring, full, empty, page_table + s * table_stride, tiles, kv * D,
                    PARTS,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip


def fits(q: Tensor, k_cache: Tensor, page_table: Tensor, rows: int, query_len: int) -> bool:
    """Whether a row's queries fit a program, and all entries the room for them."""
    (_, heads, dim), segments = q.shape, triton.cdiv(page_table.shape[1] * 64, SEGMENT)
    size = rows * query_len * heads * segments * (dim + 2) * 4
    return query_len * (heads // k_cache.shape[2]) <= ROWS and size <= ENTRY_BYTES


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    gates: Tensor | None,
) -> Tensor:
    """paged_attention for head_dim 128 or 256, pages of 64, bf16 or fp16, contiguous caches.

    Only where it fits().
    """
    rows, (_, heads, dim), kv_heads = starts.shape[0], q.shape, k_cache.shape[2]
    out, segments = torch.empty_like(q), triton.cdiv(page_table.shape[1] * 64, SEGMENT)
    kept = room(rows * query_len * heads * segments, dim, q.device)
    side = min(segments, max(PROGRAMS // (rows * kv_heads), 1))
    _short_kernel[(rows * kv_heads, side)](
        q, *maps(k_cache, v_cache), page_table, cu_seqlens, starts, *kept, scale * LOG2E,
        page_table.stride(0), segments, query_len,
        heads, kv_heads, dim, 9 if dim == 256 else 10, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    fold(kept, cu_seqlens, starts, gates, out, segments, 1, query_len, False)
    return out
