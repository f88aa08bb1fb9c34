# mypy: ignore-errors
"""paged_attention for long queries over packed caches on Hopper: pages are unpacked into a scratch,
which hopper.py reads. By the law of packed caches no bit changes.

Where the format leaves values rotated, hopper.py leaves its output in fp32 (epilogue.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.attention.epilogue import finished
from lockstep.kernels.attention.hopper import LONG, attend_prompts
from lockstep.kernels.attention.warpgroup import TILE
from lockstep.kernels.compile_target import compile_target
from lockstep.kernels.device.kv_tile import cache_tile
from lockstep.kernels.device.ragged_rows import row_of
from lockstep.kernels.formats.kv import PackedKV
from lockstep.kernels.formats.kv.launch import Opened, opened

SCRATCH_BYTES = 160 << 20
"""Of keys and values unpacked at once, or of one row and KV head where that is more; rows, then KV
heads, take turns. All heads of a row of 32,768 tokens of the 27B or the 8B, one of 125,000."""


@triton.jit(do_not_specialize=["table_stride", "columns", "first", "constant"])
def _unpack_kernel(
    codes, numbers, constant, page_table, cu_seqlens, starts, out, table_stride, columns, first,
    P_STRIDE: tl.constexpr, T_STRIDE: tl.constexpr, H_STRIDE: tl.constexpr, COUNT: tl.constexpr,
    HKV: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
    SHARE: tl.constexpr, FETCH: tl.constexpr, UNPACK: tl.constexpr, OPAQUE: tl.constexpr,
):  # fmt: skip
    """A page of a row and KV head into the scratch [rows, columns, 64, HEADS, D]."""
    s = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0)
    kv = first + tl.program_id(1)
    _, count, start = row_of(cu_seqlens, starts, s)
    keys = start + count
    at = column * TILE
    if (count > 0) & (at < keys):
        page = tl.load(page_table + s * table_stride + column)
        d = tl.arange(0, D)
        tile = cache_tile(
            codes + kv * H_STRIDE, numbers, constant, kv, page, at, keys, d, P_STRIDE, T_STRIDE,
            COUNT, HKV, D, TILE, TILE, SHARE, FETCH, UNPACK, out.dtype.element_ty, OPAQUE,
        )  # fmt: skip
        token = ((s * columns + column) * TILE + tl.arange(0, TILE)) * HEADS + tl.program_id(1)
        tl.store(out + (token[:, None] * D + d[None, :]), tile)


def scratch_fits(q: Tensor, k_cache: PackedKV, query_len: int) -> bool:
    """Whether this path takes such a step: long queries, pages of TILE."""
    return len(q) > 0 and query_len >= LONG and k_cache.shape[1] == TILE


def _turns(q: Tensor, page_table: Tensor, kv_heads: int) -> tuple[int, int]:
    """Rows and KV heads whose keys and values are unpacked at once."""
    head = 2 * page_table.shape[1] * TILE * q.shape[2] * q.dtype.itemsize
    at_once = max(1, SCRATCH_BYTES // head)
    if at_once >= kv_heads:
        return at_once // kv_heads, kv_heads
    return 1, triton.cdiv(kv_heads, triton.cdiv(kv_heads, at_once))


def paged_attention_scratch(
    q: Tensor,
    k_cache: PackedKV,
    v_cache: PackedKV,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    gates: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.attention.paged_attention, for steps that scratch_fits."""
    _, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    (some_rows, some_heads) = _turns(q, page_table, kv_heads)
    target = compile_target(q.device)
    k = opened(k_cache, q.dtype, target)
    v = opened(v_cache, q.dtype, target)
    out = torch.empty_like(q)
    found = torch.empty_like(q, dtype=torch.float32) if v.block else out
    for row in range(0, starts.shape[0], some_rows):
        rows = slice(row, row + some_rows)
        own = (page_table[rows], cu_seqlens[row : row + some_rows + 1], starts[rows])
        for first in range(0, kv_heads, some_heads):
            count = min(some_heads, kv_heads - first)
            sides = [_unpacked(side, q, *own, first, count, target.inline_ptx) for side in (k, v)]
            pages = torch.arange(sides[0].shape[0], dtype=torch.int32, device=q.device)
            table = pages.view(own[0].shape)
            attend_prompts(
                q, *sides, table, *own[1:], query_len, scale, gates, found, first, kv_heads
            )
    return finished(found, gates, v, out) if v.block else out


def _unpacked(
    side: Opened,
    q: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    first: int,
    heads: int,
    opaque: bool,
) -> Tensor:
    """Pages of these rows and KV heads [rows * columns, TILE, heads, D], in q's dtype."""
    rows, columns = page_table.shape
    dim = q.shape[2]
    found = torch.empty(rows * columns, TILE, heads, dim, dtype=q.dtype, device=q.device)
    _unpack_kernel[(columns, heads, rows)](
        side.codes, side.numbers, side.constant, page_table, cu_seqlens, starts, found,
        page_table.stride(0), columns, first, *side.codes.stride()[:3], side.beside,
        side.codes.shape[2], heads, dim, TILE, side.share, side.fetch, side.unpack, opaque,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return found
