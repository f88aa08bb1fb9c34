# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""latent_attention in Triton: one split-KV flash attention for prompts, decoding and verification.

The keys are cut into KV splits at absolute positions. Inside a split, tiles are added in ascending
order with online softmax. The splits of a span are combined in ascending order from an empty state,
and then the spans are combined in the same way. Every partition into CTAs keeps these two levels.
So the partition, which static sizes choose, changes no bit. The length of a split depends on the
architecture and, on Hopper, on the token's position.

A CTA combines all of a row, or stores a partial per span or per split, and a second kernel
continues the same combination. Sums over keys go through tl.dot. (token, head) rows share its M, in
blocks of one size. Masked keys add exact zeros. See docs/kernels/latent_attention.md.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels import architecture
from lockstep.kernels.architecture import HOPPER, fit_stages
from lockstep.kernels.attention import KV_SPLIT
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.compile_target import compile_target
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.kv_tile import load_kv_tile, pages_of_tile
from lockstep.kernels.device.ragged_rows import row_of
from lockstep.kernels.device.softmax import LOG2E, NO_SCORE, combine
from lockstep.kernels.formats.kv import KVCache
from lockstep.kernels.formats.kv.launch import kv_operand, quantized_token_bytes, unsupported_cache
from lockstep.kernels.integers import ceil_div, next_power_of_2
from lockstep.kernels.latent_attention import latent_attention
from lockstep.kernels.latent_attention.device import (
    block_of,
    empty_state,
    softmax_step,
)

FAR = 16384
"""Position from which a token's splits are long on Hopper, where every combination goes through
memory (docs/decisions/0015)."""
NEAR_KV_SPLIT = 1024
FAR_KV_SPLIT = 2048
"""Keys of a split on Hopper: of a token before FAR, and from there on."""
SPAN = 8
"""Near splits per span: part of the op's definition, like KV_SPLIT."""
MAX_LATENT = 512
"""Maximum width of a latent: the accumulator of 64 rows of it fills half of the registers of 8
warps."""
TARGET_CTAS = 128
"""CTAs that keep a GPU busy: about one for each of an H200's 132 multiprocessors, since its shared
memory has no room for two."""
MAX_PARTIAL_BYTES = 1 << 29
"""Maximum bytes of partials for the combine kernel."""
IN_FLIGHT = 4
"""Partials that the combine kernel loads at once."""
COMBINE_COLUMNS = 128
"""Columns of a CTA of the combine kernel."""
ONES = 16
"""Columns of the product that adds p to row sums: the minimum of every matrix unit."""


