# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""Dequantization of latents ahead of a kernel that reads tiles of the model's dtype.

attention/quantized_prefill_hopper.py does the same with keys and values, one page of a KV head per
CTA. Here a captured step's page table may be far longer than its rows, and latents and rotary keys
are interleaved, so CTAs stride over a row. Both load tiles with device/kv_tile.py.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.compile_target import compile_target
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.kv_tile import load_kv_tile
from lockstep.kernels.device.ragged_rows import row_of
from lockstep.kernels.formats.kv import KVCache
from lockstep.kernels.formats.kv.launch import kv_operand
from lockstep.kernels.integers import ceil_div, next_power_of_2

CTA_TOKENS = 16
"""Tokens that a CTA dequantizes at once."""
WARPS = 4
TARGET_CTAS = 2048
"""CTAs that share the rows: about 16 per multiprocessor of an H200, an estimate."""
MAX_SCRATCH_BYTES = 2 << 30
"""Maximum bytes of dequantized rows at once."""


@triton.jit(do_not_specialize=["table_stride", "columns", "layer_constant"])
def _dequantize_kernel(
    qdata, scales, layer_constant, ropes, page_table, cu_seqlens, starts, latents_out, ropes_out,
    table, table_stride, columns, L_PAGE_STRIDE: tl.constexpr, L_TOKEN_STRIDE: tl.constexpr,
    R_PAGE_STRIDE: tl.constexpr, R_TOKEN_STRIDE: tl.constexpr, PAGE: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, TILE: tl.constexpr,
    NUM_SCALES: tl.constexpr, PER_LOAD: tl.constexpr, LOAD: tl.constexpr, DEQUANTIZE: tl.constexpr,
):  # fmt: skip
    """Dequantize every num_programs(1)-th TILE of a row's tokens, and store the new number of their
    page."""
    pdl_start()
    s = tl.program_id(0).to(tl.int64)
    _, count, start = row_of(cu_seqlens, starts, s)
    num_keys = start + count
    c = tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    for first_key in range(tl.program_id(1) * TILE, num_keys, tl.num_programs(1) * TILE):
        # Page numbers in the scratch: row by row, in order.
        new_page = s * columns + first_key // PAGE
        tl.store(table + new_page, new_page.to(tl.int32))
        page = tl.load(page_table + s * table_stride + first_key // PAGE)
        latent = load_kv_tile(
            qdata, scales, layer_constant, 0, page, first_key, num_keys, c, L_PAGE_STRIDE,
            L_TOKEN_STRIDE, NUM_SCALES, 1, C, PAGE, TILE, PER_LOAD, LOAD, DEQUANTIZE,
            latents_out.dtype.element_ty, False,
        )  # fmt: skip
        rope = load_kv_tile(
            ropes, None, None, 0, page, first_key, num_keys, r, R_PAGE_STRIDE, R_TOKEN_STRIDE, 0, 1,
            R, PAGE, TILE, 1, None, None, ropes_out.dtype.element_ty, False,
        )  # fmt: skip
        token = (new_page * PAGE + first_key % PAGE + tl.arange(0, TILE))[:, None]
        tl.store(latents_out + token * C + c[None], latent, mask=(c < C)[None])
        tl.store(ropes_out + token * R + r[None], rope, mask=(r < R)[None])


def dequantized_groups(
    latents: KVCache,
    ropes: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    max_bytes: int = MAX_SCRATCH_BYTES,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Yield latent_attention's arguments of these names for groups of rows, with dequantized
    latents.

    Latents have the dtype of the rotary keys and lie in pages of a scratch, which the next group
    reuses. A group has as many rows as max_bytes contains, at least one. Latents that are not
    quantized are yielded unchanged, in one group.

    Tokens from a row's last to the end of its CTA_TOKENS are zeros; those after it are unwritten.
    """
    if isinstance(latents, Tensor):
        yield latents, ropes, page_table, cu_seqlens, starts
        return
    columns = page_table.shape[1]
    _, page, dim = latents.shape
    rope = ropes.shape[2]
    row_bytes = columns * page * (dim + rope) * ropes.itemsize
    rows_per_group = max(1, min(len(starts), max_bytes // row_bytes))
    new_empty = ropes.new_empty
    latent_scratch = new_empty(rows_per_group * columns, page, dim)
    rope_scratch = new_empty(rows_per_group * columns, page, rope)
    table = new_empty(rows_per_group, columns, dtype=torch.int32)
    latent_operand = kv_operand(latents, ropes.dtype, compile_target(ropes.device))
    for begin in range(0, len(starts), rows_per_group):
        group_starts = starts[begin : begin + rows_per_group]
        bounds = cu_seqlens[begin : begin + len(group_starts) + 1]
        # Enough CTAs for few rows, one per CTA_TOKENS at most.
        parallel = ceil_div(TARGET_CTAS, len(group_starts))
        parallel = min(parallel, ceil_div(columns * page, CTA_TOKENS))
        _dequantize_kernel[(len(group_starts), parallel)](
            latent_operand.qdata, latent_operand.scales, latent_operand.layer_constant, ropes,
            page_table[begin:], bounds, group_starts, latent_scratch, rope_scratch, table,
            page_table.stride(0), columns, *latent_operand.qdata.stride()[:2], *ropes.stride()[:2],
            page, dim, rope, next_power_of_2(dim), next_power_of_2(rope), CTA_TOKENS,
            latent_operand.num_scales, latent_operand.values_per_load, latent_operand.load,
            latent_operand.dequantize, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        yield latent_scratch, rope_scratch, table[: len(group_starts)], bounds, group_starts
