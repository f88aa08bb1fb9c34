"""paged_attention on a CPU by one Numba kernel, which reads pages where they are.

The pages of a quantized cache are dequantized first, those of the batch's rows.
"""

import torch
from torch import Tensor

from lockstep.kernels.attention import KV_SPLIT, apply_gates, paged_attention
from lockstep.kernels.attention.numba_kernels import KERNELS, SPLIT
from lockstep.kernels.backends import numba_trait
from lockstep.kernels.formats.kv import KVCache, is_dense, read_pages, rotate_back, rotation_of
from lockstep.kernels.simd.strides import address, address_of_rows
from lockstep.kernels.simd.threads import split_range

assert SPLIT == KV_SPLIT


@paged_attention.backend("numba", supports=numba_trait)
def paged_attention_numba(
    q: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    gates: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.attention.paged_attention."""
    tokens, heads, dim = q.shape
    q = q.contiguous()
    rotated = rotation_of(v_cache) is not None
    out = torch.empty(q.shape, dtype=torch.float32 if rotated else q.dtype)
    kernel_gates = None if rotated else gates
    if not (is_dense(k_cache) and is_dense(v_cache)):
        page_table, used = _used_pages(page_table, cu_seqlens, starts, k_cache.shape[1])
        k_cache, values = (read_pages(cache, used, q.dtype) for cache in (k_cache, v_cache))
    else:
        values = v_cache
    page_table, cu_seqlens, starts = (x.int() for x in (page_table, cu_seqlens, starts))
    if page_table.stride(1) != 1:
        page_table = page_table.contiguous()
    rows = len(starts)
    _, page_size, kv_heads, key_dim = k_cache.shape
    if key_dim != dim or heads % kv_heads:
        raise ValueError(
            f"q: {heads} heads of {dim} do not fit a cache of {kv_heads} heads of {key_dim}"
        )
    table, table_stride = address_of_rows(
        "page_table", page_table, torch.int32, rows, page_table.shape[1]
    )
    gate_address = gate_stride = 0
    if kernel_gates is not None:
        # The kernel reads the first 2 * heads * dim columns; the projection may have more.
        columns = max(kernel_gates.shape[1], 2 * heads * dim)
        gate_address, gate_stride = address_of_rows("gates", kernel_gates, q.dtype, tokens, columns)
    operands = (
        q.data_ptr(), address("k_cache", k_cache, q.dtype, k_cache.numel()),
        address("v_cache", values, q.dtype, k_cache.numel()), table,
        address("cu_seqlens", cu_seqlens, torch.int32, rows + 1),
        address("starts", starts, torch.int32, rows), gate_address, out.data_ptr(),
        rows, table_stride, page_size, heads, kv_heads, dim, scale, gate_stride, int(rotated),
    )  # fmt: skip
    kernel = KERNELS[q.dtype]
    split_range(tokens * heads, lambda begin, end: kernel(*operands, begin, end))
    if rotated:
        out = rotate_back(out, v_cache).to(q.dtype)
        return out if gates is None else apply_gates(out, gates)
    return out


def _used_pages(
    page_table: Tensor, cu_seqlens: Tensor, starts: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """Return (page table into the pages that the rows read, those pages)."""
    lengths = starts + cu_seqlens.diff()
    counts = (lengths + page_size - 1) // page_size
    live = torch.arange(page_table.shape[1]) < counts[:, None]
    used, indices = page_table[live].unique(return_inverse=True)
    table = torch.zeros_like(page_table)
    table[live] = indices.to(table.dtype)
    return table, used