@triton.jit
def _attend_tile(
    q_latent, q_rope, latents, scales, layer_constant, ropes, page_table_row, page, first_key,
    num_keys, last_key, scale, row_max, row_sum, acc, L_PAGE_STRIDE: tl.constexpr,
    L_TOKEN_STRIDE: tl.constexpr, R_PAGE_STRIDE: tl.constexpr, R_TOKEN_STRIDE: tl.constexpr,
    PAGE: tl.constexpr, C: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr,
    NUM_SCALES: tl.constexpr, PER_LOAD: tl.constexpr, LOAD: tl.constexpr, DEQUANTIZE: tl.constexpr,
    OPAQUE: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the softmax state. page: of this tile; the page of the next is
    returned."""
    DTYPE: tl.constexpr = q_latent.dtype
    c = tl.arange(0, q_latent.shape[1])
    r = tl.arange(0, q_rope.shape[1])
    latent = load_kv_tile(
        latents, scales, layer_constant, 0, page, first_key, num_keys, c, L_PAGE_STRIDE,
        L_TOKEN_STRIDE, NUM_SCALES, 1, C, PAGE, TILE, PER_LOAD, LOAD, DEQUANTIZE, DTYPE, OPAQUE,
    )  # fmt: skip
    rope = load_kv_tile(
        ropes, None, None, 0, page, first_key, num_keys, r, R_PAGE_STRIDE, R_TOKEN_STRIDE, 0, 1, R,
        PAGE, TILE, 1, None, None, DTYPE, False,
    )  # fmt: skip
    # Prefetches the next tile's page during this tile's products.
    page = pages_of_tile(page_table_row, first_key + TILE, num_keys, PAGE, TILE)
    row_max, row_sum, acc = softmax_step(
        q_latent, q_rope, latent, rope, first_key, last_key, scale, row_max, row_sum, acc
    )
    return row_max, row_sum, acc, page


@triton.jit
def _attend_row(
    q_latent, q_rope, latents, scales, layer_constant, ropes, page_table_row, end, num_keys,
    last_key, split, scale, L_PAGE_STRIDE: tl.constexpr, L_TOKEN_STRIDE: tl.constexpr,
    R_PAGE_STRIDE: tl.constexpr, R_TOKEN_STRIDE: tl.constexpr, PAGE: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, TILE: tl.constexpr, NUM_SCALES: tl.constexpr, PER_LOAD: tl.constexpr,
    LOAD: tl.constexpr, DEQUANTIZE: tl.constexpr, OPAQUE: tl.constexpr, ONES: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Attend to all keys below `end`. Returns: row sums and accumulator.

    split, SPAN: keys of a split and of a span.

    The accumulator of the split takes half of the registers. Those of its span and of all spans,
    which are touched only at a split's end, spill to local memory meanwhile.
    """
    ROWS: tl.constexpr = q_latent.shape[0]
    BLOCK: tl.constexpr = q_latent.shape[1]
    row_max, row_sum, acc = empty_state(ROWS, ONES, BLOCK)
    span_max, span_sum, span_acc = empty_state(ROWS, ONES, BLOCK)
    all_max, all_sum, all_acc = empty_state(ROWS, ONES, BLOCK)
    page = pages_of_tile(page_table_row, 0, num_keys, PAGE, TILE)
    for first_key in range(0, end, TILE):
        row_max, row_sum, acc, page = _attend_tile(
            q_latent, q_rope, latents, scales, layer_constant, ropes, page_table_row, page,
            first_key, num_keys, last_key, scale, row_max, row_sum, acc, L_PAGE_STRIDE,
            L_TOKEN_STRIDE, R_PAGE_STRIDE, R_TOKEN_STRIDE, PAGE, C, R, TILE, NUM_SCALES, PER_LOAD,
            LOAD, DEQUANTIZE, OPAQUE,
        )  # fmt: skip
        tile_end = first_key + TILE
        # End of a KV split.
        if (tile_end % split == 0) | (tile_end >= end):
            span_max, span_sum, span_acc = combine(
                span_max, span_sum, span_acc, row_max, row_sum, acc, 1
            )
            row_max, row_sum, acc = empty_state(ROWS, ONES, BLOCK)
            # End of a span of splits.
            if (tile_end % SPAN == 0) | (tile_end >= end):
                all_max, all_sum, all_acc = combine(
                    all_max, all_sum, all_acc, span_max, span_sum, span_acc, 1
                )
                span_max, span_sum, span_acc = empty_state(ROWS, ONES, BLOCK)
    return all_sum, all_acc


@triton.jit
def _attend_unit(
    q_latent, q_rope, latents, scales, layer_constant, ropes, page_table_row, first, end, num_keys,
    last_key, split, scale, L_PAGE_STRIDE: tl.constexpr, L_TOKEN_STRIDE: tl.constexpr,
    R_PAGE_STRIDE: tl.constexpr, R_TOKEN_STRIDE: tl.constexpr, PAGE: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, TILE: tl.constexpr, NUM_SCALES: tl.constexpr, PER_LOAD: tl.constexpr,
    LOAD: tl.constexpr, DEQUANTIZE: tl.constexpr, OPAQUE: tl.constexpr, ONES: tl.constexpr,
    COMBINES: tl.constexpr,
):  # fmt: skip
    """Attend to keys first .. end - 1: a split or, where it COMBINES, the splits of a span.

    Returns: row_max, row_sum, acc.
    """
    ROWS: tl.constexpr = q_latent.shape[0]
    BLOCK: tl.constexpr = q_latent.shape[1]
    row_max, row_sum, acc = empty_state(ROWS, ONES, BLOCK)
    if COMBINES:
        unit_max, unit_sum, unit_acc = empty_state(ROWS, ONES, BLOCK)
    page = pages_of_tile(page_table_row, first, num_keys, PAGE, TILE)
    for first_key in range(first, end, TILE):
        row_max, row_sum, acc, page = _attend_tile(
            q_latent, q_rope, latents, scales, layer_constant, ropes, page_table_row, page,
            first_key, num_keys, last_key, scale, row_max, row_sum, acc, L_PAGE_STRIDE,
            L_TOKEN_STRIDE, R_PAGE_STRIDE, R_TOKEN_STRIDE, PAGE, C, R, TILE, NUM_SCALES, PER_LOAD,
            LOAD, DEQUANTIZE, OPAQUE,
        )  # fmt: skip
        if COMBINES:
            if ((first_key + TILE) % split == 0) | (first_key + TILE >= end):
                unit_max, unit_sum, unit_acc = combine(
                    unit_max, unit_sum, unit_acc, row_max, row_sum, acc, 1
                )
                row_max, row_sum, acc = empty_state(ROWS, ONES, BLOCK)
    if COMBINES:
        row_max = unit_max
        row_sum = unit_sum
        acc = unit_acc
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=["num_partials", "table_stride", "QUERY_LEN", "layer_constant"])
def _attention_kernel(
    q_latent, q_rope, latents, ropes, page_table, cu_seqlens, starts, out, partial_max, partial_sum,
    partial_acc, scale, num_partials, table_stride, QUERY_LEN, L_PAGE_STRIDE: tl.constexpr,
    L_TOKEN_STRIDE: tl.constexpr, R_PAGE_STRIDE: tl.constexpr, R_TOKEN_STRIDE: tl.constexpr,
    PAGE: tl.constexpr, H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, TILE: tl.constexpr, ONES: tl.constexpr,
    KV_SPLIT: tl.constexpr, NEAR_SPLIT: tl.constexpr, FAR: tl.constexpr, SPAN: tl.constexpr,
    UNIT: tl.constexpr, scales, layer_constant, NUM_SCALES: tl.constexpr, PER_LOAD: tl.constexpr,
    LOAD: tl.constexpr, DEQUANTIZE: tl.constexpr, OPAQUE: tl.constexpr,
):  # fmt: skip
    """Attend with a block of one row's (token, head) rows: every num_programs(2)-th unit of keys.

    scales, layer_constant, LOAD, ..: quantized latents as KVOperand has them; LOAD None: not
    quantized.

    UNIT 0: all keys, and `out` is written. Else the keys of a partial: a span or, where UNIT is
    NEAR_SPLIT, a split of the block. Partials: partial_max, partial_sum [S QUERY_LEN, num_partials,
    H] and partial_acc [S QUERY_LEN, num_partials, H, C].
    """
    pdl_start()
    s = tl.program_id(0).to(tl.int64)
    first, count, start = row_of(cu_seqlens, starts, s)
    first_row, row_end, split = block_of(
        tl.program_id(1), start, count, H, ROWS, KV_SPLIT, NEAR_SPLIT, FAR
    )
    end = start + (tl.minimum(first_row + ROWS, row_end) - 1) // H + 1
    num_keys = start + count
    unit = split if UNIT == NEAR_SPLIT else UNIT
    first_unit = tl.program_id(2) * unit
    # CTAs past the row's tokens or keys: the grid has static sizes.
    if (first_row >= row_end) | (first_unit >= end):
        return
    page_table_row = page_table + s * table_stride
    c = tl.arange(0, BLOCK_C)[None, :]
    r = tl.arange(0, BLOCK_R)[None, :]
    m = first_row + tl.arange(0, ROWS)
    row_mask = m < row_end
    mask = row_mask[:, None] & (c < C)
    last_key = start + m // H
    query = (first * H + m)[:, None]
    ql = tl.load(q_latent + (query * C + c), mask=mask, other=0.0)
    qr = tl.load(q_rope + (query * R + r), mask=row_mask[:, None] & (r < R), other=0.0)
    if UNIT == 0:
        row_sum, acc = _attend_row(
            ql, qr, latents, scales, layer_constant, ropes, page_table_row, end, num_keys, last_key,
            split, scale, L_PAGE_STRIDE, L_TOKEN_STRIDE, R_PAGE_STRIDE, R_TOKEN_STRIDE, PAGE, C, R,
            TILE, NUM_SCALES, PER_LOAD, LOAD, DEQUANTIZE, OPAQUE, ONES, SPAN,
        )  # fmt: skip
        # Correctly rounded reciprocal, then one product and one rounding.
        inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.max(row_sum, 1))
        result = (acc * inverse[:, None]).to(out.dtype.element_ty)
        tl.store(out + (query * C + c), result, mask=mask)
    else:
        for key in range(first_unit, end, tl.num_programs(2) * unit):
            row_max, row_sum, acc = _attend_unit(
                ql, qr, latents, scales, layer_constant, ropes, page_table_row, key,
                tl.minimum(end, key + unit), num_keys, last_key, split, scale, L_PAGE_STRIDE,
                L_TOKEN_STRIDE, R_PAGE_STRIDE, R_TOKEN_STRIDE, PAGE, C, R, TILE, NUM_SCALES,
                PER_LOAD, LOAD, DEQUANTIZE, OPAQUE, ONES, UNIT == SPAN,
            )  # fmt: skip
            # Rows that see no key of this unit have no such partial.
            stores = row_mask & (key <= last_key)
            partial = (s * QUERY_LEN + m // H) * num_partials * H + key // unit * H + m % H
            tl.store(partial_max + partial, row_max, mask=stores)
            tl.store(partial_sum + partial, tl.max(row_sum, 1), mask=stores)
            acc_ptrs = partial_acc + (partial[:, None] * C + c)
            tl.store(acc_ptrs, acc, mask=stores[:, None] & (c < C))


@triton.jit(do_not_specialize=["num_partials", "QUERY_LEN"])
def _combine_kernel(
    partial_max, partial_sum, partial_acc, cu_seqlens, starts, out, num_partials, QUERY_LEN,
    H: tl.constexpr, C: tl.constexpr, COMBINE_COLUMNS: tl.constexpr, KV_SPLIT: tl.constexpr,
    NEAR_SPLIT: tl.constexpr, FAR: tl.constexpr, SPAN: tl.constexpr, UNIT: tl.constexpr,
    IN_FLIGHT: tl.constexpr,
):  # fmt: skip
    """Combine the partials of a (row, token, head) in ascending order, COMBINE_COLUMNS per CTA."""
    pdl_start()
    s = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) // H
    head = tl.program_id(1) % H
    first, count, start = row_of(cu_seqlens, starts, s)
    if token >= count:
        return
    unit = UNIT
    if UNIT == NEAR_SPLIT:
        unit = tl.where(start + token < FAR, NEAR_SPLIT, KV_SPLIT)
    num_used = (start + token) // unit + 1
    c = tl.program_id(2) * COMBINE_COLUMNS + tl.arange(0, COMBINE_COLUMNS)
    all_max, all_sum, all_acc = empty_state(1, 1, COMBINE_COLUMNS)
    span_max, span_sum, span_acc = empty_state(1, 1, COMBINE_COLUMNS)
    zero = tl.zeros((1,), tl.int64)
    for base in range(0, num_used, IN_FLIGHT):
        for i in tl.static_range(IN_FLIGHT):
            live = base + i < num_used
            index = ((s * QUERY_LEN + token) * num_partials + base + i) * H + head + zero
            row_max = tl.load(partial_max + index, mask=live & (zero == 0), other=0.0)
            row_sum = tl.load(partial_sum + index, mask=live & (zero == 0), other=0.0)[:, None]
            mask = live & (c < C)[None, :]
            acc = tl.load(partial_acc + (index[:, None] * C + c[None, :]), mask=mask, other=0.0)
            # Partials are splits: rebuild the two levels, branch-free, since a branch per partial
            # costs more.
            if UNIT < SPAN:
                row_max, row_sum, acc = combine(
                    span_max, span_sum, span_acc, row_max, row_sum, acc, 1
                )
                span_max = tl.where(live, row_max, span_max)
                span_sum = tl.where(live, row_sum, span_sum)
                span_acc = tl.where(live, acc, span_acc)
                at_span_end = ((base + i + 1) * unit % SPAN == 0) | (base + i + 1 == num_used)
                row_max, row_sum, acc = combine(
                    all_max, all_sum, all_acc, span_max, span_sum, span_acc, 1
                )
                ends_span = live & at_span_end
                # The next span starts from an empty state.
                span_max = tl.where(ends_span, NO_SCORE, span_max)
                span_sum = tl.where(ends_span, 0.0, span_sum)
                span_acc = tl.where(ends_span, 0.0, span_acc)
            else:
                row_max, row_sum, acc = combine(all_max, all_sum, all_acc, row_max, row_sum, acc, 1)
                ends_span = live
            all_max = tl.where(ends_span, row_max, all_max)
            all_sum = tl.where(ends_span, row_sum, all_sum)
            all_acc = tl.where(ends_span, acc, all_acc)
    inverse = tl.div_rn(tl.full((1, 1), 1.0, tl.float32), all_sum)
    offset = ((first + token) * H + head) * C
    tl.store(
        out + (offset + c)[None, :], (all_acc * inverse).to(out.dtype.element_ty), (c < C)[None]
    )


