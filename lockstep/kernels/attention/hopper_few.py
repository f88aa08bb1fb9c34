# mypy: ignore-errors
"""paged_attention of few query rows over packed caches on Hopper, in Gluon: paged.py's fold.

A program is one warp. It copies tiles of codes to shared memory, takes them from there into the
registers of mma.sync's operands, and unpacks them there: no number of the model's dtype goes
through shared memory, and no warp waits for another. Every segment is left as an entry for the
second kernel of paged.py. See docs/kernels/attention.md.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from lockstep.kernels import architecture
from lockstep.kernels.attention import SEGMENT, paged_attention
from lockstep.kernels.attention.paged import (
    ENTRY_BYTES,
    LOG2E,
    fold_entries,
    paged_attention_triton,
    supports,
)
from lockstep.kernels.attention._warpgroup import NO_SCORE, TILE
from lockstep.kernels.backends import arch_of
from lockstep.kernels.kv import KVCache
from lockstep.kernels.kv._launch import opened
from lockstep.kernels.kv._mma_layouts import LEFT, MMA, RIGHT, column_of
from lockstep.kernels.packed._form import target_of

MULTIPROCESSORS = 132
SEGMENT_TILES = gl.constexpr(SEGMENT // TILE)
COLUMN = gl.constexpr(gl.SliceLayout(0, MMA.value))


@gluon.constexpr_function
def copied(words):
    across = min(32, words // 4)
    return gl.BlockedLayout([1, 4], [32 // across, across], [1, 1], [1, 0])


@gluon.constexpr_function
def across_banks(words, together):
    """A tile [64, words]: 8 tokens, `together` words of each, meet in no bank, or in few."""
    phases = min(words // together, 32 // together)
    per_phase = max(1, 32 // words) if together == 4 else 2
    return gl.SwizzledSharedLayout(together, per_phase, max(phases, 1), [1, 0])


@gluon.jit
def _copy(
    codes_in, numbers_in, codes, numbers, page, at, keys, kv, PAGE: gl.constexpr,
    TOKEN: gl.constexpr, HKV: gl.constexpr, COUNT: gl.constexpr,
):  # fmt: skip
    """Starts to copy a tile: its codes, and the words of its numbers. 0 from `keys` on."""
    PLANES: gl.constexpr = codes_in.shape[0]
    WORDS: gl.constexpr = codes_in.shape[2]
    BESIDE: gl.constexpr = numbers_in.shape[0]
    layout: gl.constexpr = copied(WORDS)
    token = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, layout))[None, :]
    codes += page.to(gl.int64) * PAGE
    for plane in gl.static_range(PLANES):
        async_copy.async_copy_global_to_shared(
            codes_in.index(plane), codes + plane * WORDS + (token * TOKEN + word),
            mask=at + token + word * 0 < keys,
        )  # fmt: skip
    if COUNT > 0:
        flat: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        token = gl.arange(0, 64, flat)
        numbers += page.to(gl.int64) * (32 * HKV * COUNT)
        first = (token * HKV + kv) * COUNT // 2
        for word in gl.static_range(BESIDE):
            async_copy.async_copy_global_to_shared(
                numbers_in.index(word), numbers + first + word, mask=at + token < keys
            )
    async_copy.commit_group()


@gluon.jit
def _queries(q, count, kv, ROWS: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr,
             D: gl.constexpr):  # fmt: skip
    """[D, ROWS]: columns of 16 in the order in which keys are."""
    m = gl.arange(0, ROWS, gl.SliceLayout(0, RIGHT))
    s = gl.arange(0, D, gl.SliceLayout(1, RIGHT))
    d = column_of(s)
    place = (m // GROUP * H + kv * GROUP + m % GROUP) * D
    mask = (m < count * GROUP)[None, :] & (d >= 0)[:, None]
    return gl.load(q + place[None, :] + d[:, None], mask=mask, other=0.0)


@gluon.jit
def _leave(
    top, norm, total, tops, norms, parts, at, count, start, kv, entries, H: gl.constexpr,
    GROUP: gl.constexpr, PLACE: gl.constexpr,
):  # fmt: skip
    """The entry of the segment that the tile at `at` ends."""
    ROWS: gl.constexpr = total.shape[1]
    D: gl.constexpr = total.shape[0]
    segment = at // (SEGMENT_TILES * 64)
    m = gl.arange(0, ROWS, COLUMN)
    used = (m < count * GROUP) & (segment * (SEGMENT_TILES * 64) <= start + m // GROUP)
    to = (m // GROUP * entries + segment) * H + kv * GROUP + m % GROUP
    to = to.to(gl.int64)
    i = gl.arange(0, D, gl.SliceLayout(1, MMA))
    d = PLACE(i, D)
    gl.store(tops + to, top, mask=used)
    gl.store(norms + to, gl.max(norm, 0), mask=used)
    gl.store(parts + (to * D)[None, :] + d[:, None], total, mask=used[None, :])


@gluon.jit
def _weigh(scores, scale, start, at, GROUP: gl.constexpr):
    """scores [16, ROWS] scaled, those of keys from `at` on that a row does not see left out."""
    scores = scores * scale
    if at + 15 > start:
        key = at + gl.arange(0, 16, gl.SliceLayout(1, MMA))
        m = gl.arange(0, scores.shape[1], COLUMN)
        scores = gl.where(key[:, None] <= (start + m // GROUP)[None, :], scores, float("-inf"))
    return scores


@gluon.jit(do_not_specialize=["entries", "table_stride", "Q"])
def _warp_kernel(
    q, k_codes, v_codes, k_numbers, v_numbers, page_table, cu_seqlens, starts, tops, norms, parts,
    scale, entries, table_stride, Q,
    K_PAGE: gl.constexpr, K_TOKEN: gl.constexpr, K_HEAD: gl.constexpr,
    V_PAGE: gl.constexpr, V_TOKEN: gl.constexpr, V_HEAD: gl.constexpr,
    H: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, K_COUNT: gl.constexpr,
    V_COUNT: gl.constexpr, K_PLANES: gl.constexpr, V_PLANES: gl.constexpr, K_SHARE: gl.constexpr,
    V_SHARE: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr, PLACE: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """A KV head of a row, and the segments of one of num_programs(1) equal parts of its context.

    Strides are in words of four bytes."""
    GROUP: gl.constexpr = H // HKV
    dtype: gl.constexpr = q.dtype.element_ty
    s = (gl.program_id(0) // HKV).to(gl.int64)
    kv = gl.program_id(0) % HKV
    begin = gl.load(cu_seqlens + s).to(gl.int64)
    count = (gl.load(cu_seqlens + s + 1) - begin).to(gl.int32)
    start = gl.load(starts + s).to(gl.int32)
    keys = start + count
    tiles = (keys + 63) // 64
    segments = (tiles + SEGMENT_TILES - 1) // SEGMENT_TILES
    share = (segments + gl.num_programs(1) - 1) // gl.num_programs(1) * SEGMENT_TILES
    first = gl.program_id(1) * share
    if (count > 0) & (first < tiles):
        tiles = gl.minimum(tiles - first, share)
        k_flat: gl.constexpr = across_banks(D // K_SHARE, 4)
        v_flat: gl.constexpr = across_banks(D // V_SHARE, 8)
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        k_tile = gl.allocate_shared_memory(gl.int32, [K_PLANES, 64, D // K_SHARE], k_flat)
        v_tile = gl.allocate_shared_memory(gl.int32, [V_PLANES, 64, D // V_SHARE], v_flat)
        k_beside = gl.allocate_shared_memory(gl.int32, [max(K_COUNT // 2, 1), 64], flat)
        v_beside = gl.allocate_shared_memory(gl.int32, [max(V_COUNT // 2, 1), 64], flat)
        skipped = s * Q * entries * H
        pages = page_table + s * table_stride + first
        words: gl.constexpr = gl.pointer_type(gl.int32)
        k_from = k_codes.to(words, bitcast=True) + kv * K_HEAD
        v_from = v_codes.to(words, bitcast=True) + kv * V_HEAD
        k_and = k_from
        v_and = v_from
        if K_COUNT > 0:
            k_and = k_numbers.to(words, bitcast=True)
        if V_COUNT > 0:
            v_and = v_numbers.to(words, bitcast=True)
        at = first * 64
        page = gl.load(pages)
        _copy(k_tile, k_beside, k_from, k_and, page, at, keys, kv, K_PAGE, K_TOKEN, HKV, K_COUNT)
        _copy(v_tile, v_beside, v_from, v_and, page, at, keys, kv, V_PAGE, V_TOKEN, HKV, V_COUNT)
        page = gl.load(pages + 1, mask=at + 64 < keys, other=0)
        queries = _queries(q + begin * (H * D), count, kv, ROWS, H, GROUP, D)
        ones = gl.full((16, 16), 1.0, dtype, LEFT)
        top = gl.full((ROWS,), NO_SCORE, gl.float32, COLUMN)
        norm = gl.zeros((16, ROWS), gl.float32, MMA)
        total = gl.zeros((D, ROWS), gl.float32, MMA)
        for t in range(tiles):
            at = (first + t) * 64
            async_copy.wait_group(1)
            scores = ()
            new_top = top
            for i in gl.static_range(4):
                found = gl.zeros((16, ROWS), gl.float32, MMA)
                found = mma_v2(KEYS(k_tile, k_beside, i, kv, HKV, D), queries, found)
                found = _weigh(found, scale, start, at + 16 * i, GROUP)
                new_top = gl.maximum(new_top, gl.max(found, 0))
                scores = scores + (found,)
            _copy(
                k_tile, k_beside, k_from, k_and, page, at + 64, keys, kv, K_PAGE, K_TOKEN, HKV,
                K_COUNT,
            )  # fmt: skip
            fade = gl.exp2(top - new_top)[None, :]
            top = new_top
            norm = norm * fade
            total = total * fade
            async_copy.wait_group(1)
            for i in gl.static_range(4):
                weights = gl.exp2(scores[i] - new_top[None, :]).to(dtype)
                weights = gl.convert_layout(weights, RIGHT)
                norm = mma_v2(ones, weights, norm)
                total = mma_v2(VALUES(v_tile, v_beside, i, kv, HKV, D), weights, total)
            _copy(
                v_tile, v_beside, v_from, v_and, page, at + 64, keys, kv, V_PAGE, V_TOKEN, HKV,
                V_COUNT,
            )  # fmt: skip
            page = gl.load(pages + t + 2, mask=at + 128 < keys, other=0)
            if ((first + t + 1) % SEGMENT_TILES == 0) | (t + 1 == tiles):
                _leave(
                    top, norm, total, tops + skipped, norms + skipped, parts + skipped * D, at,
                    count, start, kv, entries, H, GROUP, PLACE,
                )  # fmt: skip
                top = gl.full((ROWS,), NO_SCORE, gl.float32, COLUMN)
                norm = gl.zeros((16, ROWS), gl.float32, MMA)
                total = gl.zeros((D, ROWS), gl.float32, MMA)
        async_copy.wait_group(0)


class Shape(NamedTuple):
    rows: int
    parts: int
    registers: int


def shape_of(rows: int, count: int, kv_heads: int, dim: int, segments: int) -> Shape:
    block = max(8, triton.next_power_of_2(count))
    parts = max(1, min(segments, 12 * MULTIPROCESSORS // (rows * kv_heads)))
    return Shape(block, parts, 168)


def paged_attention_hopper_few(
    q: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    gates: Tensor | None = None,
    shape: Shape | None = None,
) -> Tensor:
    rows = starts.shape[0]
    _, heads, dim = q.shape
    _, page, kv_heads, _ = k_cache.shape
    segments = triton.cdiv(page_table.shape[1] * page, SEGMENT)
    count = query_len * (heads // kv_heads)
    left = rows * query_len * heads * segments
    how = shape or shape_of(rows, count, kv_heads, dim, segments)
    target = target_of(q.device)
    k = opened(k_cache, q.dtype, target)
    v = opened(v_cache, q.dtype, target)
    f32 = dict(dtype=torch.float32, device=q.device)
    kept = [torch.empty(left * size, **f32) for size in (1, 1, dim)]
    left_of = k_cache.codec.fragments()
    right_of = v_cache.codec.fragments()
    strides = [
        stride * side.codes.dtype.itemsize // 4
        for side in (k, v)
        for stride in side.codes.stride()[:3]
    ]
    _warp_kernel[(rows * kv_heads, how.parts)](
        q, k.codes, v.codes, k.numbers, v.numbers, page_table, cu_seqlens, starts, *kept,
        scale * LOG2E, segments, page_table.stride(0), query_len, *strides, heads, kv_heads, dim,
        k.beside, v.beside, left_of.planes, right_of.planes, left_of.share, right_of.share,
        left_of.keys, right_of.values, right_of.place, how.rows,
        num_warps=1, maxnreg=how.registers, enable_fp_fusion=False,
    )  # fmt: skip
    out = torch.empty_like(q)
    fold_entries(kept, q, cu_seqlens, starts, query_len, segments, 1, False, gates, v, out)
    return out
