# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""paged_attention for few query rows over quantized caches on Hopper, in Gluon.

It serves decode and verification, with the reduction tree of triton.py.

A CTA is one warp. It copies tiles of quantized values to shared memory by cp.async, loads them into
the register layout of mma.sync's operands and dequantizes them there. No dequantized value goes
through shared memory, and no warp waits for another. Every KV split is stored as a partial for the
combine kernel of triton.py. See docs/kernels/attention.md.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from lockstep.kernels import architecture
from lockstep.kernels.attention.split_kv import SplitKVSizes, cta_work, store_partial
from lockstep.kernels.attention.triton import combine_partials
from lockstep.kernels.attention.warpgroup import TILES_PER_SPLIT
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.mma_layouts import LEFT_OPERAND, MMA_LAYOUT, RIGHT_OPERAND, column_of
from lockstep.kernels.device.softmax import LOG2E, NO_SCORE
from lockstep.kernels.formats.kv import QuantizedKV
from lockstep.kernels.formats.kv.launch import kv_operand
from lockstep.kernels.integers import next_power_of_2

CTAS_PER_SM = 8
"""Resident warps of a multiprocessor: the number whose registers fit at 255 a thread. 8B, 8 x 1,
16,384, fp8: 87.3 us, 88.1 with 10, 90.3 with 12, 125 with 16 (H200)."""
WORD_BYTES = 4
"""Bytes of the words in which strides are counted."""
HEAD_DIM = 128
"""Head dim that this kernel serves. At 256 the accumulator of 8 rows takes as many registers as
that of 16 here, and a tile twice the shared memory: 249 us against 213 of quantized_hopper.py (27B,
8 x 1, 32,768, fp8)."""
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(0, MMA_LAYOUT.value))
"""Register layout of one value per query row."""