def supports(**traits: Any) -> str | None:
    """Return None if this kernel serves a layer of these traits, else the reason why not."""
    latent = traits.get("latent", MAX_LATENT)
    rope = traits.get("rope", 64)
    if latent > MAX_LATENT:
        return f"a latent of {latent} is above {MAX_LATENT}"
    if rope > latent:
        return f"rope {rope} is above the latent's {latent}"
    return unsupported_cache(latent, **traits) or gpu_trait(**traits)


@dataclass(frozen=True)
class Tile:
    """Tile of an architecture. It is part of the definition there, since every row must be
    multiplied in products of one shape.

    rows: (token, head) rows of a CTA. num_keys: keys of a softmax step. num_warps: of a CTA.
    kv_split: keys of a split of a token from position `far` on. near_split: of a token before it.
    """

    rows: int
    num_keys: int
    num_warps: int
    kv_split: int = KV_SPLIT
    near_split: int = KV_SPLIT
    far: int = 0

    @property
    def span(self) -> int:
        """Keys of a span."""
        return self.near_split * SPAN

    @property
    def split_constants(self) -> tuple[int, int, int, int]:
        """Constants that kernels take: keys of a split, of a near split, far, keys of a span."""
        return self.kv_split, self.near_split, self.far, self.span

    def blocks(self, query_len: int, heads: int) -> int:
        """Return the blocks of a row's (token, head) rows.

        One block more where a block could hold tokens on both sides of `far`.
        """
        both = self.far > 0 and heads % self.rows > 0
        return ceil_div(query_len * heads, self.rows) + both


