# mypy: ignore-errors
"""latent_attention in Triton: one fold for prompts, decoding and verification.

The keys are cut at absolute multiples of a segment. Inside a segment, ascending tiles with online
softmax. The segments of a span are folded in ascending order, from an empty fold, and spans
likewise: two levels, whoever computes them, so that the partition (chosen from static sizes)
changes no bit. How long segments are is the architecture's and, on Hopper, the token's position's.
A program folds all of a row by itself, or leaves an entry for each span, or for each segment, and a
second kernel goes on with the same fold. Sums over keys go through tl.dot; (token, head) share its
rows, in blocks of one size. Masked keys add exact zeros. See docs/kernels/latent_attention.md.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels import architecture
from lockstep.kernels.architecture import HOPPER, fit_stages
from lockstep.kernels.attention import SEGMENT
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.device.kv_tile import cache_tile, pages_of
from lockstep.kernels.device.ragged_rows import row_of
from lockstep.kernels.formats.kv import KVCache
from lockstep.kernels.formats.kv.launch import opened, token_bytes, unserved
from lockstep.kernels.formats.weights.operand import target_of
from lockstep.kernels.latent_attention import latent_attention
from lockstep.kernels.latent_attention.device import (
    NO_SCORE,
    block_of,
    empty_fold,
    fold,
    weigh,
)

LOG2E = 1.4426950408889634
"""log2(e): weights are 2^(x log2(e)), which the GPU has an instruction for."""
FAR = 16384
"""The position from which a token's segments are long on Hopper, where every fold goes through
memory: docs/decisions/0015."""
NEAR_SEGMENT = 1024
FAR_SEGMENT = 2048
"""Keys of a segment on Hopper: of a token in front of FAR, and from there on."""
SPAN = 8
"""Segments of a span, near ones: part of the definition, like SEGMENT."""
WIDEST = 512
"""Dims of a latent: the sums of 64 rows of it fill half of the registers of 8 warps."""
PROGRAMS = 128
"""Programs that keep a GPU busy: about one for each of an H200's 132 multiprocessors, since the
shared memory of one has no room for two."""
ENTRY_BYTES = 1 << 29
"""Bytes that entries for the second kernel may take."""
TOGETHER = 4
"""Entries that the second kernel loads at once."""
COLUMNS = 128
"""Columns of its programs."""
ONES = 16
"""Columns of the product that sums weights: the least that every matrix unit takes."""


@triton.jit
def _weigh_tile(
    q_latent, q_rope, latents, numbers, constant, ropes, pages, page, at, keys, last, scale, top,
    norm, total,
    L_PAGE: tl.constexpr, L_TOKEN: tl.constexpr, R_PAGE: tl.constexpr, R_TOKEN: tl.constexpr,
    PAGE: tl.constexpr, C: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr,
    COUNT: tl.constexpr, SHARE: tl.constexpr, FETCH: tl.constexpr, UNPACK: tl.constexpr,
    OPAQUE: tl.constexpr,
):  # fmt: skip
    """One more tile of a fold, on the page that was found for it: (top, norm, total) and the page
    of the next one."""
    DTYPE: tl.constexpr = q_latent.dtype
    c = tl.arange(0, q_latent.shape[1])
    r = tl.arange(0, q_rope.shape[1])
    latent = cache_tile(
        latents, numbers, constant, 0, page, at, keys, c, L_PAGE, L_TOKEN, COUNT, 1, C, PAGE, TILE,
        SHARE, FETCH, UNPACK, DTYPE, OPAQUE,
    )  # fmt: skip
    rope = cache_tile(
        ropes, None, None, 0, page, at, keys, r, R_PAGE, R_TOKEN, 0, 1, R, PAGE, TILE, 1, None,
        None, DTYPE, False,
    )  # fmt: skip
    page = pages_of(pages, at + TILE, keys, PAGE, TILE)
    top, norm, total = weigh(
        q_latent, q_rope, latent, rope, at, last, scale, top, norm, total, TILE
    )
    return top, norm, total, page


@triton.jit
def _all_keys(
    q_latent, q_rope, latents, numbers, constant, ropes, pages, end, keys, last, segment, scale,
    L_PAGE: tl.constexpr, L_TOKEN: tl.constexpr, R_PAGE: tl.constexpr, R_TOKEN: tl.constexpr,
    PAGE: tl.constexpr, C: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, COUNT: tl.constexpr,
    SHARE: tl.constexpr, FETCH: tl.constexpr, UNPACK: tl.constexpr, OPAQUE: tl.constexpr,
    ONES: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The fold of all keys below `end`: the sums of weights and the output.

    The sums of the segment take half of the registers; those of its span and of all, which are
    touched at its end alone, lie in memory meanwhile.
    """
    ROWS: tl.constexpr = q_latent.shape[0]
    BLOCK: tl.constexpr = q_latent.shape[1]
    top, norm, total = empty_fold(ROWS, ONES, BLOCK)
    best, norms, sums = empty_fold(ROWS, ONES, BLOCK)
    all_best, all_norms, all_sums = empty_fold(ROWS, ONES, BLOCK)
    page = pages_of(pages, 0, keys, PAGE, TILE)
    for at in range(0, end, TILE):
        top, norm, total, page = _weigh_tile(
            q_latent, q_rope, latents, numbers, constant, ropes, pages, page, at, keys, last,
            scale, top, norm, total, L_PAGE, L_TOKEN, R_PAGE, R_TOKEN, PAGE, C, R, TILE, COUNT,
            SHARE, FETCH, UNPACK, OPAQUE,
        )  # fmt: skip
        behind = at + TILE
        if (behind % segment == 0) | (behind >= end):
            best, norms, sums = fold(best, norms, sums, top, norm, total)
            top, norm, total = empty_fold(ROWS, ONES, BLOCK)
            if (behind % SPAN == 0) | (behind >= end):
                all_best, all_norms, all_sums = fold(
                    all_best, all_norms, all_sums, best, norms, sums
                )
                best, norms, sums = empty_fold(ROWS, ONES, BLOCK)
    return all_norms, all_sums


