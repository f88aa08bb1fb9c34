# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""paged_attention for long queries over quantized caches on Hopper.

Pages are dequantized into a scratch, which hopper.py reads. attention(quantized) ==
attention(dequantized), so no bit changes. Where the format leaves values rotated, hopper.py leaves
its output in fp32 (epilogue.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.attention.epilogue import finish_rotated
from lockstep.kernels.attention.hopper import MIN_QUERY_LEN, launch_prefill
from lockstep.kernels.attention.warpgroup import TILE
from lockstep.kernels.compile_target import compile_target
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.kv_tile import load_kv_tile
from lockstep.kernels.device.ragged_rows import row_of
from lockstep.kernels.formats.kv import QuantizedKV
from lockstep.kernels.formats.kv.launch import KVOperand, kv_operand
from lockstep.kernels.integers import ceil_div

SCRATCH_BYTES = 160 << 20
"""Maximum bytes of the scratch. One row and KV head may exceed it.

Rows, then KV heads, are processed in groups that fit. All heads of a row of 32,768 tokens of the
27B or the 8B fit, and one head of a row of 125,000.
"""


@triton.jit(do_not_specialize=["table_stride", "columns", "first_head", "layer_constant"])
def _dequantize_kernel(
    qdata, scales, layer_constant, page_table, cu_seqlens, starts, out, table_stride, columns,
    first_head, PAGE_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    NUM_SCALES: tl.constexpr, HKV: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    TILE: tl.constexpr, PER_LOAD: tl.constexpr, LOAD: tl.constexpr, DEQUANTIZE: tl.constexpr,
    OPAQUE: tl.constexpr,
):  # fmt: skip
    """Dequantize a page of a row and KV head into the scratch [rows, columns, 64, HEADS, D]."""
    pdl_start()
    s = tl.program_id(2).to(tl.int64)
    page_column = tl.program_id(0)
    kv = first_head + tl.program_id(1)
    _, count, start = row_of(cu_seqlens, starts, s)
    num_keys = start + count
    first_key = page_column * TILE
    # Page-table columns past the row's tokens are skipped; the table has static width.
    if (count > 0) & (first_key < num_keys):
        page = tl.load(page_table + s * table_stride + page_column)
        dim_column = tl.arange(0, D)
        tile = load_kv_tile(
            qdata + kv * HEAD_STRIDE, scales, layer_constant, kv, page, first_key, num_keys,
            dim_column, PAGE_STRIDE, TOKEN_STRIDE, NUM_SCALES, HKV, D, TILE, TILE, PER_LOAD, LOAD,
            DEQUANTIZE, out.dtype.element_ty, OPAQUE,
        )  # fmt: skip
        token = ((s * columns + page_column) * TILE + tl.arange(0, TILE)) * HEADS + tl.program_id(1)
        tl.store(out + (token[:, None] * D + dim_column[None, :]), tile)


def fits_prefill(q: Tensor, k_cache: QuantizedKV, query_len: int) -> bool:
    """Return whether this path serves a step: long queries, pages of TILE."""
    return len(q) > 0 and query_len >= MIN_QUERY_LEN and k_cache.shape[1] == TILE


def _group_sizes(q: Tensor, page_table: Tensor, kv_heads: int) -> tuple[int, int]:
    """Return the rows and the KV heads whose keys and values are dequantized at once."""
    head_bytes = 2 * page_table.shape[1] * TILE * q.shape[2] * q.dtype.itemsize
    heads_that_fit = max(1, SCRATCH_BYTES // head_bytes)
    if heads_that_fit >= kv_heads:
        return heads_that_fit // kv_heads, kv_heads
    return 1, ceil_div(kv_heads, ceil_div(kv_heads, heads_that_fit))


def paged_attention_quantized_prefill(
    q: Tensor,
    k_cache: QuantizedKV,
    v_cache: QuantizedKV,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    gates: Tensor | None = None,
) -> Tensor:
    """Run paged_attention for steps that fits_prefill accepts."""
    _, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    (rows_per_group, heads_per_group) = _group_sizes(q, page_table, kv_heads)
    target = compile_target(q.device)
    k = kv_operand(k_cache, q.dtype, target)
    v = kv_operand(v_cache, q.dtype, target)
    out = torch.empty_like(q)
    attended = torch.empty_like(q, dtype=torch.float32) if v.rotation_block else out
    for row in range(0, starts.shape[0], rows_per_group):
        rows = slice(row, row + rows_per_group)
        row_arguments = (page_table[rows], cu_seqlens[row : row + rows_per_group + 1], starts[rows])
        for first_head in range(0, kv_heads, heads_per_group):
            count = min(heads_per_group, kv_heads - first_head)
            k_scratch, v_scratch = (
                _dequantize_pages(side, q, *row_arguments, first_head, count, target.inline_ptx)
                for side in (k, v)
            )
            # The scratch is a cache whose pages are in order.
            page_ids = torch.arange(k_scratch.shape[0], dtype=torch.int32, device=q.device)
            scratch_table = page_ids.view(row_arguments[0].shape)
            launch_prefill(
                q,
                k_scratch,
                v_scratch,
                scratch_table,
                *row_arguments[1:],
                query_len,
                scale,
                gates,
                attended,
                first_head,
                kv_heads,
            )
    return finish_rotated(attended, gates, v, out) if v.rotation_block else out


def _dequantize_pages(
    side: KVOperand,
    q: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    first_head: int,
    heads: int,
    opaque: bool,
) -> Tensor:
    """Dequantize pages of these rows and KV heads: [rows * columns, TILE, heads, D], q's dtype."""
    rows, columns = page_table.shape
    dim = q.shape[2]
    scratch = torch.empty(rows * columns, TILE, heads, dim, dtype=q.dtype, device=q.device)
    _dequantize_kernel[(columns, heads, rows)](
        side.qdata, side.scales, side.layer_constant, page_table, cu_seqlens, starts, scratch,
        page_table.stride(0), columns, first_head, *side.qdata.stride()[:3], side.num_scales,
        side.qdata.shape[2], heads, dim, TILE, side.values_per_load, side.load, side.dequantize,
        opaque, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return scratch