def choose_tile(dtype: torch.dtype, arch: int) -> Tile:
    """Return the tile of an architecture.

    wgmma and tcgen05 take 64 rows. mma.sync keeps queries in registers next to the accumulator, so
    32. fp32 goes through FMA units, whose operands take twice the bytes.
    """
    if dtype == torch.float32:
        return Tile(16, 16, 8)
    if arch == HOPPER:
        return Tile(64, 64, 8, FAR_KV_SPLIT, NEAR_KV_SPLIT, FAR)
    return Tile(64, 32, 8) if arch == 100 else Tile(32, 32, 8)


@dataclass(frozen=True)
class Partition:
    """Division of the work among CTAs. No field changes a bit.

    unit: keys of a partial: 0 (a CTA takes all of a row), a span, or a near split. parallel: CTAs
    that share a row's units, interleaved.
    """

    unit: int
    parallel: int


def choose_partition(
    rows: int, query_len: int, heads: int, latent: int, num_keys: int, tile: Tile
) -> Partition:
    """Return the partition of the keys for static sizes. num_keys: maximum keys of a row."""
    row_blocks = rows * ceil_div(query_len * heads, tile.rows)
    partial_bytes = rows * query_len * heads * (latent + 2) * 4
    idle = row_blocks * ceil_div(num_keys, tile.span) < TARGET_CTAS
    small = query_len * heads * 4 <= tile.kv_split  # a partial: half of a split's bytes
    for unit in (tile.near_split, tile.span) if idle or small else (tile.span,):
        units = ceil_div(num_keys, unit)
        if row_blocks < TARGET_CTAS and partial_bytes * units <= MAX_PARTIAL_BYTES:
            return Partition(unit, min(units, max(ceil_div(2 * TARGET_CTAS, row_blocks), SPAN)))
    return Partition(0, 1)