@gluon.constexpr_function
def copy_layout(words):
    """Return the layout in which a warp copies a tile [64, words]: 16 bytes per lane."""
    across = min(32, words // 4)
    return gl.BlockedLayout([1, 4], [32 // across, across], [1, 1], [1, 0])


@gluon.constexpr_function
def bank_swizzle(words, vector):
    """Return the swizzle of a tile [64, words] that minimizes bank conflicts of reads.

    A read takes `vector` words of each of 8 tokens.
    """
    phases = min(words // vector, 32 // vector)
    per_phase = max(1, 32 // words) if vector == 4 else 2
    return gl.SwizzledSharedLayout(vector, per_phase, max(phases, 1), [1, 0])


@gluon.jit
def _issue_copy(
    side, page, first_key, num_keys, kv, PAGE_STRIDE: gl.constexpr, TOKEN_STRIDE: gl.constexpr,
    HKV: gl.constexpr, NUM_SCALES: gl.constexpr,
):  # fmt: skip
    """Issue the cp.async copies of a tile: its values, and the words of its scales. Tokens from
    num_keys on are zeros."""
    qdata_tile = side[0]
    scale_words = side[1]
    qdata = side[2]
    scales = side[3]
    NUM_PLANES: gl.constexpr = qdata_tile.shape[0]
    WORDS: gl.constexpr = qdata_tile.shape[2]
    SCALE_WORDS: gl.constexpr = scale_words.shape[0]
    layout: gl.constexpr = copy_layout(WORDS)
    token = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, layout))[None, :]
    qdata += page.to(gl.int64) * PAGE_STRIDE
    for plane in gl.static_range(NUM_PLANES):
        async_copy.async_copy_global_to_shared(
            qdata_tile.index(plane), qdata + plane * WORDS + (token * TOKEN_STRIDE + word),
            mask=first_key + token + word * 0 < num_keys,
        )  # fmt: skip
    if NUM_SCALES > 0:
        flat: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        token = gl.arange(0, 64, flat)
        # Two 16-bit scales per word: 64 tokens take 32 * HKV * NUM_SCALES words.
        scales += page.to(gl.int64) * (32 * HKV * NUM_SCALES)
        first_word = (token * HKV + kv) * NUM_SCALES // 2
        for word in gl.static_range(SCALE_WORDS):
            async_copy.async_copy_global_to_shared(
                scale_words.index(word),
                scales + first_word + word,
                mask=first_key + token < num_keys,
            )
    # One group per side and tile: wait_group(1) below waits for the older of two.
    async_copy.commit_group()


@gluon.jit
def _load_q_operand(q, count, kv, ROWS: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr,
             D: gl.constexpr):  # fmt: skip
    """Load the queries as right operand [D, ROWS], in the column order of the keys."""
    m = gl.arange(0, ROWS, gl.SliceLayout(0, RIGHT_OPERAND))
    s = gl.arange(0, D, gl.SliceLayout(1, RIGHT_OPERAND))
    column = column_of(s)
    offsets = (m // GROUP * H + kv * GROUP + m % GROUP) * D
    mask = (m < count * GROUP)[None, :] & (column >= 0)[:, None]
    return gl.load(q + offsets[None, :] + column[:, None], mask=mask, other=0.0)


@gluon.jit
def _mask_scores(scores, scale, start, first_key, GROUP: gl.constexpr):
    """Scale scores [16, ROWS] of the keys from first_key on and mask those a row does not see."""
    scores = scores * scale
    if first_key + 15 > start:
        key = first_key + gl.arange(0, 16, gl.SliceLayout(1, MMA_LAYOUT))
        m = gl.arange(0, scores.shape[1], ROW_LAYOUT)
        scores = gl.where(key[:, None] <= (start + m // GROUP)[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def _qk_tile(
    side, q_tile, row_max, scale, start, first_key, kv, GROUP: gl.constexpr, HKV: gl.constexpr,
    LOAD_K: gl.constexpr,
):  # fmt: skip
    """Compute a tile's scores as four times 16 keys [16, ROWS], and the new row_max."""
    D: gl.constexpr = q_tile.shape[0]
    ROWS: gl.constexpr = q_tile.shape[1]
    scores = ()
    # M of mma.sync is 16: a tile of 64 keys is four products.
    for i in gl.static_range(4):
        tile_scores = gl.zeros((16, ROWS), gl.float32, MMA_LAYOUT)
        tile_scores = mma_v2(LOAD_K(side[0], side[1], i, kv, HKV, D), q_tile, tile_scores)
        tile_scores = _mask_scores(tile_scores, scale, start, first_key + 16 * i, GROUP)
        row_max = gl.maximum(row_max, gl.max(tile_scores, 0))
        scores = scores + (tile_scores,)  # type: ignore[assignment]
    return row_max, scores


@gluon.jit
def _pv_tile(side, scores, row_max, row_sum, acc, kv, dtype: gl.constexpr, HKV: gl.constexpr,
          LOAD_V: gl.constexpr):  # fmt: skip
    """Add the tile's p to the row sums and its P V to the accumulator."""
    D: gl.constexpr = acc.shape[0]
    # Row sums by the matrix unit, in the order of triton.py.
    ones = gl.full((16, 16), 1.0, dtype, LEFT_OPERAND)
    for i in gl.static_range(4):
        p = gl.exp2(scores[i] - row_max[None, :]).to(dtype)
        # Accumulator to right operand: within the warp, without shared memory.
        p = gl.convert_layout(p, RIGHT_OPERAND)
        row_sum = mma_v2(ones, p, row_sum)
        acc = mma_v2(LOAD_V(side[0], side[1], i, kv, HKV, D), p, acc)
    return row_sum, acc


@gluon.jit
def _allocate_side(
    qdata, scales, kv, HEAD_STRIDE: gl.constexpr, NUM_SCALES: gl.constexpr,
    NUM_PLANES: gl.constexpr, WORDS: gl.constexpr, VECTOR: gl.constexpr,
):  # fmt: skip
    """Allocate shared memory for a tile of keys, or values.

    Returns: values in shared memory, scale words in shared memory, pointer to values, pointer to
    scale words.
    """
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    word: gl.constexpr = gl.pointer_type(gl.int32)
    layout: gl.constexpr = bank_swizzle(WORDS, VECTOR)
    tile = gl.allocate_shared_memory(gl.int32, [NUM_PLANES, 64, WORDS], layout)
    scale_words = gl.allocate_shared_memory(gl.int32, [max(NUM_SCALES // 2, 1), 64], flat)
    qdata_words = qdata.to(word, bitcast=True) + kv * HEAD_STRIDE
    if NUM_SCALES > 0:
        return tile, scale_words, qdata_words, scales.to(word, bitcast=True)
    else:
        return tile, scale_words, qdata_words, qdata_words


@gluon.jit(do_not_specialize=["num_partials", "table_stride", "QUERY_LEN"])
def _decode_kernel(
    q, k_qdata, v_qdata, k_scales, v_scales, page_table, cu_seqlens, starts, partial_max,
    partial_sum, partial_acc, scale, num_partials, table_stride, QUERY_LEN,
    K_PAGE: gl.constexpr, K_TOKEN: gl.constexpr, K_HEAD: gl.constexpr,
    V_PAGE: gl.constexpr, V_TOKEN: gl.constexpr, V_HEAD: gl.constexpr,
    H: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, K_NUM_SCALES: gl.constexpr,
    V_NUM_SCALES: gl.constexpr, K_NUM_PLANES: gl.constexpr, V_NUM_PLANES: gl.constexpr,
    K_PER_LOAD: gl.constexpr, V_PER_LOAD: gl.constexpr, LOAD_K: gl.constexpr, LOAD_V: gl.constexpr,
    V_COLUMN: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Attend with a KV head of a batch row, over one of num_programs(1) equal parts of its context.

    K_PAGE, K_TOKEN, K_HEAD, V_..: strides of pages, tokens and heads, in words of four bytes.
    """
    pdl_start()
    GROUP: gl.constexpr = H // HKV
    s, kv, first_token, count, start, first_tile, tiles_per_cta, tiles = cta_work(
        cu_seqlens, starts, HKV
    )
    num_keys = start + count
    if (count > 0) & (first_tile < tiles):
        tiles = gl.minimum(tiles - first_tile, tiles_per_cta)
        k = _allocate_side(
            k_qdata, k_scales, kv, K_HEAD, K_NUM_SCALES, K_NUM_PLANES, D // K_PER_LOAD, 4
        )
        v = _allocate_side(
            v_qdata, v_scales, kv, V_HEAD, V_NUM_SCALES, V_NUM_PLANES, D // V_PER_LOAD, 8
        )
        row_offset = s * QUERY_LEN * num_partials * H
        partials = (
            partial_max + row_offset,
            partial_sum + row_offset,
            partial_acc + row_offset * D,
        )
        pages = page_table + s * table_stride + first_tile
        first_key = first_tile * 64
        page = gl.load(pages)
        # Prologue: one tile of K and one of V in flight.
        _issue_copy(k, page, first_key, num_keys, kv, K_PAGE, K_TOKEN, HKV, K_NUM_SCALES)
        _issue_copy(v, page, first_key, num_keys, kv, V_PAGE, V_TOKEN, HKV, V_NUM_SCALES)
        page = gl.load(pages + 1, mask=first_key + 64 < num_keys, other=0)
        q_tile = _load_q_operand(q + first_token * (H * D), count, kv, ROWS, H, GROUP, D)
        row_max = gl.full((ROWS,), NO_SCORE, gl.float32, ROW_LAYOUT)
        row_sum = gl.zeros((16, ROWS), gl.float32, MMA_LAYOUT)
        acc = gl.zeros((D, ROWS), gl.float32, MMA_LAYOUT)
        for t in range(tiles):
            # K of this tile has arrived; V may still be in flight.
            async_copy.wait_group(1)
            new_max, scores = _qk_tile(
                k, q_tile, row_max, scale, start, first_key, kv, GROUP, HKV, LOAD_K
            )
            # The single K buffer is consumed: refill it during softmax and P V.
            _issue_copy(k, page, first_key + 64, num_keys, kv, K_PAGE, K_TOKEN, HKV, K_NUM_SCALES)
            rescale = gl.exp2(row_max - new_max)[None, :]
            row_max = new_max
            async_copy.wait_group(1)
            row_sum, acc = _pv_tile(
                v, scores, row_max, row_sum * rescale, acc * rescale, kv, q.dtype.element_ty, HKV,
                LOAD_V,
            )  # fmt: skip
            _issue_copy(v, page, first_key + 64, num_keys, kv, V_PAGE, V_TOKEN, HKV, V_NUM_SCALES)
            # The page after next, so that the copies never wait for the table.
            page = gl.load(pages + t + 2, mask=first_key + 128 < num_keys, other=0)
            # End of a KV split, an absolute position.
            if ((first_tile + t + 1) % TILES_PER_SPLIT == 0) | (t + 1 == tiles):
                store_partial(
                    row_max, row_sum, acc, partials, first_key, count, start, kv, num_partials, 0,
                    H, GROUP, V_COLUMN, MMA_LAYOUT,
                )  # fmt: skip
                row_max = gl.full((ROWS,), NO_SCORE, gl.float32, ROW_LAYOUT)
                row_sum = gl.zeros((16, ROWS), gl.float32, MMA_LAYOUT)
                acc = gl.zeros((D, ROWS), gl.float32, MMA_LAYOUT)
            first_key += 64
        async_copy.wait_group(0)  # no copy may be in flight when the CTA exits


class WorkDivision(NamedTuple):
    """Division of a step among CTAs. No field changes a bit.

    block_rows: query rows of a CTA. ctas_per_row: CTAs that share a row and KV head. registers:
    maximum of a thread.
    """

    block_rows: int
    ctas_per_row: int
    registers: int


def choose_division(
    rows: int, count: int, kv_heads: int, num_splits: int, num_sms: int
) -> WorkDivision:
    """Return the division for static sizes, from the times in docs/kernels/attention.md.

    count: (token, query head) rows of a KV head. As many CTAs as are resident at once: registers
    are the limit.
    """
    block_rows = max(8, next_power_of_2(count))
    ctas_per_row = max(1, min(num_splits, CTAS_PER_SM * num_sms // (rows * kv_heads)))
    return WorkDivision(block_rows, ctas_per_row, 255)


def fits_decode(q: Tensor, k_cache: QuantizedKV, v_cache: QuantizedKV, count: int) -> bool:
    """Return whether this kernel serves a step of `count` (token, query head) rows of a KV head:
    bf16, heads of HEAD_DIM, and quantizers with mma.sync loaders for that many rows."""
    quantizers = (k_cache.quantizer, v_cache.quantizer)
    if q.dtype != torch.bfloat16 or q.shape[-1] != HEAD_DIM:
        return False
    return all(
        quantizer.mma_path and count <= quantizer.mma_functions().max_rows
        for quantizer in quantizers
    )


def paged_attention_quantized_decode(
    q: Tensor,
    k_cache: QuantizedKV,
    v_cache: QuantizedKV,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    gates: Tensor | None = None,
    division: WorkDivision | None = None,
) -> Tensor:
    """Run paged_attention for steps that fits_decode accepts, with at most MAX_PARTIAL_BYTES of
    partials.

    division: None for that of choose_division.
    """
    sizes = SplitKVSizes.from_arguments(q, k_cache, page_table, starts, query_len)
    num_sms = architecture.multiprocessor_count(q.device)
    division = division or choose_division(
        sizes.rows, sizes.count, sizes.kv_heads, sizes.num_splits, num_sms
    )
    k = kv_operand(k_cache, q.dtype)
    v = kv_operand(v_cache, q.dtype)
    k_functions = k_cache.quantizer.mma_functions()
    v_functions = v_cache.quantizer.mma_functions()
    item_sizes = [side.qdata.dtype.itemsize for side in (k, v)]
    strides = [
        stride * size // WORD_BYTES
        for side, size in zip((k, v), item_sizes, strict=True)
        for stride in side.qdata.stride()[:3]
    ]
    partials = sizes.empty_partials(q.device)
    _decode_kernel[(sizes.rows * sizes.kv_heads, division.ctas_per_row)](
        q, k.qdata, v.qdata, k.scales, v.scales, page_table, cu_seqlens, starts, *partials,
        scale * LOG2E, sizes.num_splits, page_table.stride(0), query_len, *strides,
        *sizes.head_sizes(), k.num_scales, v.num_scales, k_functions.num_planes,
        v_functions.num_planes, k_functions.values_per_word, v_functions.values_per_word,
        k_functions.load_k, v_functions.load_v, v_functions.v_column, division.block_rows,
        num_warps=1, maxnreg=division.registers, enable_fp_fusion=False,
    )  # fmt: skip
    out = torch.empty_like(q)
    combine_partials(
        partials, q, cu_seqlens, starts, query_len, sizes.num_splits, 1, False, gates, v, out
    )
    return out
