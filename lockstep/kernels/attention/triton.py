# mypy: ignore-errors
"""paged_attention in Triton: one fold for prefill, decode and verification.

The keys are cut at absolute multiples of SEGMENT. Inside a segment, ascending tiles of TILE keys
with online softmax; segments are added in ascending order. A program takes spans of segments. The
first span folds in registers; later ones leave every segment to a second kernel, which goes on with
the fold in the same order, so that the partition (chosen from static sizes) changes no bit. Sums
over keys go through tl.dot, whose bits do not depend on how many query rows stand beside; (token,
head of the group) share that axis, so any group size fits. Masked keys add exact zeros. The output
is the sum times the reciprocal of the weights' sum. See docs/kernels/attention.md.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels import architecture
from lockstep.kernels.architecture import fit_stages, shared_memory_limit
from lockstep.kernels.attention import SEGMENT, paged_attention
from lockstep.kernels.attention.epilogue import finished, store_output
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.device.kv_tile import cache_tile, pages_of
from lockstep.kernels.device.ragged_rows import row_of
from lockstep.kernels.formats.kv import KVCache
from lockstep.kernels.formats.kv.launch import Opened, opened, token_bytes, unserved
from lockstep.kernels.formats.weights.operand import target_of

LOG2E = 1.4426950408889634
"""log2(e): weights are 2^(x log2(e)), which the GPU has an instruction for."""
ENTRY_BYTES = 1 << 29
"""Bytes that entries for the second kernel may take; longer spans need fewer."""
PROGRAMS = 256
"""Parallel spans give about so many programs, two for each of an H200's 132 multiprocessors. Those
past a row's end cost time, too."""
TOGETHER = 16
"""Entries that the second kernel has on the way. us with 16 and 8 (H200): 8B, context 16,384, 1 x 1
3.7 and 4.3, 8 x 1 6.0 and 7.0; 27B, 1 x 4, 131,072 31.6 and 44.8, 8 x 4, 32,768 31.7 and 29.1."""
COLUMNS = 64
"""Columns of its programs. With 128: 4.2, 6.2, 35.0 and 27.9."""
NO_SCORE = tl.constexpr(-1e30)
"""The maximum over no scores: finite, so that a difference of two is a number."""


@triton.jit
def _weigh(scores, v, at, last, scale, top, norm, total, TILE: tl.constexpr):
    """A tile of keys: online softmax over its products with queries [TILE, ROWS] that see keys up
    to last [ROWS], and its values.

    top: largest score [ROWS]; norm: sum of weights [ONES, ROWS], the same ONES times; total: the
    output [D, ROWS].
    """
    scores *= scale
    seen = (at + tl.arange(0, TILE))[:, None] <= last[None, :]
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 0))
    fade = tl.exp2(top - new_top)[None, :]
    weights = tl.exp2(scores - new_top[None, :]).to(v.dtype)
    ones = tl.full((norm.shape[0], TILE), 1.0, v.dtype)
    norm = tl.dot(ones, weights, norm * fade, input_precision="ieee")
    total = tl.dot(v.T, weights, total * fade, input_precision="ieee")
    return new_top, norm, total


@triton.jit
def _fold(best, norms, sums, top, norm, total):
    """One more segment: each side scaled to the larger of the maxima."""
    new_best = tl.maximum(best, top)
    old = tl.exp2(best - new_best)
    new = tl.exp2(top - new_best)
    norms = norms * old[None, :] + norm * new[None, :]
    sums = sums * old[None, :] + total * new[None, :]
    return new_best, norms, sums


@triton.jit
def _store_entry(tops, norms, parts, entry, d, top, norm, total, mask, D: tl.constexpr):
    """An entry for the second kernel: a segment, or the fold so far."""
    tl.store(tops + entry, top, mask=mask)
    tl.store(norms + entry, tl.max(norm, 0), mask=mask)
    place = parts + (entry[None, :] * D + d[:, None])
    tl.store(place, total, mask=mask[None, :] & (d < D)[:, None])


@triton.jit
def _queries(q, first, place, d, mine, H: tl.constexpr, D: tl.constexpr):
    """Query rows [columns, ROWS] of a row whose first token is the first-th of q."""
    there = mine[:, None] & (d < D)[None, :]
    return tl.load(q + first * (H * D) + (place[:, None] + d[None, :]), mask=there, other=0.0).T