@latent_attention.backend("triton", supports=supports)
def latent_attention_triton(
    q_latent: Tensor,
    q_rope: Tensor,
    latents: KVCache,
    ropes: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    partition: Partition | None = None,
) -> Tensor:
    """Run latent_attention. Queries are contiguous; last strides of the caches are 1.

    partition: None for that of choose_partition.
    """
    rows = starts.shape[0]
    _, heads, latent = q_latent.shape
    rope = q_rope.shape[2]
    page = latents.shape[1]
    out = torch.empty_like(q_latent)
    if not len(out):
        return out
    arch = architecture.sm_number(q_latent.device)
    tile = choose_tile(q_latent.dtype, arch)
    num_keys = page_table.shape[1] * page
    chosen = partition or choose_partition(rows, query_len, heads, latent, num_keys, tile)
    num_partials = ceil_div(num_keys, chosen.unit) if chosen.unit else 0
    count = rows * query_len * heads * num_partials
    partials = [
        torch.empty(count * size, dtype=torch.float32, device=q_latent.device)
        for size in (1, 1, latent)
    ]
    block_c = next_power_of_2(max(latent, 16))
    block_r = next_power_of_2(max(rope, 16))
    target = compile_target(q_latent.device)
    latent_operand = kv_operand(latents, q_latent.dtype, target)
    quantized_bytes = quantized_token_bytes(latents)
    size = q_latent.element_size()
    latent_bytes = block_c * size
    stage_bytes = tile.num_keys * ((quantized_bytes or latent_bytes) + block_r * size)
    fixed_bytes = tile.rows * (block_c + block_r) * size  # queries
    if quantized_bytes:
        fixed_bytes += tile.num_keys * latent_bytes
    grid = (rows, tile.blocks(query_len, heads), chosen.parallel)
    _attention_kernel[grid](
        q_latent, q_rope, latent_operand.qdata, ropes, page_table, cu_seqlens, starts, out,
        *partials, scale * LOG2E, num_partials, page_table.stride(0), query_len,
        *latent_operand.qdata.stride()[:2], *ropes.stride()[:2], page, heads, latent, rope,
        tile.rows, block_c, block_r, tile.num_keys, ONES, *tile.split_constants, chosen.unit,
        latent_operand.scales, latent_operand.layer_constant, latent_operand.num_scales,
        latent_operand.values_per_load, latent_operand.load, latent_operand.dequantize,
        quantized_bytes > 0 and q_latent.dtype != torch.float32 and target.opaque,
        num_warps=tile.num_warps, num_stages=fit_stages(2, stage_bytes, fixed_bytes, arch),
        enable_fp_fusion=False,
    )  # fmt: skip
    if num_partials:
        combine_partials(
            partials, cu_seqlens, starts, out, num_partials, query_len, chosen.unit, tile
        )
    return out


def combine_partials(
    partials: list[Tensor],
    cu_seqlens: Tensor,
    starts: Tensor,
    out: Tensor,
    num_partials: int,
    query_len: int,
    unit: int,
    tile: Tile,
) -> None:
    """Launch the combine kernel over partials of `unit` keys each, into out [T, H, C]."""
    _, heads, latent = out.shape
    block_c = next_power_of_2(max(latent, 16))
    columns = min(block_c, COMBINE_COLUMNS)
    _combine_kernel[(len(starts), query_len * heads, block_c // columns)](
        *partials, cu_seqlens, starts, out, num_partials, query_len,
        heads, latent, columns, *tile.split_constants, unit, IN_FLIGHT,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
