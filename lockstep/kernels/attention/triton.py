"""paged_attention in Triton: one fold for prefill, decode and verification.

The keys are cut at absolute multiples of SEGMENT. Inside a segment, ascending tiles with online
softmax; segments are added in ascending order. A program takes SPAN segments in a row. The first
span folds in registers; later ones leave every segment to a second kernel that goes on with the
fold in the same order, so that SPAN (chosen from static sizes) changes no bit. Sums over keys go
through tl.dot, whose bits do not depend on the number of query rows in a tile; (token, head of the
group) share that axis, so any group size fits. Masked keys add exact zeros.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep.kernels.activations.triton import sigmoid
from lockstep.kernels.attention import SEGMENT, paged_attention
from lockstep.kernels.backends import gpu_trait

LOG2E = 1.4426950408889634
NOTHING = tl.constexpr(-1e30)


@triton.jit
def _pages_of(pages, at, end, PAGE: tl.constexpr, TILE: tl.constexpr):
    """The pages of keys at .. at + TILE - 1: one number where a tile lies in a page, else [TILE]."""
    if PAGE % TILE == 0:
        return tl.load(pages + at // PAGE, mask=at < end, other=0)
    else:
        key = at + tl.arange(0, TILE)
        return tl.load(pages + key // PAGE, mask=key < end, other=0)


@triton.jit
def _load(
    cache, page, at, live, d, P_STRIDE: tl.constexpr, T_STRIDE: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys or values at .. at + TILE - 1 of one head, columns d: [TILE, columns], dead ones 0."""
    lanes, mask = tl.arange(0, TILE), live[:, None] & (d < D)[None, :]
    if PAGE % TILE == 0:
        cache += page.to(tl.int64) * P_STRIDE + at % PAGE * T_STRIDE
        place = lanes[:, None] * T_STRIDE
    else:
        place = (page.to(tl.int64) * P_STRIDE + (at + lanes) % PAGE * T_STRIDE)[:, None]
    return tl.load(cache + (place + d[None, :]), mask=mask, other=0.0)


@triton.jit
def _weigh(query, k, v, ones, at, last, scale, top, norm, total, TILE: tl.constexpr):
    """A tile of keys: online softmax over query [D, ROWS], that sees keys up to last [ROWS]."""
    scores = tl.dot(k, query, input_precision="ieee") * scale
    seen = (at + tl.arange(0, TILE))[:, None] <= last[None, :]
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 0))
    fade = tl.exp2(top - new_top)[None, :]
    weights = tl.exp2(scores - new_top[None, :]).to(v.dtype)
    norm = tl.dot(ones, weights, norm * fade, input_precision="ieee")
    total = tl.dot(v.T, weights, total * fade, input_precision="ieee")
    return new_top, norm, total


@triton.jit
def _fold(best, norms, sums, top, norm, total):
    """One more segment: each side scaled to the larger of the maxima."""
    new_best = tl.maximum(best, top)
    old, new = tl.exp2(best - new_best), tl.exp2(top - new_best)
    norms = norms * old[None, :] + norm * new[None, :]
    sums = sums * old[None, :] + total * new[None, :]
    return new_best, norms, sums


@triton.jit
def _leave(tops, norms, parts, line, d, top, norm, total, mask, side, D: tl.constexpr):
    """An entry for the second kernel: a segment, or the fold so far."""
    tl.store(tops + line, top, mask=mask & (side == 0))
    tl.store(norms + line, tl.max(norm, 0), mask=mask & (side == 0))
    tl.store(parts + (line[None, :] * D + d[:, None]), total, mask=mask[None, :] & (d < D)[:, None])


@triton.jit
def _store(out, gates, at, gate_at, result, mask, GATED: tl.constexpr):
    """result rounded, then times its rounded output gate where there is one."""
    values = result.to(out.dtype.element_ty)
    if GATED:
        gate = sigmoid(tl.load(gates + gate_at, mask=mask, other=0.0).to(tl.float32))
        gate = gate.to(gates.dtype.element_ty).to(tl.float32)
        values = (values.to(tl.float32) * gate).to(out.dtype.element_ty)
    tl.store(out + at, values, mask=mask)


