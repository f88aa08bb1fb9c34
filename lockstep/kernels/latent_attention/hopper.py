# mypy: ignore-errors
"""latent_attention on Hopper, in Gluon: the fold of triton.py, bit for bit.

A program owns 64 (token, head) rows at a time. One warp copies tiles of 64 keys into two slots of
shared memory, each once for both uses. One warpgroup makes scores and weights of a tile; two more
weigh the tile as values, each 256 of the 512 columns, while the first one makes the scores of the
next. Weights lie where the tile's rotated keys lay. The sums of a segment are in registers; those
of a span and of all lie in memory, touched once a segment. See docs/kernels/latent_attention.md.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lockstep.kernels.architecture import HOPPER
from lockstep.kernels.backends import resolve_architecture
from lockstep.kernels.formats.kv import KVCache, PackedKV
from lockstep.kernels.latent_attention import latent_attention
from lockstep.kernels.latent_attention.dequantize import unpacked_groups
from lockstep.kernels.latent_attention.triton import (
    LOG2E,
    Partition,
    fold_entries,
    latent_attention_triton,
    partition,
    supports,
    tile_of,
)

MULTIPROCESSORS = 132
"""Of an H200: programs, each of which takes one block of rows after another."""
LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
HALF = gl.constexpr(256)
"""Columns of a latent, of its rotated key, of half a latent: what a warpgroup weighs, or both where
two programs share the columns. In two accumulators: ptxas refuses 256 columns where a program has
16 warps."""
SLOTS = gl.constexpr(2)
"""Tiles in shared memory, 72 KB each beside as much of queries."""
NO_SCORE = gl.constexpr(-1e30)
"""The maximum over no scores, as in triton.py."""
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
N_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
S_ROW = gl.constexpr(gl.SliceLayout(1, S_LAYOUT.value))
"""Registers of a warpgroup: scores, sums of weights."""


@gluon.constexpr_function
def _output_layout(pieces):
    """Registers of one of a warpgroup's two accumulators."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128 // pieces, 16])


@gluon.jit
def _item(
    item, cu_seqlens, starts, blocks, parallel, H: gl.constexpr, PIECES: gl.constexpr,
    SEGMENT: gl.constexpr, NEAR: gl.constexpr, FAR: gl.constexpr, SPAN: gl.constexpr,
    FOLDS: gl.constexpr,
):  # fmt: skip
    """Of an item: its row of the batch, the first of its (token, head) rows and the end of those of
    their kind (block_of in device.py), its lane, its piece of the columns; the row's first token,
    tokens and start; the end of the keys that the block sees, 0 where it has no tokens; the keys of
    a segment and of a unit. Blocks that see most keys come first, and those of the same keys side
    by side."""
    piece = item % PIECES
    block = blocks - 1 - item // PIECES % blocks
    lane = item // (PIECES * blocks) % parallel
    s = item // (PIECES * blocks * parallel)
    first = gl.load(cu_seqlens + s)
    count = gl.load(cu_seqlens + s + 1) - first
    start = gl.load(starts + s)
    near = gl.minimum(gl.maximum(FAR - start, 0), count) * H
    in_front = (near + 63) // 64
    far = block >= in_front
    row = gl.where(far, near + (block - in_front) * 64, block * 64)
    behind = gl.where(far, count * H, near)
    end = start + (gl.minimum(row + 64, behind) - 1) // H + 1
    end = gl.where(row < behind, end, 0)
    segment = gl.where(far, SEGMENT, NEAR)
    unit = segment
    if FOLDS:
        unit = segment * 0 + SPAN
    return s, row, behind, lane, piece, first, count, start, end, segment, unit


@gluon.jit
def _copy(source, row, column, slot, full, empty, phase, COLUMNS: gl.constexpr):
    """One piece of a tile [64, COLUMNS] into its slot once that is free."""
    mbarrier.wait(empty, phase ^ 1)
    mbarrier.expect(full, 64 * COLUMNS * 2)
    tma.async_copy_global_to_shared(source, [row, column], full, slot)


