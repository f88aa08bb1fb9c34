# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""paged_attention over quantized caches on Hopper, in Gluon: triton.py's tree, bit for bit.

A CTA owns the (token, query head of the group) rows of one KV head and a run of KV splits. It is
warp-specialized: one group of warps dequantizes keys and one dequantizes values, tile by tile, into
multistage pipelines in shared memory; one warpgroup computes Q K^T and softmax, one P V. All four
overlap. Every KV split is stored as a partial for the combine kernel of triton.py. Few rows go
through quantized_decode_hopper.py. See docs/kernels/attention.md.
"""

from typing import Any, NamedTuple

import torch
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
from lockstep.kernels.attention.quantized_decode_hopper import (
    fits_decode,
    paged_attention_quantized_decode,
)
from lockstep.kernels.attention.quantized_prefill_hopper import (
    fits_prefill,
    paged_attention_quantized_prefill,
)
from lockstep.kernels.attention.split_kv import (
    SplitKVSizes,
    cta_work,
    identity_column,
    store_partial,
)
from lockstep.kernels.attention.triton import (
    MAX_PARTIAL_BYTES,
    combine_partials,
    paged_attention_triton,
    supports,
)
from lockstep.kernels.attention.warpgroup import TILE, TILES_PER_SPLIT
from lockstep.kernels.backends import resolve_architecture
from lockstep.kernels.compile_target import compile_target
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.gluon_compat import barrier
from lockstep.kernels.device.softmax import LOG2E, NO_SCORE, exponentiate
from lockstep.kernels.device.tiles import FLAT, SWIZZLED, zero_tail_rows
from lockstep.kernels.formats.kv import KVCache, QuantizedKV
from lockstep.kernels.formats.kv.launch import kv_operand
from lockstep.kernels.integers import next_power_of_2

MAX_ROWS = {128: 64, 256: 32}
"""Maximum (token, query head) rows by head dim: the accumulator that one warpgroup's registers
hold."""


@gluon.constexpr_function
def load_layout(columns, per_load, warps):
    """Return how warps hold the raw words of a tile [64, columns].

    A lane loads 16 bytes, but only 8 for words of four values: what neighbouring lanes dequantize
    is then adjacent in shared memory.
    """
    vector = min(2 if per_load == 4 else 4, TILE * columns // (32 * warps))
    lanes_across = min(32, columns // vector)
    return gl.BlockedLayout([1, vector], [32 // lanes_across, lanes_across], [warps, 1], [1, 0])


@gluon.jit
def _load_page(
    qdata, scales, page, kv, PAGE_STRIDE: gl.constexpr, TOKEN_STRIDE: gl.constexpr,
    NUM_SCALES: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, PER_LOAD: gl.constexpr,
    LOAD: gl.constexpr,
):  # fmt: skip
    """Load the raw words of a page of keys or values, stale tokens past the row's end included."""
    COLUMNS: gl.constexpr = D // PER_LOAD
    layout: gl.constexpr = load_layout(COLUMNS, PER_LOAD, gl.num_warps())
    token = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    page = page.to(gl.int64)
    # Page offsets are 64-bit; offsets inside a page stay in 32 bits.
    qdata += page * PAGE_STRIDE
    if NUM_SCALES > 0:
        scales += (page * (64 * HKV) + kv) * NUM_SCALES
        scales = scales + token * (HKV * NUM_SCALES)
    # token < 64 is always true: the mask is of the loader's interface.
    return LOAD(qdata + token.to(gl.int64) * TOKEN_STRIDE, scales, column, token < 64, D)


