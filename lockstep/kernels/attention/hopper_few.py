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
from lockstep.kernels.kv._fp8_device import NATIVE_E4M3
from lockstep.kernels.packed._device import halves
from lockstep.kernels.packed._form import target_of

MULTIPROCESSORS = 132
SEGMENT_TILES = gl.constexpr(SEGMENT // TILE)
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
COLUMN = gl.constexpr(gl.SliceLayout(0, MMA.value))

PAIRS = gl.constexpr("""
{
    .reg .b32 x, y;
    .reg .b16 a, b, c, d;
    .reg .b16 e, f, g, h;
    .reg .b32 s, t, u, v;
    .reg .f32 i, j, k, l, m, n, o, p;
    prmt.b32 x, $4, $5, 0x5140;
    prmt.b32 y, $4, $5, 0x7362;
    mov.b32 {a, b}, x;
    mov.b32 {c, d}, y;
    cvt.rn.f16x2.e4m3x2 s, a;
    cvt.rn.f16x2.e4m3x2 t, b;
    cvt.rn.f16x2.e4m3x2 u, c;
    cvt.rn.f16x2.e4m3x2 v, d;
    mov.b32 {a, b}, s;
    mov.b32 {c, d}, t;
    mov.b32 {e, f}, u;
    mov.b32 {g, h}, v;
    cvt.f32.f16 i, a;
    cvt.f32.f16 j, b;
    cvt.f32.f16 k, c;
    cvt.f32.f16 l, d;
    cvt.f32.f16 m, e;
    cvt.f32.f16 n, f;
    cvt.f32.f16 o, g;
    cvt.f32.f16 p, h;
    cvt.rn.bf16x2.f32 $0, j, i;
    cvt.rn.bf16x2.f32 $1, l, k;
    cvt.rn.bf16x2.f32 $2, n, m;
    cvt.rn.bf16x2.f32 $3, p, o;
}
""")


@gluon.constexpr_function
def bits(dim, first, last, rank):
    """Bases of a layout: bits first .. last - 1 of dimension dim."""
    return [[(1 << b) if i == dim else 0 for i in range(rank)] for b in range(first, last)]


@gluon.constexpr_function
def log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def words_left(words):
    """Words of keys [16, words], four of a group of 16 columns side by side in four lanes."""
    lanes = bits(1, 0, 2, 2) + bits(0, 0, 3, 2)
    registers = bits(0, 3, 4, 2) + bits(1, 2, log2(words), 2)
    return gl.DistributedLinearLayout(registers, lanes, [], [], [16, words])


@gluon.constexpr_function
def words_top(words):
    """Words of values [words, 16]: pairs of tokens in a thread."""
    lanes = bits(1, 1, 3, 2) + bits(0, 0, 3, 2)
    registers = bits(1, 0, 1, 2) + bits(0, 3, 4, 2) + bits(1, 3, 4, 2) + bits(0, 4, log2(words), 2)
    return gl.DistributedLinearLayout(registers, lanes, [], [], [words, 16])


@gluon.constexpr_function
def copied(words):
    across = min(32, words // 4)
    return gl.BlockedLayout([1, 4], [32 // across, across], [1, 1], [1, 0])


@gluon.jit
def _copy(slot, codes, page, at, keys, P: gl.constexpr, T: gl.constexpr, WORDS: gl.constexpr):
    layout: gl.constexpr = copied(WORDS)
    token = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, layout))[None, :]
    codes += page.to(gl.int64) * P
    async_copy.async_copy_global_to_shared(
        slot, codes + (token * T + word), mask=at + token + word * 0 < keys
    )
    async_copy.commit_group()


@gluon.jit
def _keys(slot, i: gl.constexpr, D: gl.constexpr):
    """16 keys [16, D] of a tile, from the i-th 16 on."""
    WORDS: gl.constexpr = D // 4
    word = slot.slice(16 * i, 16).load(words_left(WORDS))
    p0, p1 = gl.inline_asm_elementwise(
        NATIVE_E4M3, "=&r,=&r,r", [word], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    l0, h0 = halves(p0, gl.bfloat16)
    l1, h1 = halves(p1, gl.bfloat16)
    four = gl.join(gl.join(l0, h0), gl.join(l1, h1))
    four = gl.reshape(four, (16, D // 16, 4, 2, 2))
    return gl.convert_layout(gl.reshape(gl.permute(four, (0, 1, 4, 2, 3)), (16, D)), LEFT)


@gluon.jit
def _values(slot, i: gl.constexpr, D: gl.constexpr):
    """The columns [D, 16] of 16 values: number c of word w at c D / 4 + w."""
    WORDS: gl.constexpr = D // 4
    word = slot.slice(16 * i, 16).permute((1, 0)).load(words_top(WORDS))
    a, b, c, d = gl.inline_asm_elementwise(
        PAIRS, "=&r,=&r,=&r,=&r,r,r", [word],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    four = gl.join(gl.join(a, c), gl.join(b, d))
    return gl.convert_layout(gl.reshape(gl.permute(four, (2, 3, 0, 1)), (D, 16)), LEFT)


@gluon.jit
def _queries(q, count, kv, ROWS: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr,
             D: gl.constexpr):  # fmt: skip
    """[D, ROWS]: columns of 16 in the order in which keys are."""
    m = gl.arange(0, ROWS, gl.SliceLayout(0, RIGHT))
    s = gl.arange(0, D, gl.SliceLayout(1, RIGHT))
    d = s // 16 * 16 + s % 8 // 2 * 4 + s % 16 // 8 * 2 + s % 2
    place = (m // GROUP * H + kv * GROUP + m % GROUP) * D
    mask = (m < count * GROUP)[None, :] & (d >= 0)[:, None]
    return gl.load(q + place[None, :] + d[:, None], mask=mask, other=0.0)


@gluon.jit
def _leave(
    top, norm, total, tops, norms, parts, at, count, start, kv, entries, H: gl.constexpr,
    GROUP: gl.constexpr,
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
    d = i % (D // 4) * 4 + i // (D // 4)
    gl.store(tops + to, top, mask=used)
    gl.store(norms + to, gl.max(norm, 0), mask=used)
    gl.store(parts + (to * D)[None, :] + d[:, None], total, mask=used[None, :])


@gluon.jit(do_not_specialize=["entries", "table_stride", "Q"])
def _warp_kernel(
    q, k_codes, v_codes, page_table, cu_seqlens, starts, tops, norms, parts, scale, entries,
    table_stride, Q,
    K_PAGE: gl.constexpr, K_TOKEN: gl.constexpr, K_HEAD: gl.constexpr,
    V_PAGE: gl.constexpr, V_TOKEN: gl.constexpr, V_HEAD: gl.constexpr,
    H: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """A KV head of a row, and the segments of one of num_programs(1) equal parts of its context."""
    GROUP: gl.constexpr = H // HKV
    WORDS: gl.constexpr = D // 4
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
        k_flat: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
        v_flat: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
        k_slot = gl.allocate_shared_memory(gl.int32, [64, WORDS], k_flat)
        v_slot = gl.allocate_shared_memory(gl.int32, [64, WORDS], v_flat)
        skipped = s * Q * entries * H
        pages = page_table + s * table_stride + first
        keys_at = k_codes.to(gl.pointer_type(gl.int32), bitcast=True) + kv * (K_HEAD // 4)
        values_at = v_codes.to(gl.pointer_type(gl.int32), bitcast=True) + kv * (V_HEAD // 4)
        at = first * 64
        page = gl.load(pages)
        _copy(k_slot, keys_at, page, at, keys, K_PAGE // 4, K_TOKEN // 4, WORDS)
        _copy(v_slot, values_at, page, at, keys, V_PAGE // 4, V_TOKEN // 4, WORDS)
        page = gl.load(pages + 1, mask=at + 64 < keys, other=0)
        queries = _queries(q + begin * (H * D), count, kv, ROWS, H, GROUP, D)
        ones = gl.full((16, 16), 1.0, dtype, LEFT)
        top = gl.full((ROWS,), NO_SCORE, gl.float32, COLUMN)
        norm = gl.zeros((16, ROWS), gl.float32, MMA)
        total = gl.zeros((D, ROWS), gl.float32, MMA)
        m = gl.arange(0, ROWS, COLUMN)
        for t in range(tiles):
            at = (first + t) * 64
            async_copy.wait_group(1)
            scores = ()
            new_top = top
            for i in gl.static_range(4):
                found = gl.zeros((16, ROWS), gl.float32, MMA)
                found = mma_v2(_keys(k_slot, i, D), queries, found) * scale
                if at + 63 > start:
                    key = at + 16 * i + gl.arange(0, 16, gl.SliceLayout(1, MMA))
                    seen = key[:, None] <= (start + m // GROUP)[None, :]
                    found = gl.where(seen, found, float("-inf"))
                new_top = gl.maximum(new_top, gl.max(found, 0))
                scores = scores + (found,)
            _copy(k_slot, keys_at, page, at + 64, keys, K_PAGE // 4, K_TOKEN // 4, WORDS)
            fade = gl.exp2(top - new_top)[None, :]
            top = new_top
            norm = norm * fade
            total = total * fade
            async_copy.wait_group(1)
            for i in gl.static_range(4):
                weights = gl.exp2(scores[i] - new_top[None, :]).to(dtype)
                weights = gl.convert_layout(weights, RIGHT)
                norm = mma_v2(ones, weights, norm)
                total = mma_v2(_values(v_slot, i, D), weights, total)
            _copy(v_slot, values_at, page, at + 64, keys, V_PAGE // 4, V_TOKEN // 4, WORDS)
            page = gl.load(pages + t + 2, mask=at + 128 < keys, other=0)
            if ((first + t + 1) % SEGMENT_TILES == 0) | (t + 1 == tiles):
                _leave(
                    top, norm, total, tops + skipped, norms + skipped, parts + skipped * D, at, count,
                    start, kv, entries, H, GROUP,
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
    _warp_kernel[(rows * kv_heads, how.parts)](
        q, k.codes, v.codes, page_table, cu_seqlens,
        starts, *kept, scale * LOG2E, segments, page_table.stride(0), query_len,
        *k.codes.stride()[:3], *v.codes.stride()[:3], heads, kv_heads, dim, how.rows,
        num_warps=1, maxnreg=how.registers, enable_fp_fusion=False,
    )  # fmt: skip
    out = torch.empty_like(q)
    fold_entries(kept, q, cu_seqlens, starts, query_len, segments, 1, False, gates, v, out)
    return out
