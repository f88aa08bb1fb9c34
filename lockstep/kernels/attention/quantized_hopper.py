# mypy: ignore-errors
"""paged_attention over packed caches on Hopper, in Gluon: the fold of triton.py, bit for bit. Few
rows go through quantized_decode_hopper.py.

A program owns the (token, head of a group) rows of one KV head and a run of segments. One group of
warps unpacks keys and one unpacks values, tile by tile, into shared memory, while there is room.
One warpgroup weighs the keys, one adds the values. So unpacking, weighing and adding run beside
each other. Every segment is left as an entry for the second kernel of triton.py. See
docs/kernels/attention.md.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lockstep.kernels import architecture
from lockstep.kernels.attention import paged_attention
from lockstep.kernels.attention.quantized_decode_hopper import paged_attention_few, serves
from lockstep.kernels.attention.quantized_prefill_hopper import (
    paged_attention_scratch,
    scratch_fits,
)
from lockstep.kernels.attention.split_kv import (
    MULTIPROCESSORS,
    Sizes,
    leave,
    part_of,
    place_as_is,
)
from lockstep.kernels.attention.triton import (
    ENTRY_BYTES,
    LOG2E,
    fold_entries,
    paged_attention_triton,
    supports,
)
from lockstep.kernels.attention.warpgroup import NO_SCORE, TILE, TILES
from lockstep.kernels.backends import resolve_architecture
from lockstep.kernels.device.gluon_compat import barrier
from lockstep.kernels.formats.kv import KVCache
from lockstep.kernels.formats.kv.launch import opened
from lockstep.kernels.formats.weights.operand import target_of

MOST_ROWS = {128: 64, 256: 32}
"""(token, head of a group) rows by head dim: as many as the registers of one warpgroup hold."""


@gluon.constexpr_function
def lanes_of(columns, share, warps):
    """How warps hold what a codec fetches of a tile [64, columns]: 16 bytes a lane, but for
    words of four codes only 8, so that what neighbours unpack lies side by side."""
    wide = min(2 if share == 4 else 4, TILE * columns // (32 * warps))
    across = min(32, columns // wide)
    return gl.BlockedLayout([1, wide], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def _fetched(
    codes, numbers, page, kv, P_STRIDE: gl.constexpr, T_STRIDE: gl.constexpr, COUNT: gl.constexpr,
    HKV: gl.constexpr, D: gl.constexpr, SHARE: gl.constexpr, FETCH: gl.constexpr,
):  # fmt: skip
    """What the codec's FETCH loads of a page of keys or values, whatever stands behind the keys."""
    COLUMNS: gl.constexpr = D // SHARE
    layout: gl.constexpr = lanes_of(COLUMNS, SHARE, gl.num_warps())
    token = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    page = page.to(gl.int64)
    codes += page * P_STRIDE
    if COUNT > 0:
        numbers += (page * (64 * HKV) + kv) * COUNT
        numbers = numbers + token * (HKV * COUNT)
    return FETCH(codes + token.to(gl.int64) * T_STRIDE, numbers, column, token < 64, D)