@gluon.jit
def _store_tile(
    loaded, layer_constant, stages, full, empty, t, live, PER_LOAD: gl.constexpr,
    DEQUANTIZE: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """Dequantize the t-th tile into its stage. ZEROS: zero the rows from `live` on."""
    NUM_STAGES: gl.constexpr = stages.shape[0]
    D: gl.constexpr = stages.shape[2]
    layout: gl.constexpr = load_layout(D // PER_LOAD, PER_LOAD, gl.num_warps())
    column = gl.arange(0, D // PER_LOAD, gl.SliceLayout(0, layout))[None, :]
    stage = stages.index(t % NUM_STAGES)
    # The opposite parity: passes at once in the first round of the stages.
    mbarrier.wait(empty.index(t % NUM_STAGES), (t // NUM_STAGES & 1) ^ 1)
    stage.store(DEQUANTIZE(loaded, column, layer_constant, D).to(stages.dtype))
    if ZEROS:
        # Only the row's last tile has stale tokens.
        if live < 64:
            barrier()
            _zero_tail(stage, live)
    # wgmma reads the tile through the async proxy.
    fence_async_shared()
    barrier()
    # One arrival for the whole group: the barrier above joined its warps.
    mbarrier.arrive(full.index(t % NUM_STAGES))


@gluon.jit
def _zero_tail(stage, live):
    """Zero the rows of a tile [64, D] from row `live` on, some rows at a time."""
    D: gl.constexpr = stage.shape[1]
    ROWS: gl.constexpr = 4096 // D
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    for part in gl.static_range(64 // ROWS):
        zero_tail_rows(stage.slice(part * ROWS, ROWS), part * ROWS, live, layout)


@gluon.jit
def _page_of_tile(page_list, t):
    """Return the t-th page from page_list, which contains 32 pages, one per lane.

    A load here would stall the warps until it returns.
    """
    lane = gl.arange(0, 32, page_list.type.layout)
    return gl.max(gl.where(lane == t % 32, page_list, 0), 0)


@gluon.jit
def _dequantize_tiles(
    qdata, scales, layer_constant, stages, full, empty, pages, first_tile, tiles, num_keys, kv,
    PAGE_STRIDE: gl.constexpr, TOKEN_STRIDE: gl.constexpr, HEAD_STRIDE: gl.constexpr,
    NUM_SCALES: gl.constexpr, HKV: gl.constexpr, PER_LOAD: gl.constexpr, LOAD: gl.constexpr,
    DEQUANTIZE: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """Run a dequantizing group of warps: tiles first_tile .. first_tile + tiles - 1 into the
    pipeline.

    The next tile's words are loaded while the current ones are dequantized.
    """
    D: gl.constexpr = stages.shape[2]
    qdata += kv * HEAD_STRIDE
    pages += first_tile
    live = num_keys - first_tile * 64
    last_tile = (live - 1) // 64
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    page_list = gl.load(pages + lane, mask=lane <= last_tile, other=0)
    next_loaded = _load_page(
        qdata, scales, _page_of_tile(page_list, 0), kv, PAGE_STRIDE, TOKEN_STRIDE, NUM_SCALES, HKV,
        D, PER_LOAD, LOAD,
    )  # fmt: skip
    for t in range(tiles):
        loaded = next_loaded
        # A new list of 32 pages, one coalesced load.
        if (t + 1) % 32 == 0:
            page_list = gl.load(pages + t + 1 + lane, mask=t + 1 + lane <= last_tile, other=0)
        page = _page_of_tile(page_list, t + 1)
        next_loaded = _load_page(
            qdata, scales, page, kv, PAGE_STRIDE, TOKEN_STRIDE, NUM_SCALES, HKV, D, PER_LOAD, LOAD
        )
        _store_tile(
            loaded, layer_constant, stages, full, empty, t, live - t * 64, PER_LOAD, DEQUANTIZE,
            ZEROS,
        )  # fmt: skip


@gluon.jit
def _issue_qk(q_tile, stages, full, t, layout: gl.constexpr):
    """Issue Q K^T of the t-th tile [64, 64]. t >> 30 is 0: see warpgroup.issue_qk."""
    NUM_STAGES: gl.constexpr = stages.shape[0]
    mbarrier.wait(full.index(t % NUM_STAGES), t // NUM_STAGES & 1)
    scores = gl.zeros((64, 64), gl.float32, layout)
    k_tile = stages.index(t % NUM_STAGES).permute((1, 0))
    return warpgroup_mma(q_tile.index(t >> 30), k_tile, scores, use_acc=False, is_async=True)


@gluon.jit
def _softmax_step(
    scores, scale, row_max, start, first_key, dtype: gl.constexpr, GROUP: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Run online softmax on a tile. Returns: new row_max, factor of the state so far, p.

    first_key >> 30 is 0: row indices are recomputed instead of kept in registers across the loop.
    """
    scores = scores * scale
    if first_key + 63 > start:
        key = first_key + gl.arange(0, 64, gl.SliceLayout(0, layout))
        m = (first_key >> 30) + gl.arange(0, 64, gl.SliceLayout(1, layout))
        scores = gl.where(key[None, :] <= (start + m // GROUP)[:, None], scores, float("-inf"))
    return exponentiate(scores, row_max, dtype)


@gluon.jit
def _softmax_warpgroup(
    q_tile, p_tiles, rescales, row_maxes, k_stages, k_full, k_empty, p_full, v_empty, start,
    first_tile, tiles, scale, GROUP: gl.constexpr,
):  # fmt: skip
    """Run the softmax warpgroup; the next tile's Q K^T overlaps the current tile's softmax."""
    NUM_STAGES: gl.constexpr = k_stages.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    row_max = gl.full((64,), NO_SCORE, gl.float32, gl.SliceLayout(1, layout))
    scores = warpgroup_mma_wait(0, deps=(_issue_qk(q_tile, k_stages, k_full, 0, layout),))
    # All warps have read the scores, so the K stage is free.
    barrier()
    mbarrier.arrive(k_empty.index(0))
    for t in range(tiles):
        next_scores = _issue_qk(q_tile, k_stages, k_full, t + 1, layout)
        first_key = (first_tile + t) * 64
        row_max, rescale, p = _softmax_step(
            scores, scale, row_max, start, first_key, k_stages.dtype, GROUP, layout
        )
        # p, its factors and the V tile share a stage index: P V of NUM_STAGES tiles ago must be
        # done.
        mbarrier.wait(v_empty.index(t % NUM_STAGES), (t // NUM_STAGES & 1) ^ 1)
        p_tiles.index(t % NUM_STAGES).store(p)
        rescales.index(t % NUM_STAGES).store(rescale)
        row_maxes.index(t % NUM_STAGES).store(row_max)
        fence_async_shared()
        scores = warpgroup_mma_wait(0, deps=(next_scores,))
        barrier()
        # p, factors and row maxima of tile t are visible to the P V warpgroup.
        mbarrier.arrive(p_full.index(t % NUM_STAGES))
        mbarrier.arrive(k_empty.index((t + 1) % NUM_STAGES))
        if (t + 1) % TILES_PER_SPLIT == 0:
            row_max = gl.full((64,), NO_SCORE, gl.float32, gl.SliceLayout(1, layout))


@gluon.jit
def _pv_warpgroup(
    ones, p_tiles, rescales, row_maxes, v_stages, p_full, v_full, v_empty, partial_max, partial_sum,
    partial_acc, count, start, kv, first_tile, tiles, num_partials, H: gl.constexpr,
    GROUP: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Run the P V warpgroup over the same tiles; every KV split becomes a partial."""
    NUM_STAGES: gl.constexpr = v_stages.shape[0]
    D: gl.constexpr = v_stages.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, layout)
    row_sum = gl.zeros((64, ROWS), gl.float32, layout)
    acc = gl.zeros((D, ROWS), gl.float32, layout)
    for t in range(tiles):
        mbarrier.wait(p_full.index(t % NUM_STAGES), t // NUM_STAGES & 1)
        rescale = rescales.index(t % NUM_STAGES).slice(0, ROWS).load(row_layout)[None, :]
        p_tile = p_tiles.index(t % NUM_STAGES).slice(0, ROWS).permute((1, 0))
        # The row sum is a product with ones: the same order of additions as in triton.py.
        row_sum = warpgroup_mma(ones.index(t >> 30), p_tile, row_sum * rescale, is_async=True)
        mbarrier.wait(v_full.index(t % NUM_STAGES), t // NUM_STAGES & 1)
        # V^T P: query rows are the N of wgmma, so few rows take few registers.
        values = v_stages.index(t % NUM_STAGES).permute((1, 0))
        acc = warpgroup_mma(values, p_tile, acc * rescale, is_async=True)
        row_sum, acc = warpgroup_mma_wait(0, deps=(row_sum, acc))
        row_max = row_maxes.index(t % NUM_STAGES).slice(0, ROWS).load(row_layout)
        barrier()  # all warps have read the stage
        mbarrier.arrive(v_empty.index(t % NUM_STAGES))
        if ((t + 1) % TILES_PER_SPLIT == 0) | (t + 1 == tiles):
            first_key = (first_tile + t) * 64
            store_partial(
                row_max, row_sum, acc, (partial_max, partial_sum, partial_acc), first_key, count,
                start, kv, num_partials, first_key >> 30, H, GROUP, identity_column, layout,
            )  # fmt: skip
            row_sum = gl.zeros((64, ROWS), gl.float32, layout)
            acc = gl.zeros((D, ROWS), gl.float32, layout)


@gluon.jit
def _load_q_tile(q, q_tile, count, kv, H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr):
    """Load the query rows into shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = q_tile.shape[0]
    m = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    offsets = (m // GROUP * H + kv * GROUP + m % GROUP) * D
    mask = (m < count * GROUP)[:, None]
    q_tile.store(gl.load(q + offsets[:, None] + column[None, :], mask=mask, other=0.0))


@gluon.jit(
    do_not_specialize=[
        "num_partials",
        "table_stride",
        "QUERY_LEN",
        "k_layer_constant",
        "v_layer_constant",
    ],
)
def _split_kv_kernel(
    q, k_qdata, v_qdata, k_scales, v_scales, k_layer_constant, v_layer_constant, page_table,
    cu_seqlens, starts, partial_max, partial_sum, partial_acc, scale, num_partials, table_stride,
    QUERY_LEN, K_PAGE_STRIDE: gl.constexpr, K_TOKEN_STRIDE: gl.constexpr,
    K_HEAD_STRIDE: gl.constexpr, V_PAGE_STRIDE: gl.constexpr, V_TOKEN_STRIDE: gl.constexpr,
    V_HEAD_STRIDE: gl.constexpr, H: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr,
    K_NUM_SCALES: gl.constexpr, V_NUM_SCALES: gl.constexpr, K_PER_LOAD: gl.constexpr,
    V_PER_LOAD: gl.constexpr, K_LOAD: gl.constexpr, K_DEQUANTIZE: gl.constexpr,
    V_LOAD: gl.constexpr, V_DEQUANTIZE: gl.constexpr, ROWS: gl.constexpr, NUM_STAGES: gl.constexpr,
    DEQUANTIZE_WARPS: gl.constexpr, SOFTMAX_REGISTERS: gl.constexpr,
    DEQUANTIZE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attend with a KV head of a batch row, over one of num_programs(1) parts of its context."""
    pdl_start()
    GROUP: gl.constexpr = H // HKV
    dtype: gl.constexpr = q.dtype.element_ty
    s, kv, first_token, count, start, first_tile, tiles_per_cta, tiles = cta_work(
        cu_seqlens, starts, HKV
    )
    num_keys = start + count
    if (count > 0) & (first_tile < tiles):
        tiles = gl.minimum(tiles - first_tile, tiles_per_cta)
        q_tile = gl.allocate_shared_memory(dtype, [1, 64, D], SWIZZLED)
        ones = gl.allocate_shared_memory(dtype, [1, 64, 64], SWIZZLED)
        p_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, 64, 64], SWIZZLED)
        rescales = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 64], FLAT)
        row_maxes = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 64], FLAT)
        k_stages = gl.allocate_shared_memory(dtype, [NUM_STAGES, 64, D], SWIZZLED)
        v_stages = gl.allocate_shared_memory(dtype, [NUM_STAGES, 64, D], SWIZZLED)
        barriers: gl.constexpr = mbarrier.MBarrierLayout()
        k_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], barriers)
        k_empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], barriers)
        p_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], barriers)
        v_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], barriers)
        v_empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], barriers)
        for i in gl.static_range(NUM_STAGES):  # one arrival each: a group of warps arrives as one
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=1)
            mbarrier.init(p_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(v_empty.index(i), count=1)
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        ones.index(0).store(gl.full((64, 64), 1.0, dtype, layout))
        _load_q_tile(q + first_token * (H * D), q_tile.index(0), count, kv, H, GROUP, D)
        fence_async_shared()
        row_offset = s * QUERY_LEN * num_partials * H
        pages = page_table + s * table_stride
        gl.warp_specialize(
            [
                (_pv_warpgroup, (
                    ones, p_tiles, rescales, row_maxes, v_stages, p_full, v_full, v_empty,
                    partial_max + row_offset, partial_sum + row_offset,
                    partial_acc + row_offset * D, count, start, kv, first_tile, tiles, num_partials,
                    H, GROUP, ROWS,
                )),
                (_softmax_warpgroup, (
                    q_tile, p_tiles, rescales, row_maxes, k_stages, k_full, k_empty, p_full,
                    v_empty, start, first_tile, tiles, scale, GROUP,
                )),
                (_dequantize_tiles, (  # one tile more, since one Q K^T is issued ahead
                    k_qdata, k_scales, k_layer_constant, k_stages, k_full, k_empty, pages,
                    first_tile, tiles + 1, num_keys, kv, K_PAGE_STRIDE, K_TOKEN_STRIDE,
                    K_HEAD_STRIDE, K_NUM_SCALES, HKV, K_PER_LOAD, K_LOAD, K_DEQUANTIZE, False,
                )),
                (_dequantize_tiles, (
                    v_qdata, v_scales, v_layer_constant, v_stages, v_full, v_empty, pages,
                    first_tile, tiles, num_keys, kv, V_PAGE_STRIDE, V_TOKEN_STRIDE, V_HEAD_STRIDE,
                    V_NUM_SCALES, HKV, V_PER_LOAD, V_LOAD, V_DEQUANTIZE, True,
                )),
            ],
            [4, DEQUANTIZE_WARPS, DEQUANTIZE_WARPS],
            [SOFTMAX_REGISTERS, DEQUANTIZE_REGISTERS, DEQUANTIZE_REGISTERS],
        )  # fmt: skip


def _supports(**traits: Any) -> str | None:
    """Return None if this kernel serves a layer of these traits, else the reason why not."""
    if traits.get("head_dim", 64) not in (128, 256):
        return "head_dim is neither 128 nor 256"
    if traits.get("quantizers") is None:
        return "it dequantizes, and this cache is not quantized"
    if traits.get("dtype", torch.float32) not in (torch.bfloat16, torch.float16):
        return "p is multiplied in bf16 or fp16"
    reason = supports(**traits)
    if reason is None and resolve_architecture(**traits) != architecture.HOPPER:
        return "wgmma exists on Hopper only"
    return reason


class LaunchShape(NamedTuple):
    """Division of a step among CTAs, and the resources of a CTA. No field changes a bit.

    block_rows: query rows of a CTA. ctas_per_row: CTAs that share a row and KV head. num_stages:
    dequantized tiles of keys, and as many of values. dequantize_warps: of each dequantizing group.
    softmax_registers, dequantize_registers: of a thread of such a warp. registers: of a thread on
    average.
    """

    block_rows: int
    ctas_per_row: int
    num_stages: int
    dequantize_warps: int
    softmax_registers: int
    dequantize_registers: int
    registers: int


def choose_shape(
    rows: int, count: int, kv_heads: int, dim: int, num_splits: int, num_sms: int
) -> LaunchShape:
    """Return the shape for static sizes, from the times in docs/kernels/attention.md.

    count: (token, query head) rows of a KV head. num_sms: multiprocessors of the GPU, which CTAs
    fill once, one on each.
    """
    block_rows = max(16, next_power_of_2(count))
    ctas_per_row = max(1, min(num_splits, num_sms // (rows * kv_heads)))
    wide = dim == 256
    # 512 // dim stages of K and V fill the shared memory.
    return LaunchShape(
        block_rows, ctas_per_row, 512 // dim, 4, 112 if wide else 128, 128 if wide else 96, 128
    )


@paged_attention.backend("quantized_hopper", supports=_supports)
def paged_attention_quantized_hopper(
    q: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    gates: Tensor | None = None,
    shape: LaunchShape | None = None,
) -> Tensor:
    """Run paged_attention over quantized caches.

    Few rows go through quantized_decode_hopper.py, prompts through quantized_prefill_hopper.py,
    what does not fit through triton.py.

    shape: how this kernel serves the step; None for that of choose_shape.
    """
    assert isinstance(k_cache, QuantizedKV) and isinstance(v_cache, QuantizedKV), (
        "_supports() says so"
    )
    if fits_prefill(q, k_cache, query_len):
        return paged_attention_quantized_prefill(
            q, k_cache, v_cache, page_table, cu_seqlens, starts, query_len, scale, gates
        )
    sizes = SplitKVSizes.from_arguments(q, k_cache, page_table, starts, query_len)
    fits_registers = (
        sizes.count <= MAX_ROWS[sizes.dim] and sizes.partial_bytes() <= MAX_PARTIAL_BYTES
    )
    if not (len(q) and fits_registers and k_cache.shape[1] == TILE):
        return paged_attention_triton(
            q, k_cache, v_cache, page_table, cu_seqlens, starts, query_len, scale, gates
        )
    if shape is None and fits_decode(q, k_cache, v_cache, sizes.count):
        return paged_attention_quantized_decode(
            q, k_cache, v_cache, page_table, cu_seqlens, starts, query_len, scale, gates
        )
    target = compile_target(q.device)
    shape = shape or choose_shape(
        sizes.rows, sizes.count, sizes.kv_heads, sizes.dim, sizes.num_splits, target.num_sms
    )
    k = kv_operand(k_cache, q.dtype, target)
    v = kv_operand(v_cache, q.dtype, target)
    partials = sizes.empty_partials(q.device)
    _split_kv_kernel[(sizes.rows * sizes.kv_heads, shape.ctas_per_row)](
        q, k.qdata, v.qdata, k.scales, v.scales, k.layer_constant, v.layer_constant, page_table,
        cu_seqlens, starts, *partials, scale * LOG2E, sizes.num_splits, page_table.stride(0),
        query_len, *k.qdata.stride()[:3], *v.qdata.stride()[:3], *sizes.head_sizes(), k.num_scales,
        v.num_scales, k.values_per_load, v.values_per_load, k.load, k.dequantize, v.load,
        v.dequantize, shape.block_rows, shape.num_stages, shape.dequantize_warps,
        shape.softmax_registers, shape.dequantize_registers, num_warps=4, maxnreg=shape.registers,
        enable_fp_fusion=False,
    )  # fmt: skip
    out = torch.empty_like(q)
    combine_partials(
        partials, q, cu_seqlens, starts, query_len, sizes.num_splits, 1, False, gates, v, out
    )
    return out