@gluon.jit
def _fetch(
    q_map, q_rope_map, latent_map, rope_map, queries, q_rope, q_full, q_empty, ring, ropes, full,
    empty, page_table, cu_seqlens, starts, table_stride, items, blocks, parallel,
    H: gl.constexpr, PIECES: gl.constexpr, SEGMENT: gl.constexpr, NEAR: gl.constexpr,
    FAR: gl.constexpr, SPAN: gl.constexpr, FOLDS: gl.constexpr,
):  # fmt: skip
    """The warp that copies: of every item its queries, then its tiles in the order of their use."""
    i = 0
    k = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        s, row, behind, lane, piece, first, count, start, end, segment, size = _item(
            item, cu_seqlens, starts, blocks, parallel, H, PIECES, SEGMENT, NEAR, FAR, SPAN, FOLDS
        )  # fmt: skip
        if lane * size < end:
            at_row = first * H + row
            mbarrier.wait(q_empty, (k & 1) ^ 1)
            mbarrier.expect(q_full, 64 * (LATENT + ROPE) * 2)
            tma.async_copy_global_to_shared(q_map, [at_row, 0], q_full, queries.index(0))
            tma.async_copy_global_to_shared(q_map, [at_row, HALF], q_full, queries.index(1))
            tma.async_copy_global_to_shared(q_rope_map, [at_row, 0], q_full, q_rope.index(0))
            k += 1
            pages = page_table + s.to(gl.int64) * table_stride
            for unit in range(lane * size, end, parallel * size):
                for at in range(unit, gl.minimum(end, unit + size), 64):
                    token = gl.load(pages + at // 64) * 64
                    slot = i % SLOTS
                    phase = i // SLOTS & 1
                    for half in gl.static_range(2):
                        place = slot * 2 + half
                        _copy(
                            latent_map, token, half * HALF, ring.index(place), full.index(place),
                            empty.index(place), phase, HALF,
                        )  # fmt: skip
                    place = SLOTS * 2 + slot
                    _copy(
                        rope_map, token, 0, ropes.index(slot), full.index(place),
                        empty.index(place), phase, ROPE,
                    )  # fmt: skip
                    i += 1


@gluon.jit
def _start_scores(queries, q_rope, ring, ropes, full, i):
    """Starts q k of the i-th tile [64, 64]; warpgroup_mma_wait ends it.

    i >> 30 is 0: what depends on i is not held in registers around the loop.
    """
    slot = i % SLOTS
    phase = i // SLOTS & 1
    scores = gl.zeros((64, 64), gl.float32, S_LAYOUT)
    for half in gl.static_range(2):
        mbarrier.wait(full.index(slot * 2 + half), phase)
        keys = ring.index(slot * 2 + half).permute((1, 0))
        q = queries.index(half + (i >> 30))
        scores = warpgroup_mma(q, keys, scores, use_acc=half > 0, is_async=True)
    mbarrier.wait(full.index(SLOTS * 2 + slot), phase)
    keys = ropes.index(slot).permute((1, 0))
    return warpgroup_mma(q_rope.index(i >> 30), keys, scores, is_async=True)


@gluon.jit
def _weigh(scores, ropes, fades, ready, ones, i, scale, top, norm, last, lowest, at):
    """Online softmax of a tile: its weights into shared memory, their sums started."""
    slot = i % SLOTS
    scores = scores * scale
    if at + 63 > lowest:
        key = at + gl.arange(0, 64, gl.SliceLayout(0, S_LAYOUT))
        scores = gl.where(key[None, :] <= last[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    fade = gl.exp2(top - new_top)
    weights = gl.exp2(scores - new_top[:, None]).to(ropes.dtype)
    ropes.index(slot).store(weights)
    fades.index(slot).store(fade)
    fence_async_shared()
    mbarrier.arrive(ready.index(slot))
    norm = norm * gl.convert_layout(fade, gl.SliceLayout(1, N_LAYOUT))[:, None]
    norm = warpgroup_mma(ropes.index(slot), ones.permute((1, 0)), norm, is_async=True)
    return new_top, norm


@gluon.jit
def _segment_weights(
    queries, q_rope, ring, ropes, full, empty, fades, ready, ones, i, tiles, last, lowest, at,
    scale,
):  # fmt: skip
    """The weights of a segment's tiles -> the next tile, max, sum."""
    top = gl.full((64,), NO_SCORE, gl.float32, S_ROW)
    norm = gl.zeros((64, 8), gl.float32, N_LAYOUT)
    scores = _start_scores(queries, q_rope, ring, ropes, full, i)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    for t in range(tiles - 1):
        top, norm = _weigh(
            scores, ropes, fades, ready, ones, i, scale, top, norm, last, lowest, at + t * 64
        )
        scores = _start_scores(queries, q_rope, ring, ropes, full, i + 1)
        norm, scores = warpgroup_mma_wait(0, deps=(norm, scores))
        mbarrier.arrive(empty.index(SLOTS * 2 + i % SLOTS))
        i += 1
    top, norm = _weigh(
        scores, ropes, fades, ready, ones, i, scale, top, norm, last, lowest, at + (tiles - 1) * 64
    )
    norm = warpgroup_mma_wait(0, deps=(norm,))
    mbarrier.arrive(empty.index(SLOTS * 2 + i % SLOTS))
    return i + 1, top, gl.convert_layout(gl.max(norm, 1), S_ROW)


@gluon.jit
def _factors(best, norms, top, norm):
    """Of a fold: the larger maximum, the sum of weights, the factors of either side."""
    new_best = gl.maximum(best, top)
    old = gl.exp2(best - new_best)
    new = gl.exp2(top - new_best)
    return new_best, norms * old + norm * new, old, new


@gluon.jit
def _weights(
    queries, q_rope, q_full, q_empty, ring, ropes, full, empty, fades, ready, ones, factors, told,
    heard, cu_seqlens, starts, tops, norms, scale, items, blocks, parallel, entries, Q,
    H: gl.constexpr, PIECES: gl.constexpr, SEGMENT: gl.constexpr, NEAR: gl.constexpr,
    FAR: gl.constexpr, SPAN: gl.constexpr, FOLDS: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """The warpgroup that makes weights, and all that a row has one number of."""
    i = 0
    k = 0
    g = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        s, row, behind, lane, piece, first, count, start, end, segment, size = _item(
            item, cu_seqlens, starts, blocks, parallel, H, PIECES, SEGMENT, NEAR, FAR, SPAN, FOLDS
        )  # fmt: skip
        if lane * size < end:
            m = row + gl.arange(0, 64, S_ROW)
            last = start + m // H
            lowest = start + row // H
            mbarrier.wait(q_full, k & 1)
            all_best = gl.full((64,), NO_SCORE, gl.float32, S_ROW)
            all_norms = gl.zeros((64,), gl.float32, S_ROW)
            for unit in range(lane * size, end, parallel * size):
                stop = gl.minimum(end, unit + size)
                best = gl.full((64,), NO_SCORE, gl.float32, S_ROW)
                sums = gl.zeros((64,), gl.float32, S_ROW)
                for at in range(unit, stop, segment):
                    tiles = (gl.minimum(stop - at, segment) + 63) // 64
                    i, top, norm = _segment_weights(
                        queries, q_rope, ring, ropes, full, empty, fades, ready, ones, i, tiles,
                        last, lowest, at, scale,
                    )  # fmt: skip
                    if FOLDS:
                        best, sums, old, new = _factors(best, sums, top, norm)
                        mbarrier.wait(heard, (g & 1) ^ 1)
                        factors.index(0).store(old)
                        factors.index(1).store(new)
                        if WHOLE:
                            if at + segment >= stop:
                                new_best, new_norms, old, new = _factors(
                                    all_best, all_norms, best, sums
                                )
                                all_best = new_best
                                all_norms = new_norms
                                one = gl.full((64,), 1.0, gl.float32, S_ROW)
                                factors.index(2).store(old)
                                factors.index(3).store(new)
                                factors.index(4).store(gl.div_rn(one, all_norms))
                        mbarrier.arrive(told)
                        g += 1
                    else:
                        best = top
                        sums = norm
                if not WHOLE:
                    used = (m < behind) & (unit <= last) & (piece == 0)
                    entry = (s.to(gl.int64) * Q + m // H) * entries * H + unit // size * H + m % H
                    gl.store(tops + entry, best, mask=used)
                    gl.store(norms + entry, sums, mask=used)
            mbarrier.arrive(q_empty)
            k += 1


@gluon.jit
def _zero_behind(tile, live):
    """Zeros in a warpgroup's columns of a tile from key `live` on."""
    wide: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // tile.shape[1], tile.shape[1] // 8], [4, 1], [1, 0]
    )
    for part in gl.static_range(4):
        rows = tile.slice(part * 16, 16)
        row = part * 16 + gl.arange(0, 16, gl.SliceLayout(1, wide))[:, None]
        values = rows.load(wide)
        rows.store(gl.where(row < live, values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def _segment_values(
    ring, weights, full, empty, fades, ready, i, tiles, at, keys, piece, OWN: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """A warpgroup's columns of the segment's output, [64, PART] left and right: a chain over its
    tiles. Where the program has half of the columns, both warpgroups read the same half of a tile,
    and both free all of it."""
    PART: gl.constexpr = 128 // PIECES
    layout: gl.constexpr = _output_layout(PIECES)
    lines: gl.constexpr = gl.SliceLayout(1, layout)
    left = gl.zeros((64, PART), gl.float32, layout)
    right = gl.zeros((64, PART), gl.float32, layout)
    for t in range(tiles):
        slot = i % SLOTS
        phase = i // SLOTS & 1
        if PIECES == 1:
            half = slot * 2 + OWN
            values = ring.index(half)
        else:
            half = slot * 2 + piece
            values = ring.index(half).slice(OWN * 128, 128, 1)
        mbarrier.wait(full.index(half), phase)
        mbarrier.wait(ready.index(slot), phase)
        if at + t * 64 + 64 > keys:
            _zero_behind(values, keys - at - t * 64)
        fade = fades.index(slot).load(lines)[:, None]
        left *= fade
        right *= fade
        mine = weights.index(slot)
        left = warpgroup_mma(mine, values.slice(0, PART, 1), left, is_async=True)
        right = warpgroup_mma(mine, values.slice(PART, PART, 1), right, is_async=True)
        left, right = warpgroup_mma_wait(0, deps=(left, right))
        mbarrier.arrive(empty.index(slot * 2 + OWN))
        if PIECES > 1:
            mbarrier.arrive(empty.index(slot * 2 + 1 - OWN))
        mbarrier.arrive(empty.index(SLOTS * 2 + slot))
        i += 1
    return left, right


@gluon.jit
def _fold(total, kept, here, factors, FIRST: gl.constexpr):
    """What lies at the pointers `kept`, if it does, and total [64, 128], each times its factor."""
    before = gl.zeros_like(total)
    if here:
        before = gl.load(kept)
    lines: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    old = factors.index(FIRST).load(lines)
    new = factors.index(FIRST + 1).load(lines)
    return before * old[:, None] + total * new[:, None]


@gluon.jit
def _end_segment(
    total, kept, factors, at, unit, segment, stop, end, to, used, SPAN: gl.constexpr,
    FOLDS: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Columns of a segment's output: into its span, of a span's: an entry, or into all.

    kept: of this program, the sums of a span and of all, in the order of registers. to: rows of
    the entries, or of out.
    """
    layout: gl.constexpr = total.type.layout
    lines: gl.constexpr = gl.SliceLayout(1, layout)
    n = gl.arange(0, 64, lines)
    c = gl.arange(0, total.shape[1], gl.SliceLayout(0, layout))
    lying = (n // 8 * (LATENT * 8) + n % 8 * 8)[:, None] + (c // 8 * 64 + c % 8)[None, :]
    if FOLDS:
        span = kept + lying
        total = _fold(total, span, at > unit, factors, 0)
        if at + segment < stop:
            gl.store(span, total)
    if at + segment >= stop:
        if WHOLE:
            whole = kept + 64 * LATENT + lying
            total = _fold(total, whole, unit > 0, factors, 2)
            if unit + SPAN < end:
                gl.store(whole, total)
            else:
                total = total * factors.index(4).load(lines)[:, None]
                rounded = total.to(to.dtype.element_ty)
                gl.store(to[:, None] + c[None, :], rounded, mask=used[:, None])
        else:
            gl.store(to[:, None] + c[None, :], total, mask=used[:, None])


@gluon.jit
def _values(
    ring, weights, full, empty, fades, ready, factors, told, heard, cu_seqlens, starts, parts, out,
    kept, items, blocks, parallel, entries, Q, OWN: gl.constexpr, H: gl.constexpr,
    PIECES: gl.constexpr, SEGMENT: gl.constexpr, NEAR: gl.constexpr, FAR: gl.constexpr,
    SPAN: gl.constexpr, FOLDS: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """A warpgroup that weighs half OWN of the program's columns as values. kept [2, 64, 512]: of
    this program.

    g >> 30 is 0: what depends on g is not held in registers around the loop.
    """
    i = 0
    g = 0
    WIDTH: gl.constexpr = HALF // PIECES
    PART: gl.constexpr = WIDTH // 2
    lines: gl.constexpr = gl.SliceLayout(1, _output_layout(PIECES))
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        s, row, behind, lane, piece, first, count, start, end, segment, size = _item(
            item, cu_seqlens, starts, blocks, parallel, H, PIECES, SEGMENT, NEAR, FAR, SPAN, FOLDS
        )  # fmt: skip
        if lane * size < end:
            column = piece * HALF + OWN * WIDTH
            for unit in range(lane * size, end, parallel * size):
                stop = gl.minimum(end, unit + size)
                for at in range(unit, stop, segment):
                    tiles = (gl.minimum(stop - at, segment) + 63) // 64
                    left, right = _segment_values(
                        ring, weights, full, empty, fades, ready, i, tiles, at, start + count,
                        piece, OWN, PIECES,
                    )  # fmt: skip
                    i += tiles
                    m = row + (g >> 30) + gl.arange(0, 64, lines)
                    used = m < behind
                    if WHOLE:
                        to = out + column + (first.to(gl.int64) * H + m) * LATENT
                    else:
                        used = used & (unit <= start + m // H)
                        entry = (s.to(gl.int64) * Q + m // H) * entries * H
                        to = parts + column + (entry + unit // size * H + m % H) * LATENT
                    if FOLDS:
                        mbarrier.wait(told, g & 1)
                    own = kept + column * 8 + (g >> 30)
                    _end_segment(
                        left, own, factors, at, unit, segment, stop, end, to, used, SPAN, FOLDS,
                        WHOLE,
                    )  # fmt: skip
                    _end_segment(
                        right, own + PART * 8, factors, at, unit, segment, stop, end, to + PART,
                        used, SPAN, FOLDS, WHOLE,
                    )  # fmt: skip
                    if FOLDS:
                        mbarrier.arrive(heard)
                    g += 1


@gluon.jit
def _init_barriers(
    full, empty, ready, q_full, q_empty, told, heard, PIECES: gl.constexpr
):  # fmt: skip
    """Each barrier with the number of those that arrive at it."""
    for slot in gl.static_range(SLOTS * 2):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=PIECES)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(SLOTS * 2 + slot), count=1)
        mbarrier.init(empty.index(SLOTS * 2 + slot), count=3)
        mbarrier.init(ready.index(slot), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    mbarrier.init(told, count=1)
    mbarrier.init(heard, count=2)


@gluon.jit(
    do_not_specialize=["table_stride", "items", "blocks", "parallel", "entries", "Q"],
)
def _latent_kernel(
    q_map, q_rope_map, latent_map, rope_map, page_table, cu_seqlens, starts, out, tops, norms,
    parts, kept, scale, table_stride, items, blocks, parallel, entries, Q,
    H: gl.constexpr, PIECES: gl.constexpr, SEGMENT: gl.constexpr, NEAR: gl.constexpr,
    FAR: gl.constexpr, SPAN: gl.constexpr, FOLDS: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Every num_programs(0)-th item: 64 (token, head) rows of a row of the batch, one of PIECES
    pieces of their columns, and every `parallel`-th of their units: segments or, where it FOLDS,
    spans of keys. Each is left as an entry, or, where WHOLE, folded."""
    dtype: gl.constexpr = out.dtype.element_ty
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(dtype, [2, 64, HALF], square)
    q_rope = gl.allocate_shared_memory(dtype, [1, 64, ROPE], square)
    ring = gl.allocate_shared_memory(dtype, [SLOTS * 2, 64, HALF], square)
    ropes = gl.allocate_shared_memory(dtype, [SLOTS, 64, ROPE], square)
    ones = gl.allocate_shared_memory(dtype, [8, 64], square)
    fades = gl.allocate_shared_memory(gl.float32, [SLOTS, 64], flat)
    factors = gl.allocate_shared_memory(gl.float32, [5, 64], flat)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS * 3, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS * 3, 1], barriers)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barriers)
    q_full = gl.allocate_shared_memory(gl.int64, [1], barriers)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], barriers)
    told = gl.allocate_shared_memory(gl.int64, [1], barriers)
    heard = gl.allocate_shared_memory(gl.int64, [1], barriers)
    _init_barriers(full, empty, ready, q_full, q_empty, told, heard, PIECES)
    ones.store(gl.full((8, 64), 1.0, dtype, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    fence_async_shared()
    kept += gl.program_id(0).to(gl.int64) * (2 * 64 * LATENT)
    gl.warp_specialize(
        [
            (_weights, (
                queries, q_rope, q_full, q_empty, ring, ropes, full, empty, fades, ready, ones,
                factors, told, heard, cu_seqlens, starts, tops, norms, scale, items, blocks,
                parallel, entries, Q, H, PIECES, SEGMENT, NEAR, FAR, SPAN, FOLDS, WHOLE,
            )),
            (_values, (
                ring, ropes, full, empty, fades, ready, factors, told, heard, cu_seqlens, starts,
                parts, out, kept, items, blocks, parallel, entries, Q, 0, H, PIECES, SEGMENT, NEAR,
                FAR, SPAN, FOLDS, WHOLE,
            )),
            (_values, (
                ring, ropes, full, empty, fades, ready, factors, told, heard, cu_seqlens, starts,
                parts, out, kept, items, blocks, parallel, entries, Q, 1, H, PIECES, SEGMENT, NEAR,
                FAR, SPAN, FOLDS, WHOLE,
            )),
            (_fetch, (
                q_map, q_rope_map, latent_map, rope_map, queries, q_rope, q_full, q_empty, ring,
                ropes, full, empty, page_table, cu_seqlens, starts, table_stride, items, blocks,
                parallel, H, PIECES, SEGMENT, NEAR, FAR, SPAN, FOLDS,
            )),
        ],
        [4, 4, 1],
        [184, 184, 24],
    )  # fmt: skip


def _supports(**traits: Any) -> str | None:
    if traits.get("latent", LATENT.value) != LATENT.value:
        return f"the latent is not {LATENT.value} wide"
    if traits.get("rope", ROPE.value) != ROPE.value:
        return f"rope is not {ROPE.value} wide"
    if traits.get("dtype", torch.float32) not in (torch.bfloat16, torch.float16):
        return "weights are multiplied in bf16 or fp16"
    why_not = supports(**traits)
    if why_not is None and resolve_architecture(**traits) != HOPPER:
        return "wgmma is Hopper's"
    return why_not


def pieces_of(items: int) -> int:
    """Programs that share the columns of an item: two where half of a GPU would have none."""
    return 2 if items * 2 <= MULTIPROCESSORS else 1


def _described(rows: Tensor, columns: int) -> TensorDescriptor:
    """rows [N, D], of which pieces [64, columns] are copied."""
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor.from_tensor(rows, [64, columns], layout)


@latent_attention.backend("hopper", supports=_supports)
def latent_attention_hopper(
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
    """See lockstep.kernels.latent_attention.latent_attention. What does not fit goes through
    triton.py. Packed latents are unpacked ahead.

    divided: how; as partition() says where it is left out.
    """
    copied = isinstance(latents, PackedKV) or latents.is_contiguous() and ropes.is_contiguous()
    if not (len(q_latent) and copied and latents.shape[1] == 64):
        return latent_attention_triton(
            q_latent, q_rope, latents, ropes, page_table, cu_seqlens, starts, query_len, scale,
            divided,
        )  # fmt: skip
    out = torch.empty_like(q_latent)
    for rows in unpacked_groups(latents, ropes, page_table, cu_seqlens, starts):
        _attend(out, q_latent, q_rope, *rows, query_len, scale, divided)
    return out


def _attend(
    out: Tensor,
    q_latent: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    ropes: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    divided: Partition | None,
) -> None:
    """Fills what `out` holds of these rows."""
    rows = starts.shape[0]
    heads = q_latent.shape[1]
    tile = tile_of(q_latent.dtype, HOPPER)
    keys = page_table.shape[1] * latents.shape[1]
    p = divided or partition(rows, query_len, heads, LATENT.value, keys, tile)
    entries = triton.cdiv(keys, p.unit) if p.unit else 0
    count = rows * query_len * heads * entries
    blocks = tile.blocks(query_len, heads)
    items = rows * blocks * p.parallel
    pieces = pieces_of(items)
    items *= pieces
    programs = min(items, MULTIPROCESSORS)
    f32 = dict(dtype=torch.float32, device=q_latent.device)
    left = [torch.empty(count * size, **f32) for size in (1, 1, LATENT.value)]
    kept = torch.empty(programs * 2 * 64 * LATENT.value, **f32)
    _latent_kernel[(programs,)](
        _described(q_latent.view(-1, LATENT.value), HALF.value),
        _described(q_rope.view(-1, ROPE.value), ROPE.value),
        _described(latents.view(-1, LATENT.value), HALF.value),
        _described(ropes.view(-1, ROPE.value), ROPE.value),
        page_table, cu_seqlens, starts, out, *left, kept, scale * LOG2E, page_table.stride(0),
        items, blocks, p.parallel, entries, query_len,
        heads, pieces, *tile.law, p.unit != tile.near, not p.unit,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if entries:
        fold_entries(left, cu_seqlens, starts, out, entries, query_len, p.unit, tile)
