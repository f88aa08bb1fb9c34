"""paged_attention in Triton: one fold for prefill, decode and verification.

The keys are cut at absolute multiples of SEGMENT. Inside a segment, ascending tiles with online
softmax; segments are added in ascending order. One program either folds all segments of its
queries, or computes one segment and leaves it to a second kernel that folds in the same order, so
that splitting (chosen from static sizes) changes no bit. Sums over keys go through tl.dot, whose
bits do not depend on the number of query rows in a tile; (token, head of the group) share that
axis, so any group size fits. Masked keys add exact zeros.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.attention import SEGMENT, paged_attention
from lockstep.kernels.backends import gpu_trait

LOG2E = 1.4426950408889634
SPLIT_QUERIES = 8
SPLIT_BYTES = 1 << 28
NOTHING = tl.constexpr(-1e30)


@triton.jit
def _segment(
    q, k_cache, v_cache, pages, last, begin, end, keys, scale, k_page, k_token, v_page, v_token,
    PAGE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Keys begin .. end - 1 for q [ROWS, D] that sees keys up to last [ROWS]
    -> largest score [ROWS], sum of weights [ROWS, 16] (in every column), output [ROWS, BLOCK_D]."""
    d, lanes = tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    top = tl.full((ROWS,), NOTHING, tl.float32)
    norm = tl.zeros((ROWS, 16), tl.float32)
    total = tl.zeros((ROWS, BLOCK_D), tl.float32)
    ones = tl.full((TILE, 16), 1.0, v_cache.dtype.element_ty)
    for at in range(begin, end, TILE):
        key = at + lanes
        live = key < keys
        page = tl.load(pages + key // PAGE, mask=live, other=0).to(tl.int64)
        place, mask = page * k_page + key % PAGE * k_token, live[None, :] & (d < D)[:, None]
        k = tl.load(k_cache + place[None, :] + d[:, None], mask=mask, other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(key[None, :] <= last[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        fade = tl.exp2(top - new_top)[:, None]
        place, mask = page * v_page + key % PAGE * v_token, live[:, None] & (d < D)[None, :]
        v = tl.load(v_cache + place[:, None] + d[None, :], mask=mask, other=0.0)
        weights = tl.exp2(scores - new_top[:, None]).to(v.dtype)
        norm = tl.dot(weights, ones, norm * fade, input_precision="ieee")
        total = tl.dot(weights, v, total * fade, input_precision="ieee")
        top = new_top
    return top, norm, total


@triton.jit(do_not_specialize=["segments"])
def _attend_kernel(
    q, k_cache, v_cache, page_table, cu_seqlens, starts, out, tops, norms, parts,
    scale, segments, table_stride, k_page, k_token, k_head, v_page, v_token, v_head,
    PAGE: tl.constexpr, H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, Q: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, SEGMENT: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """A block of one row's (token, head of a group): all its segments, or one of them (SPLIT)."""
    s, kv = (tl.program_id(0) // HKV).to(tl.int64), tl.program_id(0) % HKV
    group: tl.constexpr = H // HKV
    first = tl.load(cu_seqlens + s).to(tl.int64)
    count = (tl.load(cu_seqlens + s + 1) - first).to(tl.int32)
    start = tl.load(starts + s).to(tl.int32)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    end = start + tl.minimum(count, ((tl.program_id(1) + 1) * ROWS - 1) // group + 1)
    segment = tl.program_id(2)
    if (tl.program_id(1) * ROWS >= count * group) | (segment * SEGMENT >= end):
        return
    d, head = tl.arange(0, BLOCK_D), kv * group + m % group
    mine = m < count * group
    at = ((first + m // group) * H + head)[:, None] * D + d[None, :]
    mask = mine[:, None] & (d < D)[None, :]
    query = tl.load(q + at, mask=mask, other=0.0)
    last, keys, pages = start + m // group, start + count, page_table + s * table_stride
    k_cache += kv * k_head
    v_cache += kv * v_head
    if SPLIT:
        begin = segment * SEGMENT
        top, norm, total = _segment(
            query, k_cache, v_cache, pages, last, begin, tl.minimum(begin + SEGMENT, end), keys,
            scale, k_page, k_token, v_page, v_token, PAGE, D, ROWS, BLOCK_D, TILE,
        )  # fmt: skip
        line = (s * segments + segment) * (Q * H) + m // group * H + head
        tl.store(tops + line, top, mask=mine)
        tl.store(norms + line, tl.max(norm, 1), mask=mine)
        tl.store(parts + line[:, None] * D + d[None, :], total, mask=mask)
    else:
        best = tl.full((ROWS,), NOTHING, tl.float32)
        norms_all = tl.zeros((ROWS, 16), tl.float32)
        sums = tl.zeros((ROWS, BLOCK_D), tl.float32)
        for begin in range(0, end, SEGMENT):
            top, norm, total = _segment(
                query, k_cache, v_cache, pages, last, begin, tl.minimum(begin + SEGMENT, end),
                keys, scale, k_page, k_token, v_page, v_token, PAGE, D, ROWS, BLOCK_D, TILE,
            )  # fmt: skip
            new_best = tl.maximum(best, top)
            old, new = tl.exp2(best - new_best)[:, None], tl.exp2(top - new_best)[:, None]
            norms_all = norms_all * old + norm * new
            sums = sums * old + total * new
            best = new_best
        result = tl.div_rn(sums, tl.max(norms_all, 1)[:, None])
        tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["segments"])
def _fold_kernel(
    tops, norms, parts, cu_seqlens, starts, out, segments,
    H: tl.constexpr, D: tl.constexpr, Q: tl.constexpr, BLOCK_D: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    """One (row, token, head): its segments added in ascending order."""
    s, line = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(cu_seqlens + s).to(tl.int64)
    token = line // H
    if token >= tl.load(cu_seqlens + s + 1) - first:
        return
    d = tl.arange(0, BLOCK_D)
    best = tl.full((1,), NOTHING, tl.float32)
    norms_all = tl.zeros((1,), tl.float32)
    sums = tl.zeros((BLOCK_D,), tl.float32)
    for segment in range(0, (tl.load(starts + s).to(tl.int32) + token) // SEGMENT + 1):
        at = (s * segments + segment) * (Q * H) + line
        place = at + tl.zeros((1,), tl.int64)
        top, norm = tl.load(tops + place), tl.load(norms + place)
        total = tl.load(parts + at * D + d, mask=d < D, other=0.0)
        new_best = tl.maximum(best, top)
        old, new = tl.exp2(best - new_best), tl.exp2(top - new_best)
        norms_all = norms_all * old + norm * new
        sums = sums * old + total * new
        best = new_best
    result = tl.div_rn(sums, norms_all + tl.zeros((BLOCK_D,), tl.float32))
    at = (first * H + line) * D + d
    tl.store(out + at, result.to(out.dtype.element_ty), mask=d < D)


def _supports(**traits: Any) -> str | None:
    dim = traits.get("head_dim", 64)
    if not 8 <= dim <= 256:
        return f"head_dim {dim} is not in 8 .. 256"
    heads, kv_heads = traits.get("heads", 1), traits.get("kv_heads", 1)
    if heads % kv_heads:
        return f"{heads} heads are no multiple of {kv_heads} KV heads"
    return gpu_trait(**traits)


def _rows(count: int, dtype: torch.dtype) -> int:
    """The height of a tile: free in bf16 and fp16, one for all in fp32 (FMA units)."""
    return 16 if dtype == torch.float32 else min(64, max(16, triton.next_power_of_2(count)))


def _splits(rows: int, heads: int, dim: int, query_len: int, segments: int) -> bool:
    """Whether the segments of a row run side by side: no bit depends on it."""
    size = rows * segments * query_len * heads * (dim + 2) * 4
    return query_len <= SPLIT_QUERIES and segments > 1 and size <= SPLIT_BYTES


@paged_attention.backend("triton", supports=_supports)
def paged_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
) -> Tensor:
    """See lockstep.kernels.attention.paged_attention. q is contiguous; last strides are 1."""
    rows, (_, heads, dim), kv_heads = starts.shape[0], q.shape, k_cache.shape[2]
    out = torch.empty_like(q)
    page, width = k_cache.shape[1], triton.next_power_of_2(max(dim, 16))
    segments = triton.cdiv(page_table.shape[1] * page, SEGMENT)
    split = _splits(rows, heads, dim, query_len, segments)
    lines = rows * segments * query_len * heads if split else 0
    tops, norms, parts = (
        torch.empty(lines * n, dtype=torch.float32, device=q.device) for n in (1, 1, dim)
    )
    block = _rows(query_len * (heads // kv_heads), q.dtype)
    blocks = triton.cdiv(query_len * (heads // kv_heads), block)
    if rows and query_len:
        _attend_kernel[(rows * kv_heads, blocks, segments if split else 1)](
            q, k_cache, v_cache, page_table, cu_seqlens, starts, out, tops, norms, parts,
            scale * LOG2E, segments, page_table.stride(0),
            *k_cache.stride()[:3], *v_cache.stride()[:3],
            page, heads, kv_heads, dim, query_len if split else 0, block, width,
            32 if q.dtype == torch.float32 else 64, SEGMENT, split,
            num_warps=8 if block * width >= 64 * 256 else 4, num_stages=2, enable_fp_fusion=False,
        )  # fmt: skip
    if rows and split:
        _fold_kernel[(rows, query_len * heads)](
            tops, norms, parts, cu_seqlens, starts, out, segments,
            heads, dim, query_len, width, SEGMENT, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out