@triton.jit
def _store_folded(
    out, gates, gates_from, place, gate_at, d, norms, sums, mine, D: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """sums [columns, ROWS] over norms [ONES, ROWS] of a whole fold; gates_from: the row's first."""
    if GATED:
        gates += gates_from
    inverse = tl.div_rn(tl.full((norms.shape[1],), 1.0, tl.float32), tl.max(norms, 0))
    result = sums * inverse[None, :]
    store_output(out, gates, place, gate_at, d, result, mine, None, D, GATED, 0)


@triton.jit
def _query_rows(
    row, count, start, kv, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Query rows from `row` on: which of them `count` tokens have, their token, head, last key and
    place in [count, H, D], each [ROWS]."""
    m = row + tl.arange(0, ROWS)
    mine = m < count * GROUP
    token = m // GROUP
    head = kv * GROUP + m % GROUP
    last = start + token
    return mine, token, head, last, (token * H + head) * D


@triton.jit
def _entries_of(tops, norms, parts, skipped, D: tl.constexpr):
    """Where a row's entries begin, `skipped` (token, segment, head) from the first."""
    return tops + skipped, norms + skipped, parts + skipped * D


@triton.jit
def _empty_fold(ONES: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """A fold over no keys: the largest score, the sums of weights, the output."""
    top = tl.full((ROWS,), NO_SCORE, tl.float32)
    norm = tl.zeros((ONES, ROWS), tl.float32)
    return top, norm, tl.zeros((BLOCK_D, ROWS), tl.float32)


@triton.jit(
    do_not_specialize=[
        "entries", "table_stride", "gate_stride", "SPAN", "FIRST", "Q", "k_constant", "v_constant",
    ]
)  # fmt: skip
def _attend_kernel(
    q, k_cache, v_cache, page_table, cu_seqlens, starts, gates, out, tops, norms, parts,
    scale, entries, table_stride, gate_stride, SPAN, FIRST, Q,
    K_PAGE: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr,
    V_PAGE: tl.constexpr, V_TOKEN: tl.constexpr, V_HEAD: tl.constexpr,
    PAGE: tl.constexpr, H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, ONES: tl.constexpr,
    SEGMENT: tl.constexpr, GATED: tl.constexpr, LEAVES: tl.constexpr, FOLDS: tl.constexpr,
    k_numbers, v_numbers, k_constant, v_constant, K_COUNT: tl.constexpr, V_COUNT: tl.constexpr,
    K_SHARE: tl.constexpr, V_SHARE: tl.constexpr, K_FETCH: tl.constexpr, V_FETCH: tl.constexpr,
    K_UNPACK: tl.constexpr, V_UNPACK: tl.constexpr, OPAQUE: tl.constexpr,
):  # fmt: skip
    """A block of one row's (token, head of a group): every so many spans of SPAN segments.

    K_FETCH, K_UNPACK, V_..: how packed keys and values are read (kernels.formats.kv); None:
    they are not packed.

    FOLDS: the first span is folded, and written where a token needs no other; else it is one entry
    for its FIRST segments. Any other segment is an entry: tops, norms [S Q, entries, H] and
    parts [S Q, entries, H, D].
    """
    s = (tl.program_id(0) // HKV).to(tl.int64)
    kv = tl.program_id(0) % HKV
    group: tl.constexpr = H // HKV
    row = tl.program_id(1) * ROWS
    pages = page_table + s * table_stride
    width = SPAN * SEGMENT
    own = tl.program_id(2) * width
    turn = tl.num_programs(2) * width
    page = pages_of(pages, own, own + 1, PAGE, TILE)
    first, count, start = row_of(cu_seqlens, starts, s)
    end = start + tl.minimum(count, (row + ROWS - 1) // group + 1)
    keys = start + count
    if (row >= count * group) | (own >= end):
        return
    d = tl.arange(0, BLOCK_D)
    mine, token, head, last, place = _query_rows(row, count, start, kv, H, group, D, ROWS)
    entry = token * entries * H + head
    tops, norms, parts = _entries_of(tops, norms, parts, (s * Q * entries - FIRST + 1) * H, D)
    query = _queries(q, first, place, d, mine, H, D)
    best, norms_all, sums = _empty_fold(ONES, ROWS, BLOCK_D)
    top, norm, total = _empty_fold(ONES, ROWS, BLOCK_D)
    for begin in range(own, end, turn):
        stop = tl.minimum(end, begin + width)
        for at in range(begin, stop, TILE):
            if PAGE % TILE != 0:
                page = pages_of(pages, at, keys, PAGE, TILE)
            k = cache_tile(
                k_cache + kv * K_HEAD, k_numbers, k_constant, kv, page, at, keys, d, K_PAGE,
                K_TOKEN, K_COUNT, HKV, D, PAGE, TILE, K_SHARE, K_FETCH, K_UNPACK,
                q.dtype.element_ty, OPAQUE,
            )  # fmt: skip
            scores = tl.dot(k, query, input_precision="ieee")
            v = cache_tile(
                v_cache + kv * V_HEAD, v_numbers, v_constant, kv, page, at, keys, d, V_PAGE,
                V_TOKEN, V_COUNT, HKV, D, PAGE, TILE, V_SHARE, V_FETCH, V_UNPACK,
                q.dtype.element_ty, OPAQUE,
            )  # fmt: skip
            if PAGE % TILE == 0:
                page = pages_of(pages, at + TILE, stop, PAGE, TILE)
            top, norm, total = _weigh(scores, v, at, last, scale, top, norm, total, TILE)
            if ((at + TILE) % SEGMENT == 0) | (at + TILE >= stop):
                if ((begin == 0) & FOLDS) | (not LEAVES):
                    best, norms_all, sums = _fold(best, norms_all, sums, top, norm, total)
                else:
                    used = mine & (at // SEGMENT * SEGMENT <= last)
                    to = entry + at // SEGMENT * H
                    _store_entry(tops, norms, parts, to, d, top, norm, total, used, D)
                top, norm, total = _empty_fold(ONES, ROWS, BLOCK_D)
        page = pages_of(pages, begin + turn, end, PAGE, TILE)
    if (own == 0) & FOLDS:
        if LEAVES:
            used = mine & (last >= width)
            mine = mine & (last < width)
            to = entry + (FIRST - 1) * H
            _store_entry(tops, norms, parts, to, d, best, norms_all, sums, used, D)
        gate_at = token * gate_stride + (head * 2 + 1) * D
        _store_folded(
            out + first * (H * D), gates, first * gate_stride, place, gate_at, d, norms_all, sums,
            mine, D, GATED,
        )  # fmt: skip


@triton.jit
def _entry(tops, norms, parts, i, there, inside, H: tl.constexpr, D: tl.constexpr):
    """The i-th entry of a (token, head): the largest score, the sum of weights, the output
    [columns]. One that is not there changes no bit."""
    top = tl.load(tops + i * H, mask=there, other=NO_SCORE)
    norm = tl.load(norms + i * H, mask=there, other=0.0)
    return top, norm, tl.load(parts + i * H * D, mask=inside & there, other=-0.0)


@triton.jit
def _fold_entry(best, norms, sums, top, norm, total):
    """_fold, of one row of queries: one of the two factors is 2^0."""
    new_best = tl.maximum(best, top)
    fade = tl.exp2(tl.minimum(best, top) - new_best)
    old = tl.where(top > best, fade, 1.0)
    new = tl.where(top > best, 1.0, fade)
    return new_best, norms * old + norm * new, sums * old + total * new


@triton.jit(do_not_specialize=["entries", "gate_stride", "FIRST", "Q", "seed"])
def _fold_kernel(
    tops, norms, parts, cu_seqlens, starts, gates, out, entries, gate_stride, FIRST, Q,
    H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, SEGMENT: tl.constexpr,
    GATED: tl.constexpr, TOGETHER: tl.constexpr, FOLDS: tl.constexpr, seed, TURNED: tl.constexpr,
):  # fmt: skip
    """COLUMNS of a (row, token, head): its entries in ascending order, TOGETHER on the way.

    Where the first kernel FOLDS, it ended the tokens of one entry. Else all have many, and the
    first are loaded before the row's length is known; those beyond it are left out.
    """
    s = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) // H
    head = tl.program_id(1) % H
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = d < D
    at = (s * Q + token) * entries * H + head
    tops += at
    norms += at
    parts += at * D + d
    found = ()
    for i in tl.static_range(TOGETHER):
        found = found + (_entry(tops, norms, parts, i, i < entries, inside, H, D),)
    first, count, start = row_of(cu_seqlens, starts, s)
    used = (start + token) // SEGMENT + 2 - FIRST
    now = ()
    for i in tl.static_range(TOGETHER):
        top = tl.where(i < used, found[i][0], NO_SCORE)
        norm = tl.where(i < used, found[i][1], 0.0)
        now = now + ((top, norm, tl.where(i < used, found[i][2], -0.0)),)
    best = tl.full((), NO_SCORE, tl.float32)
    norms_all = tl.full((), 0.0, tl.float32)
    sums = tl.zeros((COLUMNS,), tl.float32)
    for base in range(0, tl.where(used > 1, used, not FOLDS), TOGETHER):
        tops += TOGETHER * H
        norms += TOGETHER * H
        parts += TOGETHER * H * D
        ahead = ()
        for i in tl.static_range(TOGETHER):
            best, norms_all, sums = _fold_entry(best, norms_all, sums, *now[i])
            there = base + TOGETHER + i < used
            ahead = ahead + (_entry(tops, norms, parts, i, there, inside, H, D),)
        now = ahead
    result = sums[:, None] * tl.div_rn(tl.full((1, 1), 1.0, tl.float32), norms_all)
    place = (first + token + tl.zeros((1,), tl.int64)) * H * D + head * D
    gate_at = (first + token + tl.zeros((1,), tl.int64)) * gate_stride + (head * 2 + 1) * D
    ended = (used > FOLDS) & (token < count) & (place >= 0)
    store_output(out, gates, place, gate_at, d, result, ended, seed, D, GATED, TURNED)


def supports(**traits: Any) -> str | None:
    """None where this kernel serves a layer of these traits, else the reason why not."""
    dim = traits.get("head_dim", 64)
    if not 8 <= dim <= 256:
        return f"head_dim {dim} is not in 8 .. 256"
    heads = traits.get("heads", 1)
    kv_heads = traits.get("kv_heads", 1)
    if heads % kv_heads:
        return f"{heads} heads are no multiple of {kv_heads} KV heads"
    return unserved(dim, **traits) or gpu_trait(**traits)


@dataclass(frozen=True)
class Partition:
    """How the work is divided among programs. Nothing here changes a bit.

    rows: (token, head of the group) rows of a program. span: segments that a program takes one
    after another. parallel_spans: programs that share a row's spans; each takes every so-manieth.
    folds: the first span is folded in registers, so that 64 rows leave no entries. Few rows leave
    every segment as an entry: more programs fill the multiprocessors.
    """

    rows: int
    span: int
    parallel_spans: int
    folds: bool
    warps: int
    stages: int


def keys_together(dtype: torch.dtype) -> int:
    """TILE: keys that a program weighs at once."""
    return 32 if dtype == torch.float32 else 64


def partition(
    rows: int,
    query_len: int,
    heads: int,
    kv_heads: int,
    dim: int,
    segments: int,
    dtype: torch.dtype,
    arch: int,
    packed: int = 0,
) -> Partition:
    """The partition for static sizes on an architecture: its table and times are in
    docs/kernels/attention.md. packed: bytes of a packed token's key and value in one head, which
    stages load, beside a tile that is unpacked; 0: they are not packed."""
    count = query_len * (heads // kv_heads)
    pairs = rows * kv_heads
    block = min(64, max(16, triton.next_power_of_2(count)))
    block = block if pairs * triton.cdiv(count, block) >= 12 else 16
    programs = pairs * triton.cdiv(count, block)
    entry_bytes = rows * query_len * heads * (dim + 2) * 4
    folds = programs >= 96
    span = 4 if programs >= 24 else 2 if programs >= 12 else 1
    if folds or entry_bytes * segments > ENTRY_BYTES:
        folds = True
        span = 64
        while entry_bytes * (segments - span + 1) > ENTRY_BYTES:
            span *= 2
    parallel_spans = min(triton.cdiv(segments, span), max(triton.cdiv(PROGRAMS, programs), 8))
    warps = 8 if block == 64 else 4
    width = triton.next_power_of_2(max(dim, 16)) * dtype.itemsize
    loaded = 2 * keys_together(dtype) * width  # keys and values
    fixed = (16 if dtype == torch.float32 else block) * width
    most = 2 if block == 64 else 3
    if packed:
        fixed += loaded // 2  # one tile, keys or values, unpacked
        fixed += keys_together(dtype) * block * dtype.itemsize  # weights
        loaded = keys_together(dtype) * packed
        beside = 1 + (shared_memory_limit(arch) // 2 - fixed) // loaded
        most = max(2, min(most, beside))  # two programs on a multiprocessor
    stages = fit_stages(most, loaded, fixed, arch)
    return Partition(block, span, parallel_spans, folds, warps, stages)


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
    divided: Partition | None = None,
) -> Tensor:
    """See lockstep.kernels.attention.paged_attention. q is contiguous; last strides are 1.

    divided: how; as partition() says where it is left out.
    """
    rows = starts.shape[0]
    _, heads, dim = q.shape
    _, page, kv_heads, _ = k_cache.shape
    out = torch.empty_like(q)
    exact = q.dtype == torch.float32  # its products take more registers, so its blocks are smaller
    if not len(q):
        return out
    segments = triton.cdiv(page_table.shape[1] * page, SEGMENT)
    arch = architecture.sm_number(q.device)
    packed = token_bytes(k_cache, v_cache)
    sizes = (rows, query_len, heads, kv_heads, dim, segments)
    p = divided or partition(*sizes, q.dtype, arch, packed)
    width = triton.next_power_of_2(max(dim, 16))
    block = 16 if exact else p.rows
    tile = keys_together(q.dtype)
    first = p.span if p.folds else 1
    entries = 0 if p.folds and p.span >= segments else segments - first + 1
    kept = empty_entries(rows * query_len * heads * entries, dim, q.device)
    gate_stride = gates.stride(0) if gates is not None else 0
    blocks = triton.cdiv(query_len * (heads // kv_heads), block)
    target = target_of(q.device)
    k = opened(k_cache, q.dtype, target)
    v = opened(v_cache, q.dtype, target)
    opaque = packed > 0 and not exact and target.assembly
    apart = p.folds and v.block > 0  # what multiplies does not rotate back: epilogue.py says why
    found = torch.empty_like(q, dtype=torch.float32) if apart else out
    own_gates = None if apart else gates
    _attend_kernel[(rows * kv_heads, blocks, p.parallel_spans)](
        q, k.codes, v.codes, page_table, cu_seqlens, starts, own_gates, found, *kept,
        scale * LOG2E, entries, page_table.stride(0), gate_stride, p.span, first, query_len,
        *k.codes.stride()[:3], *v.codes.stride()[:3], page, heads, kv_heads, dim, block, width,
        tile, 16 if exact else 64, SEGMENT, own_gates is not None, entries > 0, p.folds,
        k.numbers, v.numbers, k.constant, v.constant, k.beside, v.beside, k.share, v.share,
        k.fetch, v.fetch, k.unpack, v.unpack, opaque,
        num_warps=p.warps, num_stages=p.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if entries:
        left = v._replace(block=0) if apart else v
        sizes = (query_len, entries, first, p.folds)
        fold_entries(kept, q, cu_seqlens, starts, *sizes, own_gates, left, found)
    return finished(found, gates, v, out) if apart else out


def empty_entries(count: int, dim: int, device: torch.device) -> list[Tensor]:
    """Memory of so many entries: largest scores, sums of weights, outputs; not written yet."""
    return [torch.empty(count * size, dtype=torch.float32, device=device) for size in (1, 1, dim)]


def fold_entries(
    kept: list[Tensor],
    q: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    entries: int,
    first: int,
    folds: bool,
    gates: Tensor | None,
    v: Opened,
    out: Tensor,
) -> None:
    """The second kernel: folds a step's entries [S Q, entries, H], the first of which holds `first`
    segments, into out [T, H, D]. folds: whether tokens of one entry are written already."""
    _, heads, dim = q.shape
    width = triton.next_power_of_2(max(dim, 16))
    columns = min(width, COLUMNS)
    gate_stride = gates.stride(0) if gates is not None else 0
    _fold_kernel[(starts.shape[0], query_len * heads, width // columns)](
        *kept, cu_seqlens, starts, gates, out, entries, gate_stride, first, query_len,
        heads, dim, columns, SEGMENT, gates is not None, TOGETHER, folds,
        v.constant if v.block else None, v.block,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