@triton.jit
def _one_unit(
    q_latent, q_rope, latents, numbers, constant, ropes, pages, begin, stop, keys, last, segment,
    scale,
    L_PAGE: tl.constexpr, L_TOKEN: tl.constexpr, R_PAGE: tl.constexpr, R_TOKEN: tl.constexpr,
    PAGE: tl.constexpr, C: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, COUNT: tl.constexpr,
    SHARE: tl.constexpr, FETCH: tl.constexpr, UNPACK: tl.constexpr, OPAQUE: tl.constexpr,
    ONES: tl.constexpr, FOLDS: tl.constexpr,
):  # fmt: skip
    """Keys begin .. stop - 1, a segment or, where it FOLDS, the segments of a span: the largest
    score, the sums of weights and the output."""
    ROWS: tl.constexpr = q_latent.shape[0]
    BLOCK: tl.constexpr = q_latent.shape[1]
    top, norm, total = empty_fold(ROWS, ONES, BLOCK)
    if FOLDS:
        best, norms, sums = empty_fold(ROWS, ONES, BLOCK)
    page = pages_of(pages, begin, keys, PAGE, TILE)
    for at in range(begin, stop, TILE):
        top, norm, total, page = _weigh_tile(
            q_latent, q_rope, latents, numbers, constant, ropes, pages, page, at, keys, last,
            scale, top, norm, total, L_PAGE, L_TOKEN, R_PAGE, R_TOKEN, PAGE, C, R, TILE, COUNT,
            SHARE, FETCH, UNPACK, OPAQUE,
        )  # fmt: skip
        if FOLDS:
            if ((at + TILE) % segment == 0) | (at + TILE >= stop):
                best, norms, sums = fold(best, norms, sums, top, norm, total)
                top, norm, total = empty_fold(ROWS, ONES, BLOCK)
    if FOLDS:
        top = best
        norm = norms
        total = sums
    return top, norm, total