@gluon.jit
def _put(
    found, constant, ring, full, empty, t, live, SHARE: gl.constexpr, UNPACK: gl.constexpr,
    ZEROS: gl.constexpr,
):  # fmt: skip
    """Unpacks the t-th tile into the ring. ZEROS: rows from `live` on are zeros."""
    SLOTS: gl.constexpr = ring.shape[0]
    D: gl.constexpr = ring.shape[2]
    layout: gl.constexpr = lanes_of(D // SHARE, SHARE, gl.num_warps())
    column = gl.arange(0, D // SHARE, gl.SliceLayout(0, layout))[None, :]
    slot = ring.index(t % SLOTS)
    mbarrier.wait(empty.index(t % SLOTS), (t // SLOTS & 1) ^ 1)
    slot.store(UNPACK(found, column, constant, D).to(ring.dtype))
    if ZEROS:
        if live < 64:
            barrier()
            _zero_behind(slot, live)
    fence_async_shared()
    barrier()
    mbarrier.arrive(full.index(t % SLOTS))


@gluon.jit
def _zero_behind(slot, live):
    """Zeros in a tile [64, D] from row `live` on, some rows at a time."""
    D: gl.constexpr = slot.shape[1]
    ROWS: gl.constexpr = 4096 // D
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    for part in gl.static_range(64 // ROWS):
        rows = slot.slice(part * ROWS, ROWS)
        values = rows.load(layout)
        rows.store(gl.where(part * ROWS + row < live, values, gl.zeros_like(values)))


@gluon.jit
def _page_of(listed, t):
    """The t-th page: listed holds 32 of them, one in a lane. A load here would be waited for."""
    lane = gl.arange(0, 32, listed.type.layout)
    return gl.max(gl.where(lane == t % 32, listed, 0), 0)


@gluon.jit
def _unpack(
    codes, numbers, constant, ring, full, empty, pages, first, tiles, keys, kv,
    P_STRIDE: gl.constexpr, T_STRIDE: gl.constexpr, H_STRIDE: gl.constexpr, COUNT: gl.constexpr,
    HKV: gl.constexpr, SHARE: gl.constexpr, FETCH: gl.constexpr, UNPACK: gl.constexpr,
    ZEROS: gl.constexpr,
):  # fmt: skip
    """Tiles first .. first + tiles - 1 into the ring, the next one's codes loaded ahead."""
    D: gl.constexpr = ring.shape[2]
    codes += kv * H_STRIDE
    pages += first
    live = keys - first * 64
    last = (live - 1) // 64
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    listed = gl.load(pages + lane, mask=lane <= last, other=0)
    ahead = _fetched(
        codes, numbers, _page_of(listed, 0), kv, P_STRIDE, T_STRIDE, COUNT, HKV, D, SHARE, FETCH
    )
    for t in range(tiles):
        found = ahead
        if (t + 1) % 32 == 0:
            listed = gl.load(pages + t + 1 + lane, mask=t + 1 + lane <= last, other=0)
        page = _page_of(listed, t + 1)
        ahead = _fetched(codes, numbers, page, kv, P_STRIDE, T_STRIDE, COUNT, HKV, D, SHARE, FETCH)
        _put(found, constant, ring, full, empty, t, live - t * 64, SHARE, UNPACK, ZEROS)


@gluon.jit
def _scores(queries, ring, full, t, layout: gl.constexpr):
    """Starts q k of the t-th tile [64, 64]. t >> 30 is 0: what depends on t is not held in
    registers around the loop."""
    SLOTS: gl.constexpr = ring.shape[0]
    mbarrier.wait(full.index(t % SLOTS), t // SLOTS & 1)
    scores = gl.zeros((64, 64), gl.float32, layout)
    keys = ring.index(t % SLOTS).permute((1, 0))
    return warpgroup_mma(queries.index(t >> 30), keys, scores, use_acc=False, is_async=True)


@gluon.jit
def _weigh(
    scores, scale, top, start, at, dtype: gl.constexpr, GROUP: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Online softmax of a tile: the new maximum, the factor of what was before, the weights.

    at >> 30 is 0: what depends on it is not held in registers around the loop.
    """
    scores = scores * scale
    if at + 63 > start:
        key = at + gl.arange(0, 64, gl.SliceLayout(0, layout))
        m = (at >> 30) + gl.arange(0, 64, gl.SliceLayout(1, layout))
        scores = gl.where(key[None, :] <= (start + m // GROUP)[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    return new_top, gl.exp2(top - new_top), gl.exp2(scores - new_top[:, None]).to(dtype)


@gluon.jit
def _weigh_tiles(
    queries, weights, fades, peaks, k_ring, k_full, k_empty, w_full, v_empty, start, first, tiles,
    scale, GROUP: gl.constexpr,
):  # fmt: skip
    """The warpgroup that weighs tiles first .. first + tiles - 1, beside the next one's scores."""
    SLOTS: gl.constexpr = k_ring.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    top = gl.full((64,), NO_SCORE, gl.float32, gl.SliceLayout(1, layout))
    scores = warpgroup_mma_wait(0, deps=(_scores(queries, k_ring, k_full, 0, layout),))
    barrier()
    mbarrier.arrive(k_empty.index(0))
    for t in range(tiles):
        ahead = _scores(queries, k_ring, k_full, t + 1, layout)
        at = (first + t) * 64
        top, fade, mine = _weigh(scores, scale, top, start, at, k_ring.dtype, GROUP, layout)
        mbarrier.wait(v_empty.index(t % SLOTS), (t // SLOTS & 1) ^ 1)
        weights.index(t % SLOTS).store(mine)
        fades.index(t % SLOTS).store(fade)
        peaks.index(t % SLOTS).store(top)
        fence_async_shared()
        scores = warpgroup_mma_wait(0, deps=(ahead,))
        barrier()
        mbarrier.arrive(w_full.index(t % SLOTS))
        mbarrier.arrive(k_empty.index((t + 1) % SLOTS))
        if (t + 1) % TILES == 0:
            top = gl.full((64,), NO_SCORE, gl.float32, gl.SliceLayout(1, layout))


@gluon.jit
def _add_tiles(
    ones, weights, fades, peaks, v_ring, w_full, v_full, v_empty, tops, norms, parts, count, start,
    kv, first, tiles, entries, H: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The warpgroup that adds weighed values: the same tiles, every segment an entry."""
    SLOTS: gl.constexpr = v_ring.shape[0]
    D: gl.constexpr = v_ring.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    norm = gl.zeros((64, ROWS), gl.float32, layout)
    total = gl.zeros((D, ROWS), gl.float32, layout)
    for t in range(tiles):
        mbarrier.wait(w_full.index(t % SLOTS), t // SLOTS & 1)
        fade = fades.index(t % SLOTS).slice(0, ROWS).load(gl.SliceLayout(0, layout))[None, :]
        weighing = weights.index(t % SLOTS).slice(0, ROWS).permute((1, 0))
        norm = warpgroup_mma(ones.index(t >> 30), weighing, norm * fade, is_async=True)
        mbarrier.wait(v_full.index(t % SLOTS), t // SLOTS & 1)
        values = v_ring.index(t % SLOTS).permute((1, 0))
        total = warpgroup_mma(values, weighing, total * fade, is_async=True)
        norm, total = warpgroup_mma_wait(0, deps=(norm, total))
        top = peaks.index(t % SLOTS).slice(0, ROWS).load(gl.SliceLayout(0, layout))
        barrier()  # all warps have left the slot
        mbarrier.arrive(v_empty.index(t % SLOTS))
        if ((t + 1) % TILES == 0) | (t + 1 == tiles):
            at = (first + t) * 64
            leave(
                top, norm, total, tops, norms, parts, at, count, start, kv, entries, at >> 30, H,
                GROUP, place_as_is, layout,
            )  # fmt: skip
            norm = gl.zeros((64, ROWS), gl.float32, layout)
            total = gl.zeros((D, ROWS), gl.float32, layout)


@gluon.jit
def _load_queries(q, queries, count, kv, H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr):
    """Query rows into shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = queries.shape[0]
    m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    place = (m // GROUP * H + kv * GROUP + m % GROUP) * D
    mask = (m < count * GROUP)[:, None]
    queries.store(gl.load(q + place[:, None] + d[None, :], mask=mask, other=0.0))


@gluon.jit(
    do_not_specialize=["entries", "table_stride", "Q", "k_constant", "v_constant"],
)
def _segments_kernel(
    q, k_codes, v_codes, k_numbers, v_numbers, k_constant, v_constant, page_table, cu_seqlens,
    starts, tops, norms, parts, scale, entries, table_stride, Q,
    K_PAGE: gl.constexpr, K_TOKEN: gl.constexpr, K_HEAD: gl.constexpr,
    V_PAGE: gl.constexpr, V_TOKEN: gl.constexpr, V_HEAD: gl.constexpr,
    H: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, K_COUNT: gl.constexpr,
    V_COUNT: gl.constexpr, K_SHARE: gl.constexpr, V_SHARE: gl.constexpr,
    K_FETCH: gl.constexpr, K_UNPACK: gl.constexpr, V_FETCH: gl.constexpr, V_UNPACK: gl.constexpr,
    ROWS: gl.constexpr, SLOTS: gl.constexpr, WARPS: gl.constexpr, WEIGHING: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """A KV head of a row, and the segments of one of num_programs(1) equal parts of its context."""
    GROUP: gl.constexpr = H // HKV
    dtype: gl.constexpr = q.dtype.element_ty
    s, kv, begin, count, start, first, share, tiles = part_of(cu_seqlens, starts, HKV)
    keys = start + count
    if (count > 0) & (first < tiles):
        tiles = gl.minimum(tiles - first, share)
        square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        queries = gl.allocate_shared_memory(dtype, [1, 64, D], square)
        ones = gl.allocate_shared_memory(dtype, [1, 64, 64], square)
        weights = gl.allocate_shared_memory(dtype, [SLOTS, 64, 64], square)
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        fades = gl.allocate_shared_memory(gl.float32, [SLOTS, 64], flat)
        peaks = gl.allocate_shared_memory(gl.float32, [SLOTS, 64], flat)
        k_ring = gl.allocate_shared_memory(dtype, [SLOTS, 64, D], square)
        v_ring = gl.allocate_shared_memory(dtype, [SLOTS, 64, D], square)
        barriers: gl.constexpr = mbarrier.MBarrierLayout()
        k_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barriers)
        k_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barriers)
        w_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barriers)
        v_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barriers)
        v_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barriers)
        for i in gl.static_range(SLOTS):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=1)
            mbarrier.init(w_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(v_empty.index(i), count=1)
        one: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        ones.index(0).store(gl.full((64, 64), 1.0, dtype, one))
        _load_queries(q + begin * (H * D), queries.index(0), count, kv, H, GROUP, D)
        fence_async_shared()
        skipped = s * Q * entries * H
        pages = page_table + s * table_stride
        gl.warp_specialize(
            [
                (_add_tiles, (
                    ones, weights, fades, peaks, v_ring, w_full, v_full, v_empty, tops + skipped,
                    norms + skipped, parts + skipped * D, count, start, kv, first, tiles, entries,
                    H, GROUP, ROWS,
                )),
                (_weigh_tiles, (
                    queries, weights, fades, peaks, k_ring, k_full, k_empty, w_full, v_empty,
                    start, first, tiles, scale, GROUP,
                )),
                (_unpack, (
                    k_codes, k_numbers, k_constant, k_ring, k_full, k_empty, pages, first,
                    tiles + 1, keys, kv, K_PAGE, K_TOKEN, K_HEAD, K_COUNT, HKV, K_SHARE, K_FETCH,
                    K_UNPACK, False,
                )),
                (_unpack, (
                    v_codes, v_numbers, v_constant, v_ring, v_full, v_empty, pages, first, tiles,
                    keys, kv, V_PAGE, V_TOKEN, V_HEAD, V_COUNT, HKV, V_SHARE, V_FETCH, V_UNPACK,
                    True,
                )),
            ],
            [4, WARPS, WARPS],
            [WEIGHING, REGISTERS, REGISTERS],
        )  # fmt: skip


def _supports(**traits: Any) -> str | None:
    if traits.get("head_dim", 64) not in (128, 256):
        return "head_dim is neither 128 nor 256"
    if traits.get("codecs") is None:
        return "it unpacks, and this cache is not packed"
    if traits.get("dtype", torch.float32) not in (torch.bfloat16, torch.float16):
        return "weights are multiplied in bf16 or fp16"
    why_not = supports(**traits)
    if why_not is None and resolve_architecture(**traits) != architecture.HOPPER:
        return "wgmma is Hopper's"
    return why_not


class Shape(NamedTuple):
    """How a step is divided, and what a program takes. Nothing here changes a bit.

    rows: of a program. parts: programs that share a row. slots: tiles of keys, and as many of
    values, that stand unpacked. warps: of each group that unpacks. weighing, unpacking: registers
    of a thread that does; registers: of a thread on average.
    """

    rows: int
    parts: int
    slots: int
    warps: int
    weighing: int
    unpacking: int
    registers: int


def shape_of(rows: int, count: int, kv_heads: int, dim: int, segments: int) -> Shape:
    """The shape for static sizes, by the times in docs/kernels/attention.md. count: (token, head of
    a group) rows of a KV head.

    Programs fill the GPU once, one on a multiprocessor.
    """
    block = max(16, triton.next_power_of_2(count))
    parts = max(1, min(segments, MULTIPROCESSORS // (rows * kv_heads)))
    wide = dim == 256
    return Shape(block, parts, 512 // dim, 4, 112 if wide else 128, 128 if wide else 96, 128)


@paged_attention.backend("quantized_hopper", supports=_supports)
def paged_attention_hopper_packed(
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
    """Run paged_attention over quantized caches.

    Few rows go through quantized_decode_hopper.py, prompts through quantized_prefill_hopper.py,
    what does not fit through triton.py.

    shape: how this kernel serves it; as shape_of() says where it is left out.
    """
    if scratch_fits(q, k_cache, query_len):
        return paged_attention_scratch(
            q, k_cache, v_cache, page_table, cu_seqlens, starts, query_len, scale, gates
        )
    step = Sizes.of(q, k_cache, page_table, starts, query_len)
    few = step.count <= MOST_ROWS[step.dim] and step.entry_bytes() <= ENTRY_BYTES
    if not (len(q) and few and k_cache.shape[1] == TILE):
        return paged_attention_triton(
            q, k_cache, v_cache, page_table, cu_seqlens, starts, query_len, scale, gates
        )
    if shape is None and serves(q, k_cache, v_cache, step.count):
        return paged_attention_few(
            q, k_cache, v_cache, page_table, cu_seqlens, starts, query_len, scale, gates
        )
    how = shape or shape_of(step.rows, step.count, step.kv_heads, step.dim, step.segments)
    target = target_of(q.device)
    k = opened(k_cache, q.dtype, target)
    v = opened(v_cache, q.dtype, target)
    kept = step.empty_entries(q.device)
    _segments_kernel[(step.rows * step.kv_heads, how.parts)](
        q, k.codes, v.codes, k.numbers, v.numbers, k.constant, v.constant, page_table, cu_seqlens,
        starts, *kept, scale * LOG2E, step.segments, page_table.stride(0), query_len,
        *k.codes.stride()[:3], *v.codes.stride()[:3], *step.layer(), k.beside, v.beside,
        k.share, v.share, k.fetch, k.unpack, v.fetch, v.unpack,
        how.rows, how.slots, how.warps, how.weighing, how.unpacking,
        num_warps=4, maxnreg=how.registers, enable_fp_fusion=False,
    )  # fmt: skip
    out = torch.empty_like(q)
    fold_entries(kept, q, cu_seqlens, starts, query_len, step.segments, 1, False, gates, v, out)
    return out