@triton.jit(do_not_specialize=["entries", "table_stride", "gate_stride", "SPAN"])
def _attend_kernel(
    q, k_cache, v_cache, k_map, v_map, page_table, cu_seqlens, starts, gates, out,
    tops, norms, parts, scale, entries, table_stride, gate_stride, SPAN,
    K_PAGE: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr,
    V_PAGE: tl.constexpr, V_TOKEN: tl.constexpr, V_HEAD: tl.constexpr,
    PAGE: tl.constexpr, H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    SEGMENT: tl.constexpr, GATED: tl.constexpr, ONES: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """A block of one row's (token, head of a group), COLUMNS of the values, SPAN segments.

    The first span folds, and ends the tokens that need no other; else it leaves an entry, and later
    spans one for every segment, in tops, norms [T, entries, H] and parts [T, entries, H, D].
    """
    s, kv = (tl.program_id(0) // HKV).to(tl.int64), tl.program_id(0) % HKV
    group: tl.constexpr = H // HKV
    sides: tl.constexpr = BLOCK_D // COLUMNS
    side, span = tl.program_id(2) % sides, tl.program_id(2) // sides
    pages = page_table + s * table_stride
    begin = span * SPAN * SEGMENT
    page = _pages_of(pages, begin, begin + 1, PAGE, TILE)
    first = tl.load(cu_seqlens + s).to(tl.int64)
    count = (tl.load(cu_seqlens + s + 1) - first).to(tl.int32)
    start = tl.load(starts + s).to(tl.int32)
    row = tl.program_id(1) * ROWS
    end = start + tl.minimum(count, (row + ROWS - 1) // group + 1)
    if (row >= count * group) | (begin >= end):
        return
    stop, keys = tl.minimum(end, begin + SPAN * SEGMENT), start + count
    m, lanes = row + tl.arange(0, ROWS), tl.arange(0, TILE)
    d, dv = tl.arange(0, BLOCK_D), side * COLUMNS + tl.arange(0, COLUMNS)
    mine, token, head = m < count * group, m // group, kv * group + m % group
    last, place, line = start + token, (token * H + head) * D, token * entries * H + head
    q, out = q + first * (H * D), out + first * (H * D)
    if GATED:
        gates += first * gate_stride
    tops, norms = tops + first * entries * H, norms + first * entries * H
    parts += first * entries * H * D
    there = mine[:, None] & (d < D)[None, :]
    query = tl.load(q + (place[:, None] + d[None, :]), mask=there, other=0.0).T
    ones = tl.full((ONES, TILE), 1.0, v_cache.dtype.element_ty)
    best = tl.full((ROWS,), NOTHING, tl.float32)
    norms_all = tl.zeros((ONES, ROWS), tl.float32)
    sums = tl.zeros((COLUMNS, ROWS), tl.float32)
    top, norm, total = best, norms_all, sums
    whole = begin
    if TMA:
        whole += (tl.minimum(stop, keys) - begin) // TILE * TILE
        for at in range(begin, whole, TILE):
            row_at = page * PAGE + at % PAGE
            k = k_map.load([row_at, kv * D])
            v = v_map.load([row_at, kv * D + side * COLUMNS])
            page = _pages_of(pages, at + TILE, stop, PAGE, TILE)
            top, norm, total = _weigh(query, k, v, ones, at, last, scale, top, norm, total, TILE)
            if ((at + TILE) % SEGMENT == 0) | (at + TILE >= stop):
                if span == 0:
                    best, norms_all, sums = _fold(best, norms_all, sums, top, norm, total)
                else:
                    _leave(
                        tops, norms, parts, line + (at // SEGMENT - SPAN + 1) * H, dv,
                        top, norm, total, mine & (at // SEGMENT * SEGMENT <= last), side, D,
                    )  # fmt: skip
                top = tl.full((ROWS,), NOTHING, tl.float32)
                norm = tl.zeros((ONES, ROWS), tl.float32)
                total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for at in tl.range(whole, stop, TILE, num_stages=1 if TMA else None):
        if PAGE % TILE != 0:
            page = _pages_of(pages, at, keys, PAGE, TILE)
        live = at + lanes < keys
        k = _load(k_cache + kv * K_HEAD, page, at, live, d, K_PAGE, K_TOKEN, D, PAGE, TILE)
        v = _load(v_cache + kv * V_HEAD, page, at, live, dv, V_PAGE, V_TOKEN, D, PAGE, TILE)
        if PAGE % TILE == 0:
            page = _pages_of(pages, at + TILE, stop, PAGE, TILE)
        top, norm, total = _weigh(query, k, v, ones, at, last, scale, top, norm, total, TILE)
        if ((at + TILE) % SEGMENT == 0) | (at + TILE >= stop):
            if span == 0:
                best, norms_all, sums = _fold(best, norms_all, sums, top, norm, total)
            else:
                _leave(
                    tops, norms, parts, line + (at // SEGMENT - SPAN + 1) * H, dv,
                    top, norm, total, mine & (at // SEGMENT * SEGMENT <= last), side, D,
                )  # fmt: skip
            top = tl.full((ROWS,), NOTHING, tl.float32)
            norm = tl.zeros((ONES, ROWS), tl.float32)
            total = tl.zeros((COLUMNS, ROWS), tl.float32)
    if span == 0:
        done = last < SPAN * SEGMENT
        _leave(tops, norms, parts, line, dv, best, norms_all, sums, mine & ~done, side, D)
        result = tl.div_rn(sums, tl.max(norms_all, 0)[None, :])
        gate_at = (token * gate_stride + (head * 2 + 1) * D)[None, :] + dv[:, None]
        ended = (mine & done)[None, :] & (dv < D)[:, None]
        _store(out, gates, place[None, :] + dv[:, None], gate_at, result, ended, GATED)


@triton.jit(do_not_specialize=["entries", "gate_stride", "SPAN"])
def _fold_kernel(
    tops, norms, parts, cu_seqlens, starts, gates, out, entries, gate_stride, SPAN,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SEGMENT: tl.constexpr,
    GATED: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """One (row, token, head): its entries added in ascending order, TOGETHER of them on the way."""
    s, head = tl.program_id(0).to(tl.int64), tl.program_id(1) % H
    first = tl.load(cu_seqlens + s).to(tl.int64)
    token = first + tl.program_id(1) // H
    segments = (tl.load(starts + s) + tl.program_id(1) // H) // SEGMENT + 1
    if (token >= tl.load(cu_seqlens + s + 1)) | (segments <= SPAN):
        return
    d = tl.arange(0, BLOCK_D)
    best = tl.full((1,), NOTHING, tl.float32)
    norms_all = tl.zeros((1, 1), tl.float32)
    sums = tl.zeros((BLOCK_D, 1), tl.float32)
    for base in range(0, segments - SPAN + 1, TOGETHER):
        for i in tl.static_range(TOGETHER):
            live = base + i < segments - SPAN + 1
            at = (token * entries + base + i) * H + head + tl.zeros((1,), tl.int64)
            top = tl.load(tops + at, mask=live, other=NOTHING)
            norm = tl.load(norms + at, mask=live, other=0.0)[None, :]
            mask = (d < D)[:, None] & live
            total = tl.load(parts + (at[None, :] * D + d[:, None]), mask=mask, other=0.0)
            best, norms_all, sums = _fold(best, norms_all, sums, top, norm, total)
    result = tl.div_rn(sums, norms_all + tl.zeros((BLOCK_D, 1), tl.float32))
    at = (token * H + head) * D + d[:, None]
    gate_at = token * gate_stride + (head * 2 + 1) * D + d[:, None]
    _store(out, gates, at, gate_at, result, (d < D)[:, None], GATED)


def _supports(**traits: Any) -> str | None:
    dim = traits.get("head_dim", 64)
    if not 8 <= dim <= 256:
        return f"head_dim {dim} is not in 8 .. 256"
    heads, kv_heads = traits.get("heads", 1), traits.get("kv_heads", 1)
    if heads % kv_heads:
        return f"{heads} heads are no multiple of {kv_heads} KV heads"
    return gpu_trait(**traits)


@dataclass(frozen=True)
class Plan:
    """How the work is cut. Nothing here changes a bit, but `rows` in fp32 (FMA units)."""

    rows: int
    columns: int
    span: int
    warps: int
    stages: int
    fold_warps: int = 2
    together: int = 8
    tma: bool = False


def plan(
    rows: int,
    query_len: int,
    group: int,
    kv_heads: int,
    dim: int,
    segments: int,
    dtype: torch.dtype,
) -> Plan:
    width = triton.next_power_of_2(max(dim, 16))
    count = query_len * group
    block = 16 if dtype == torch.float32 else min(64, max(16, triton.next_power_of_2(count)))
    columns = width
    span = segments if query_len > 8 or rows * kv_heads >= 96 else 1
    warps = 8 if block * width >= 64 * 256 else 4
    return Plan(block, columns, span, warps, 2)


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
    gates: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.attention.paged_attention. q is contiguous; last strides are 1."""
    (_, heads, dim), kv_heads = q.shape, k_cache.shape[2]
    segments = triton.cdiv(page_table.shape[1] * k_cache.shape[1], SEGMENT)
    p = plan(starts.shape[0], query_len, heads // kv_heads, kv_heads, dim, segments, q.dtype)
    return launch(q, k_cache, v_cache, page_table, cu_seqlens, starts, query_len, scale, gates, p)


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    gates: Tensor | None,
    p: Plan,
) -> Tensor:
    """paged_attention by a given plan. It decides the speed and nothing else."""
    rows, (tokens, heads, dim), kv_heads = starts.shape[0], q.shape, k_cache.shape[2]
    out = torch.empty_like(q)
    page, width = k_cache.shape[1], triton.next_power_of_2(max(dim, 16))
    segments = triton.cdiv(page_table.shape[1] * page, SEGMENT)
    entries = max(segments - p.span + 1, 0) if p.span < segments else 0
    fp32 = dict(dtype=torch.float32, device=q.device)
    tops, norms, parts = (torch.empty(tokens * entries * heads * n, **fp32) for n in (1, 1, dim))
    blocks = triton.cdiv(query_len * (heads // kv_heads), p.rows)
    spans, sides = triton.cdiv(segments, p.span), triton.cdiv(width, p.columns)
    gated, gate_stride = gates is not None, gates.stride(0) if gates is not None else 0
    if not tokens:
        return out
    maps: list[TensorDescriptor | None] = [None, None]
    if p.tma:
        flat = (k_cache.view(-1, kv_heads * dim), v_cache.view(-1, kv_heads * dim))
        maps = [TensorDescriptor.from_tensor(t, [64, c]) for t, c in zip(flat, (width, p.columns))]
    _attend_kernel[(rows * kv_heads, blocks, spans * sides)](
        q, k_cache, v_cache, *maps, page_table, cu_seqlens, starts, gates, out, tops, norms, parts,
        scale * LOG2E, entries, page_table.stride(0), gate_stride, p.span,
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        page, heads, kv_heads, dim, p.rows, width, p.columns,
        32 if q.dtype == torch.float32 else 64, SEGMENT, gated, 16 if q.dtype == torch.float32 else 64,
        p.tma,
        num_warps=p.warps, num_stages=p.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if entries:
        _fold_kernel[(rows, query_len * heads)](
            tops, norms, parts, cu_seqlens, starts, gates, out, entries, gate_stride, p.span,
            heads, dim, width, SEGMENT, gated, p.together,
            num_warps=p.fold_warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out