@triton.jit(do_not_specialize=["entries", "table_stride", "Q", "constant"])
def _attend_kernel(
    q_latent, q_rope, latents, ropes, page_table, cu_seqlens, starts, out, tops, norms, parts,
    scale, entries, table_stride, Q,
    L_PAGE: tl.constexpr, L_TOKEN: tl.constexpr, R_PAGE: tl.constexpr, R_TOKEN: tl.constexpr,
    PAGE: tl.constexpr, H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, TILE: tl.constexpr, ONES: tl.constexpr,
    SEGMENT: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr, SPAN: tl.constexpr,
    UNIT: tl.constexpr,
    numbers, constant, COUNT: tl.constexpr, SHARE: tl.constexpr, FETCH: tl.constexpr,
    UNPACK: tl.constexpr, OPAQUE: tl.constexpr,
):  # fmt: skip
    """A block of one row's (token, head): every so many units.

    numbers, constant, COUNT, FETCH, ..: how packed latents are read (kernels.formats.kv); FETCH
    None: they are not packed.
    UNIT 0: all keys, and out is written. Else a span, or, where it is NEAR, a segment of the block,
    each an entry: tops, norms [S Q, entries, H] and parts [S Q, entries, H, C].
    """
    s = tl.program_id(0).to(tl.int64)
    first, count, start = row_of(cu_seqlens, starts, s)
    row, behind, segment = block_of(tl.program_id(1), start, count, H, ROWS, SEGMENT, NEAR, FAR)
    end = start + (tl.minimum(row + ROWS, behind) - 1) // H + 1
    keys = start + count
    unit = segment if UNIT == NEAR else UNIT
    begin = tl.program_id(2) * unit
    if (row >= behind) | (begin >= end):
        return
    pages = page_table + s * table_stride
    c = tl.arange(0, BLOCK_C)[None, :]
    r = tl.arange(0, BLOCK_R)[None, :]
    m = row + tl.arange(0, ROWS)
    mine = m < behind
    there = mine[:, None] & (c < C)
    last = start + m // H
    at = (first * H + m)[:, None]
    ql = tl.load(q_latent + (at * C + c), mask=there, other=0.0)
    qr = tl.load(q_rope + (at * R + r), mask=mine[:, None] & (r < R), other=0.0)
    if UNIT == 0:
        norm, total = _all_keys(
            ql, qr, latents, numbers, constant, ropes, pages, end, keys, last, segment, scale,
            L_PAGE, L_TOKEN, R_PAGE, R_TOKEN, PAGE, C, R, TILE, COUNT, SHARE, FETCH, UNPACK,
            OPAQUE, ONES, SPAN,
        )  # fmt: skip
        inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.max(norm, 1))
        result = (total * inverse[:, None]).to(out.dtype.element_ty)
        tl.store(out + (at * C + c), result, mask=there)
    else:
        for key in range(begin, end, tl.num_programs(2) * unit):
            top, norm, total = _one_unit(
                ql, qr, latents, numbers, constant, ropes, pages, key,
                tl.minimum(end, key + unit), keys, last, segment, scale, L_PAGE, L_TOKEN,
                R_PAGE, R_TOKEN, PAGE, C, R, TILE, COUNT, SHARE, FETCH, UNPACK, OPAQUE, ONES,
                UNIT == SPAN,
            )  # fmt: skip
            used = mine & (key <= last)
            entry = (s * Q + m // H) * entries * H + key // unit * H + m % H
            tl.store(tops + entry, top, mask=used)
            tl.store(norms + entry, tl.max(norm, 1), mask=used)
            to = parts + (entry[:, None] * C + c)
            tl.store(to, total, mask=used[:, None] & (c < C))


@triton.jit(do_not_specialize=["entries", "Q"])
def _fold_kernel(
    tops, norms, parts, cu_seqlens, starts, out, entries, Q,
    H: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, SEGMENT: tl.constexpr,
    NEAR: tl.constexpr, FAR: tl.constexpr, SPAN: tl.constexpr, UNIT: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """COLUMNS of a (row, token, head): its entries in ascending order, TOGETHER loaded at once."""
    s = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) // H
    head = tl.program_id(1) % H
    first, count, start = row_of(cu_seqlens, starts, s)
    if token >= count:
        return
    unit = UNIT
    if UNIT == NEAR:
        unit = tl.where(start + token < FAR, NEAR, SEGMENT)
    used = (start + token) // unit + 1
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    best, norms_all, sums = empty_fold(1, 1, COLUMNS)
    span_best, span_norms, span_sums = empty_fold(1, 1, COLUMNS)
    lane = tl.zeros((1,), tl.int64)
    for base in range(0, used, TOGETHER):
        for i in tl.static_range(TOGETHER):
            live = base + i < used
            at = ((s * Q + token) * entries + base + i) * H + head + lane
            top = tl.load(tops + at, mask=live & (lane == 0), other=0.0)
            norm = tl.load(norms + at, mask=live & (lane == 0), other=0.0)[:, None]
            mask = live & (c < C)[None, :]
            total = tl.load(parts + (at[:, None] * C + c[None, :]), mask=mask, other=0.0)
            if UNIT < SPAN:
                top, norm, total = fold(span_best, span_norms, span_sums, top, norm, total)
                span_best = tl.where(live, top, span_best)
                span_norms = tl.where(live, norm, span_norms)
                span_sums = tl.where(live, total, span_sums)
                ends = ((base + i + 1) * unit % SPAN == 0) | (base + i + 1 == used)
                top, norm, total = fold(best, norms_all, sums, span_best, span_norms, span_sums)
                begun = live & ends
                span_best = tl.where(begun, NO_SCORE, span_best)
                span_norms = tl.where(begun, 0.0, span_norms)
                span_sums = tl.where(begun, 0.0, span_sums)
            else:
                top, norm, total = fold(best, norms_all, sums, top, norm, total)
                begun = live
            best = tl.where(begun, top, best)
            norms_all = tl.where(begun, norm, norms_all)
            sums = tl.where(begun, total, sums)
    inverse = tl.div_rn(tl.full((1, 1), 1.0, tl.float32), norms_all)
    place = ((first + token) * H + head) * C
    tl.store(out + (place + c)[None, :], (sums * inverse).to(out.dtype.element_ty), (c < C)[None])


def supports(**traits: Any) -> str | None:
    """None where this kernel serves a layer of these traits, else the reason why not."""
    latent = traits.get("latent", WIDEST)
    rope = traits.get("rope", 64)
    if latent > WIDEST:
        return f"a latent of {latent} is above {WIDEST}"
    if rope > latent:
        return f"rope {rope} is above the latent's {latent}"
    return unserved(latent, **traits) or gpu_trait(**traits)


@dataclass(frozen=True)
class Tile:
    """What an architecture takes at once: part of the definition there, since every row of a
    product must stand in one of the same shape. rows: (token, head) rows of a program; keys: that
    it weighs at once; segment: keys between two folds, of a token from position `far` on; near: of
    one in front of it."""

    rows: int
    keys: int
    warps: int
    segment: int = SEGMENT
    near: int = SEGMENT
    far: int = 0

    @property
    def span(self) -> int:
        """Keys of a span."""
        return self.near * SPAN

    @property
    def law(self) -> tuple[int, int, int, int]:
        """What the kernels ask: keys of a segment, of a near one, far, keys of a span."""
        return self.segment, self.near, self.far, self.span

    def blocks(self, query_len: int, heads: int) -> int:
        """Blocks of a row's (token, head): one more where a block could have tokens of both
        kinds."""
        both = self.far > 0 and heads % self.rows > 0
        return triton.cdiv(query_len * heads, self.rows) + both


def tile_of(dtype: torch.dtype, arch: int) -> Tile:
    """The tile: wgmma and tcgen05 take 64 rows; mma.sync holds queries in registers beside the
    sums, so 32; fp32 goes through FMA units, whose operands lie in twice the bytes."""
    if dtype == torch.float32:
        return Tile(16, 16, 8)
    if arch == HOPPER:
        return Tile(64, 64, 8, FAR_SEGMENT, NEAR_SEGMENT, FAR)
    return Tile(64, 32, 8) if arch == 100 else Tile(32, 32, 8)


@dataclass(frozen=True)
class Partition:
    """How the work is divided among programs. Nothing here changes a bit.

    unit: keys of an entry: 0 (a program takes all of a row), a span, or, where it is a near
    segment, a segment. parallel: programs that share a row's units; each takes every so-manieth.
    """

    unit: int
    parallel: int


def partition(
    rows: int, query_len: int, heads: int, latent: int, keys: int, tile: Tile
) -> Partition:
    """The partition for static sizes. keys: the most that a row may have."""
    programs = rows * triton.cdiv(query_len * heads, tile.rows)
    entry_bytes = rows * query_len * heads * (latent + 2) * 4
    idle = programs * triton.cdiv(keys, tile.span) < PROGRAMS
    small = query_len * heads * 4 <= tile.segment  # half of the bytes of a segment's keys
    for unit in (tile.near, tile.span) if idle or small else (tile.span,):
        units = triton.cdiv(keys, unit)
        if programs < PROGRAMS and entry_bytes * units <= ENTRY_BYTES:
            return Partition(unit, min(units, max(triton.cdiv(2 * PROGRAMS, programs), SPAN)))
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
    divided: Partition | None = None,
) -> Tensor:
    """See lockstep.kernels.latent_attention.latent_attention. Queries are contiguous; last strides
    of the caches are 1.

    divided: how; as partition() says where it is left out.
    """
    rows = starts.shape[0]
    _, heads, latent = q_latent.shape
    rope = q_rope.shape[2]
    page = latents.shape[1]
    out = torch.empty_like(q_latent)
    if not len(out):
        return out
    arch = architecture.sm_number(q_latent.device)
    tile = tile_of(q_latent.dtype, arch)
    keys = page_table.shape[1] * page
    p = divided or partition(rows, query_len, heads, latent, keys, tile)
    entries = triton.cdiv(keys, p.unit) if p.unit else 0
    count = rows * query_len * heads * entries
    f32 = dict(dtype=torch.float32, device=q_latent.device)
    kept = [torch.empty(count * size, **f32) for size in (1, 1, latent)]
    block_c = triton.next_power_of_2(max(latent, 16))
    block_r = triton.next_power_of_2(max(rope, 16))
    target = target_of(q_latent.device)
    held = opened(latents, q_latent.dtype, target)
    packed = token_bytes(latents)
    size = q_latent.element_size()
    unpacked = block_c * size
    loaded = tile.keys * ((packed or unpacked) + block_r * size)
    fixed = tile.rows * (block_c + block_r) * size  # queries
    if packed:
        fixed += tile.keys * unpacked
    grid = (rows, tile.blocks(query_len, heads), p.parallel)
    _attend_kernel[grid](
        q_latent, q_rope, held.codes, ropes, page_table, cu_seqlens, starts, out, *kept,
        scale * LOG2E, entries, page_table.stride(0), query_len,
        *held.codes.stride()[:2], *ropes.stride()[:2], page, heads, latent, rope, tile.rows,
        block_c, block_r, tile.keys, ONES, *tile.law, p.unit,
        held.numbers, held.constant, held.beside, held.share, held.fetch, held.unpack,
        packed > 0 and q_latent.dtype != torch.float32 and target.opaque,
        num_warps=tile.warps, num_stages=fit_stages(2, loaded, fixed, arch),
        enable_fp_fusion=False,
    )  # fmt: skip
    if entries:
        fold_entries(kept, cu_seqlens, starts, out, entries, query_len, p.unit, tile)
    return out


def fold_entries(
    kept: list[Tensor],
    cu_seqlens: Tensor,
    starts: Tensor,
    out: Tensor,
    entries: int,
    query_len: int,
    unit: int,
    tile: Tile,
) -> None:
    """The second kernel: the entries kept (tops, norms, parts) of `unit` keys each, folded into
    out [T, H, C]."""
    _, heads, latent = out.shape
    block_c = triton.next_power_of_2(max(latent, 16))
    columns = min(block_c, COLUMNS)
    _fold_kernel[(len(starts), query_len * heads, block_c // columns)](
        *kept, cu_seqlens, starts, out, entries, query_len,
        heads, latent, columns, *tile.law, unit, TOGETHER,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
