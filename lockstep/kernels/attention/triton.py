# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""paged_attention in Triton: one split-KV flash attention for prefill, decode and verification.

The keys are cut into KV splits at absolute multiples of KV_SPLIT. Inside a split, ascending tiles
with online softmax; splits are combined in ascending order. A CTA takes spans of splits. It
combines the first span in registers; every later split is stored as a partial, and a second kernel
continues the combination in the same order. The partition into CTAs, which static sizes choose,
therefore changes no bit.

Sums over keys go through tl.dot, whose bits do not depend on the number of query rows of the tile.
(token, query head of the group) rows share that axis, so any group size fits. Masked keys add exact
zeros. The output is the accumulator times the reciprocal of the row sum. See
docs/kernels/attention.md.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels import architecture
from lockstep.kernels.architecture import fit_stages, shared_memory_limit
from lockstep.kernels.attention import KV_SPLIT, paged_attention
from lockstep.kernels.attention.epilogue import finish_rotated, store_output
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.compile_target import compile_target
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.kv_tile import load_kv_tile, pages_of_tile
from lockstep.kernels.device.ragged_rows import row_of
from lockstep.kernels.device.softmax import LOG2E, NO_SCORE, combine, online_softmax
from lockstep.kernels.formats.kv import KVCache
from lockstep.kernels.formats.kv.launch import (
    KVOperand,
    kv_operand,
    quantized_token_bytes,
    unsupported_cache,
)
from lockstep.kernels.integers import ceil_div, next_power_of_2

MAX_PARTIAL_BYTES = 1 << 29
"""Maximum bytes of partials for the combine kernel. Longer spans need fewer partials."""
TARGET_CTAS = 256
"""CTAs that parallel spans aim at: two for each of an H200's 132 multiprocessors. CTAs past a row's
end cost time, too."""
IN_FLIGHT = 16
"""Partials that the combine kernel loads ahead. us with 16 and 8 (H200): 8B, context 16,384, 1 x 1
3.7 and 4.3, 8 x 1 6.0 and 7.0; 27B, 1 x 4, 131,072 31.6 and 44.8, 8 x 4, 32,768 31.7 and 29.1."""
COMBINE_COLUMNS = 64
"""Columns of a CTA of the combine kernel. With 128: 4.2, 6.2, 35.0 and 27.9 us."""


@triton.jit
def _softmax_step(scores, v, first_key, last_key, scale, row_max, row_sum, acc):
    """Add a tile of keys to the online softmax state.

    scores: Q K^T [TILE, ROWS], unscaled. last_key: last key that each row sees, [ROWS]. row_max:
    [ROWS]. row_sum: [ONES, ROWS], ONES equal rows. acc: [D, ROWS].
    """
    row_max, rescale, p = online_softmax(scores, scale, first_key, last_key, row_max, 0)
    p = p.to(v.dtype)
    # The row sum is a product with ones: its bits, like acc's, are those of the matrix unit, in one
    # order for any number of rows.
    ones = tl.full((row_sum.shape[0], v.shape[0]), 1.0, v.dtype)
    row_sum = tl.dot(ones, p, row_sum * rescale, input_precision="ieee")
    acc = tl.dot(v.T, p, acc * rescale, input_precision="ieee")
    return row_max, row_sum, acc


@triton.jit
def _store_partial(partials, partial, column, row_max, row_sum, acc, mask, D: tl.constexpr):
    """Store a partial for the combine kernel: a split, or the combination of the first span.

    partials: pointers to the row's partial maxima, sums and accumulators.
    """
    tl.store(partials[0] + partial, row_max, mask=mask)
    tl.store(partials[1] + partial, tl.max(row_sum, 0), mask=mask)  # all ONES rows are equal
    acc_ptrs = partials[2] + (partial[None, :] * D + column[:, None])
    tl.store(acc_ptrs, acc, mask=mask[None, :] & (column < D)[:, None])


@triton.jit
def _load_queries(q, first, offsets, column, row_mask, H: tl.constexpr, D: tl.constexpr):
    """Load query rows [columns, ROWS] of a batch row. first: the row's first token in q."""
    mask = row_mask[:, None] & (column < D)[None, :]
    # transposed: rows are the N axis of both products
    return tl.load(
        q + first * (H * D) + (offsets[:, None] + column[None, :]), mask=mask, other=0.0
    ).T


@triton.jit
def _store_normalized(
    out, gates, gates_offset, offsets, gate_offsets, column, all_sum, all_acc, row_mask,
    D: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Divide the accumulator all_acc [columns, ROWS] by all_sum [ONES, ROWS] and store the output.

    gates_offset: offset of the row's gates.
    """
    if GATED:
        gates += gates_offset
    inverse = tl.div_rn(tl.full((all_sum.shape[1],), 1.0, tl.float32), tl.max(all_sum, 0))
    result = all_acc * inverse[None, :]
    store_output(out, gates, offsets, gate_offsets, column, result, row_mask, None, D, GATED, 0)


@triton.jit
def _store_first_span(
    out, gates, gates_offset, partials, offsets, partial, gate_offsets, column, all_max, all_sum,
    all_acc, row_mask, last_key, span_keys, D: tl.constexpr, GATED: tl.constexpr,
    STORES_PARTIALS: tl.constexpr,
):  # fmt: skip
    """Store the output of tokens that see no key past the first span, a partial of the others."""
    if STORES_PARTIALS:
        stores = row_mask & (last_key >= span_keys)
        _store_partial(partials, partial, column, all_max, all_sum, all_acc, stores, D)
        row_mask = row_mask & (last_key < span_keys)
    _store_normalized(
        out, gates, gates_offset, offsets, gate_offsets, column, all_sum, all_acc, row_mask, D,
        GATED,
    )  # fmt: skip


@triton.jit
def _query_rows(
    first_row, count, start, kv, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return, for (token, query head) rows from first_row on, each [ROWS]: whether the row exists,
    its token, head, last visible key, and offset in [count, H, D]."""
    m = first_row + tl.arange(0, ROWS)
    row_mask = m < count * GROUP
    token = m // GROUP
    head = kv * GROUP + m % GROUP
    last_key = start + token
    return row_mask, token, head, last_key, (token * H + head) * D


@triton.jit
def _partials_of_row(partial_max, partial_sum, partial_acc, offset, D: tl.constexpr):
    """Advance the partials' pointers to a row's first. offset: in (token, split, head) elements."""
    return partial_max + offset, partial_sum + offset, partial_acc + offset * D


@triton.jit
def _empty_state(ONES: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the softmax state over no keys: row_max, row_sum, acc."""
    row_max = tl.full((ROWS,), NO_SCORE, tl.float32)
    row_sum = tl.zeros((ONES, ROWS), tl.float32)
    return row_max, row_sum, tl.zeros((BLOCK_D, ROWS), tl.float32)


@triton.jit(
    do_not_specialize=[
        "num_partials", "table_stride", "gate_stride", "SPAN_SPLITS", "FIRST_SPLITS", "QUERY_LEN",
        "k_layer_constant", "v_layer_constant",
    ]
)  # fmt: skip
def _attention_kernel(
    q, k_cache, v_cache, page_table, cu_seqlens, starts, gates, out, partial_max, partial_sum,
    partial_acc, scale, num_partials, table_stride, gate_stride, SPAN_SPLITS, FIRST_SPLITS,
    QUERY_LEN, K_PAGE_STRIDE: tl.constexpr, K_TOKEN_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr, V_PAGE_STRIDE: tl.constexpr, V_TOKEN_STRIDE: tl.constexpr,
    V_HEAD_STRIDE: tl.constexpr, PAGE: tl.constexpr, H: tl.constexpr, HKV: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    ONES: tl.constexpr, KV_SPLIT: tl.constexpr, GATED: tl.constexpr, STORES_PARTIALS: tl.constexpr,
    COMBINES: tl.constexpr, k_scales, v_scales, k_layer_constant, v_layer_constant,
    K_NUM_SCALES: tl.constexpr, V_NUM_SCALES: tl.constexpr, K_PER_LOAD: tl.constexpr,
    V_PER_LOAD: tl.constexpr, K_LOAD: tl.constexpr, V_LOAD: tl.constexpr,
    K_DEQUANTIZE: tl.constexpr, V_DEQUANTIZE: tl.constexpr, OPAQUE: tl.constexpr,
):  # fmt: skip
    """Attend with ROWS (token, query head) rows of one batch row and KV head.

    A CTA takes every num_programs(2)-th span of SPAN_SPLITS splits.

    K_LOAD, K_DEQUANTIZE, V_..: device functions of a quantized cache (kernels.formats.kv); None for
    a cache of the model's dtype. COMBINES: the first span is combined in registers, and written to
    `out` for tokens that see no later span; else it is one partial for its FIRST_SPLITS splits. Any
    other split is a partial: partial_max, partial_sum [S QUERY_LEN, num_partials, H] and
    partial_acc [S QUERY_LEN, num_partials, H, D].
    """
    pdl_start()
    s = (tl.program_id(0) // HKV).to(tl.int64)
    kv = tl.program_id(0) % HKV
    GROUP: tl.constexpr = H // HKV
    first_row = tl.program_id(1) * ROWS
    page_table_row = page_table + s * table_stride
    span_keys = SPAN_SPLITS * KV_SPLIT
    first_own_key = tl.program_id(2) * span_keys
    key_stride = tl.num_programs(2) * span_keys
    page = pages_of_tile(page_table_row, first_own_key, first_own_key + 1, PAGE, TILE)  # prefetch
    first, count, start = row_of(cu_seqlens, starts, s)
    end = start + tl.minimum(count, (first_row + ROWS - 1) // GROUP + 1)
    num_keys = start + count
    if (first_row >= count * GROUP) | (first_own_key >= end):  # the grid has static sizes
        return
    column = tl.arange(0, BLOCK_D)
    row_mask, token, head, last_key, offsets = _query_rows(
        first_row, count, start, kv, H, GROUP, D, ROWS
    )
    partial = token * num_partials * H + head
    offset = (s * QUERY_LEN * num_partials - FIRST_SPLITS + 1) * H  # of split 0
    partials = _partials_of_row(partial_max, partial_sum, partial_acc, offset, D)
    query = _load_queries(q, first, offsets, column, row_mask, H, D)
    all_state = _empty_state(ONES, ROWS, BLOCK_D)
    state = _empty_state(ONES, ROWS, BLOCK_D)
    for span_begin in range(first_own_key, end, key_stride):
        span_end = tl.minimum(end, span_begin + span_keys)
        for first_key in range(span_begin, span_end, TILE):
            if PAGE % TILE != 0:
                page = pages_of_tile(page_table_row, first_key, num_keys, PAGE, TILE)
            k = load_kv_tile(
                k_cache + kv * K_HEAD_STRIDE, k_scales, k_layer_constant, kv, page, first_key,
                num_keys, column, K_PAGE_STRIDE, K_TOKEN_STRIDE, K_NUM_SCALES, HKV, D, PAGE, TILE,
                K_PER_LOAD, K_LOAD, K_DEQUANTIZE, q.dtype.element_ty, OPAQUE,
            )  # fmt: skip
            scores = tl.dot(k, query, input_precision="ieee")
            v = load_kv_tile(
                v_cache + kv * V_HEAD_STRIDE, v_scales, v_layer_constant, kv, page, first_key,
                num_keys, column, V_PAGE_STRIDE, V_TOKEN_STRIDE, V_NUM_SCALES, HKV, D, PAGE, TILE,
                V_PER_LOAD, V_LOAD, V_DEQUANTIZE, q.dtype.element_ty, OPAQUE,
            )  # fmt: skip
            if PAGE % TILE == 0:  # prefetches the next tile's page during this tile's products
                page = pages_of_tile(page_table_row, first_key + TILE, span_end, PAGE, TILE)
            state = _softmax_step(scores, v, first_key, last_key, scale, *state)
            # End of a KV split, an absolute position.
            if ((first_key + TILE) % KV_SPLIT == 0) | (first_key + TILE >= span_end):
                if ((span_begin == 0) & COMBINES) | (not STORES_PARTIALS):
                    all_state = combine(*all_state, *state, 0)
                else:  # rows that see no key of this split have no such partial
                    stores = row_mask & (first_key // KV_SPLIT * KV_SPLIT <= last_key)
                    split_partial = partial + first_key // KV_SPLIT * H
                    _store_partial(partials, split_partial, column, *state, stores, D)
                state = _empty_state(ONES, ROWS, BLOCK_D)
        page = pages_of_tile(page_table_row, span_begin + key_stride, end, PAGE, TILE)
    if (first_own_key == 0) & COMBINES:
        _store_first_span(
            out + first * (H * D), gates, first * gate_stride, partials, offsets,
            partial + (FIRST_SPLITS - 1) * H, token * gate_stride + (head * 2 + 1) * D, column,
            *all_state, row_mask, last_key, span_keys, D, GATED, STORES_PARTIALS,
        )  # fmt: skip


@triton.jit
def _load_partial(
    partial_max, partial_sum, partial_acc, i, mask, column_mask, H: tl.constexpr, D: tl.constexpr
):
    """Load partial i of a (token, head): row_max, row_sum, acc [columns].

    A masked partial combines as an exact identity.
    """
    # NO_SCORE, 0 and -0 are identities of the combination, down to the sign of zeros.
    row_max = tl.load(partial_max + i * H, mask=mask, other=NO_SCORE)
    row_sum = tl.load(partial_sum + i * H, mask=mask, other=0.0)
    return row_max, row_sum, tl.load(partial_acc + i * H * D, mask=column_mask & mask, other=-0.0)


@triton.jit
def _combine_partial(all_max, all_sum, all_acc, row_max, row_sum, acc):
    """Combine as _combine does, for one query row: one of the two scales is 2^0."""
    new_max = tl.maximum(all_max, row_max)
    # One exp2 instead of two: the larger side's scale is exactly 1.
    rescale = tl.exp2(tl.minimum(all_max, row_max) - new_max)
    old_scale = tl.where(row_max > all_max, rescale, 1.0)
    new_scale = tl.where(row_max > all_max, 1.0, rescale)
    return new_max, all_sum * old_scale + row_sum * new_scale, all_acc * old_scale + acc * new_scale


@triton.jit(do_not_specialize=["num_partials", "gate_stride", "FIRST_SPLITS", "QUERY_LEN", "seed"])
def _combine_kernel(
    partial_max, partial_sum, partial_acc, cu_seqlens, starts, gates, out, num_partials,
    gate_stride, FIRST_SPLITS, QUERY_LEN, H: tl.constexpr, D: tl.constexpr,
    COMBINE_COLUMNS: tl.constexpr, KV_SPLIT: tl.constexpr, GATED: tl.constexpr,
    IN_FLIGHT: tl.constexpr, COMBINES: tl.constexpr, seed, ROTATION_BLOCK: tl.constexpr,
):  # fmt: skip
    """Combine the partials of a (row, token, head) in ascending order, for COMBINE_COLUMNS columns.

    Where the attention kernel COMBINES, it has already written tokens of one partial. Otherwise
    every token has many partials; the first IN_FLIGHT are loaded before the row's length is known,
    and those beyond it are discarded.
    """
    pdl_start()
    s = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) // H
    head = tl.program_id(1) % H
    column = tl.program_id(2) * COMBINE_COLUMNS + tl.arange(0, COMBINE_COLUMNS)
    column_mask = column < D
    row_partials = (s * QUERY_LEN + token) * num_partials * H + head
    partial_max += row_partials
    partial_sum += row_partials
    partial_acc += row_partials * D + column
    loaded = ()
    for i in tl.static_range(IN_FLIGHT):
        loaded = loaded + (  # type: ignore[assignment]
            _load_partial(
                partial_max, partial_sum, partial_acc, i, i < num_partials, column_mask, H, D
            ),
        )
    first, count, start = row_of(cu_seqlens, starts, s)
    num_used = (start + token) // KV_SPLIT + 2 - FIRST_SPLITS
    current = ()
    for i in tl.static_range(IN_FLIGHT):
        row_max = tl.where(i < num_used, loaded[i][0], NO_SCORE)
        row_sum = tl.where(i < num_used, loaded[i][1], 0.0)
        row_acc = tl.where(i < num_used, loaded[i][2], -0.0)
        current = current + ((row_max, row_sum, row_acc),)  # type: ignore[assignment]
    all_max = tl.full((), NO_SCORE, tl.float32)
    all_sum = tl.full((), 0.0, tl.float32)
    all_acc = tl.zeros((COMBINE_COLUMNS,), tl.float32)
    # Software pipeline: the next IN_FLIGHT loads are issued before the current ones are combined.
    for base in range(0, tl.where(num_used > 1, num_used, not COMBINES), IN_FLIGHT):
        partial_max += IN_FLIGHT * H
        partial_sum += IN_FLIGHT * H
        partial_acc += IN_FLIGHT * H * D
        following = ()
        for i in tl.static_range(IN_FLIGHT):
            all_max, all_sum, all_acc = _combine_partial(all_max, all_sum, all_acc, *current[i])
            mask = base + IN_FLIGHT + i < num_used
            following = following + (  # type: ignore[assignment]
                _load_partial(partial_max, partial_sum, partial_acc, i, mask, column_mask, H, D),
            )
        current = following
    result = all_acc[:, None] * tl.div_rn(tl.full((1, 1), 1.0, tl.float32), all_sum)
    # The one-element tensor makes the offset a vector, as store_output takes it.
    offsets = (first + token + tl.zeros((1,), tl.int64)) * H * D + head * D
    gate_offsets = (first + token + tl.zeros((1,), tl.int64)) * gate_stride + (head * 2 + 1) * D
    is_output = (num_used > COMBINES) & (token < count) & (offsets >= 0)
    store_output(
        out, gates, offsets, gate_offsets, column, result, is_output, seed, D, GATED, ROTATION_BLOCK
    )


def supports(**traits: Any) -> str | None:
    """Return None if this kernel serves a layer of these traits, else the reason why not."""
    dim = traits.get("head_dim", 64)
    if not 8 <= dim <= 256:
        return f"head_dim {dim} is not in 8 .. 256"
    heads = traits.get("heads", 1)
    kv_heads = traits.get("kv_heads", 1)
    if heads % kv_heads:
        return f"{heads} heads are no multiple of {kv_heads} KV heads"
    return unsupported_cache(dim, **traits) or gpu_trait(**traits)


@dataclass(frozen=True)
class Partition:
    """Division of the work among CTAs. No field changes a bit.

    block_rows: (token, query head) rows of a CTA. span_splits: consecutive KV splits of a CTA.
    parallel_spans: CTAs that share a row's spans, interleaved. combines: combine the first span in
    registers, so that 64 rows store no partials; with few rows every split is a partial, and more
    CTAs fill the multiprocessors. num_warps, num_stages: of a CTA and of its software pipeline.
    """

    block_rows: int
    span_splits: int
    parallel_spans: int
    combines: bool
    num_warps: int
    num_stages: int


def keys_per_tile(dtype: torch.dtype) -> int:
    """Return TILE: the keys of one softmax step."""
    return 32 if dtype == torch.float32 else 64


def choose_partition(
    rows: int,
    query_len: int,
    heads: int,
    kv_heads: int,
    dim: int,
    num_splits: int,
    dtype: torch.dtype,
    arch: int,
    quantized_bytes: int = 0,
) -> Partition:
    """Return the partition for static sizes on an architecture, from the table and times in
    docs/kernels/attention.md.

    quantized_bytes: bytes of a quantized token's key and value in one head, which pipeline stages
    hold next to one dequantized tile; 0: the cache is not quantized.
    """
    query_rows = query_len * (heads // kv_heads)
    row_heads = rows * kv_heads
    block_rows = min(64, max(16, next_power_of_2(query_rows)))
    # Fewer than 12 CTAs: smaller blocks spread a short step over more of them.
    block_rows = block_rows if row_heads * ceil_div(query_rows, block_rows) >= 12 else 16
    ctas = row_heads * ceil_div(query_rows, block_rows)
    partial_bytes = rows * query_len * heads * (dim + 2) * 4
    # From 96 CTAs on the GPU is busy without splitting rows further.
    combines = ctas >= 96
    span_splits = 4 if ctas >= 24 else 2 if ctas >= 12 else 1
    if combines or partial_bytes * num_splits > MAX_PARTIAL_BYTES:
        combines = True
        span_splits = 64
        # Longer first spans until the remaining partials fit.
        while partial_bytes * (num_splits - span_splits + 1) > MAX_PARTIAL_BYTES:
            span_splits *= 2
    parallel_spans = min(ceil_div(num_splits, span_splits), max(ceil_div(TARGET_CTAS, ctas), 8))
    num_warps = 8 if block_rows == 64 else 4
    row_bytes = next_power_of_2(max(dim, 16)) * dtype.itemsize
    stage_bytes = 2 * keys_per_tile(dtype) * row_bytes  # keys and values
    fixed_bytes = (16 if dtype == torch.float32 else block_rows) * row_bytes
    max_stages = 2 if block_rows == 64 else 3
    if quantized_bytes:
        fixed_bytes += stage_bytes // 2  # one dequantized tile, keys or values
        fixed_bytes += keys_per_tile(dtype) * block_rows * dtype.itemsize  # p
        stage_bytes = keys_per_tile(dtype) * quantized_bytes
        stages_that_fit = 1 + (shared_memory_limit(arch) // 2 - fixed_bytes) // stage_bytes
        max_stages = max(2, min(max_stages, stages_that_fit))  # two CTAs per multiprocessor
    num_stages = fit_stages(max_stages, stage_bytes, fixed_bytes, arch)
    return Partition(block_rows, span_splits, parallel_spans, combines, num_warps, num_stages)


@paged_attention.backend("triton", supports=supports)
def paged_attention_triton(
    q: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    gates: Tensor | None = None,
    partition: Partition | None = None,
) -> Tensor:
    """Run paged_attention. q is contiguous; last strides are 1.

    partition: division of the work; None for that of choose_partition.
    """
    rows = starts.shape[0]
    _, heads, dim = q.shape
    _, page, kv_heads, _ = k_cache.shape
    out = torch.empty_like(q)
    # fp32 products take more registers, so their blocks are smaller.
    is_fp32 = q.dtype == torch.float32
    if not len(q):
        return out
    num_splits = ceil_div(page_table.shape[1] * page, KV_SPLIT)
    arch = architecture.sm_number(q.device)
    quantized_bytes = quantized_token_bytes(k_cache, v_cache)
    sizes = (rows, query_len, heads, kv_heads, dim, num_splits)
    p = partition or choose_partition(*sizes, q.dtype, arch, quantized_bytes)
    block_dim = next_power_of_2(max(dim, 16))
    block_rows = 16 if is_fp32 else p.block_rows
    tile_keys = keys_per_tile(q.dtype)
    first_splits = p.span_splits if p.combines else 1  # splits of the first partial
    num_partials = (
        0 if p.combines and p.span_splits >= num_splits else num_splits - first_splits + 1
    )
    partials = empty_partials(rows * query_len * heads * num_partials, dim, q.device)
    gate_stride = gates.stride(0) if gates is not None else 0
    blocks = ceil_div(query_len * (heads // kv_heads), block_rows)
    target = compile_target(q.device)
    k = kv_operand(k_cache, q.dtype, target)
    v = kv_operand(v_cache, q.dtype, target)
    opaque = quantized_bytes > 0 and not is_fp32 and target.inline_ptx
    # Kernels that multiply do not rotate back: epilogue.py says why.
    rotates_later = p.combines and v.rotation_block > 0
    attended = torch.empty_like(q, dtype=torch.float32) if rotates_later else out
    kernel_gates = None if rotates_later else gates
    _attention_kernel[(rows * kv_heads, blocks, p.parallel_spans)](
        q, k.qdata, v.qdata, page_table, cu_seqlens, starts, kernel_gates, attended, *partials,
        scale * LOG2E, num_partials, page_table.stride(0), gate_stride, p.span_splits, first_splits,
        query_len, *k.qdata.stride()[:3], *v.qdata.stride()[:3], page, heads, kv_heads, dim,
        block_rows, block_dim, tile_keys, 16 if is_fp32 else 64, KV_SPLIT, kernel_gates is not None,
        num_partials > 0, p.combines, k.scales, v.scales, k.layer_constant, v.layer_constant,
        k.num_scales, v.num_scales, k.values_per_load, v.values_per_load, k.load, v.load,
        k.dequantize, v.dequantize, opaque, num_warps=p.num_warps, num_stages=p.num_stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    if num_partials:
        unrotated_v = v._replace(rotation_block=0) if rotates_later else v
        combine_partials(
            partials, q, cu_seqlens, starts, query_len, num_partials, first_splits, p.combines,
            kernel_gates, unrotated_v, attended,
        )  # fmt: skip
    return finish_rotated(attended, gates, v, out) if rotates_later else out


def empty_partials(count: int, dim: int, device: torch.device) -> list[Tensor]:
    """Allocate `count` partials: row maxima, row sums, accumulators."""
    return [torch.empty(count * size, dtype=torch.float32, device=device) for size in (1, 1, dim)]


def combine_partials(
    partials: list[Tensor],
    q: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    num_partials: int,
    first_splits: int,
    combines: bool,
    gates: Tensor | None,
    v: KVOperand,
    out: Tensor,
) -> None:
    """Launch the combine kernel over a step's partials [S query_len, num_partials, H] into out [T,
    H, D].

    first_splits: splits of the first partial. combines: the attention kernel combined those splits
    and wrote the tokens that need no other partial.
    """
    _, heads, dim = q.shape
    block_dim = next_power_of_2(max(dim, 16))
    columns = min(block_dim, COMBINE_COLUMNS)
    gate_stride = gates.stride(0) if gates is not None else 0
    _combine_kernel[(starts.shape[0], query_len * heads, block_dim // columns)](
        *partials, cu_seqlens, starts, gates, out, num_partials, gate_stride, first_splits,
        query_len, heads, dim, columns, KV_SPLIT, gates is not None, IN_FLIGHT, combines,
        v.layer_constant if v.rotation_block else None, v.rotation_block,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
