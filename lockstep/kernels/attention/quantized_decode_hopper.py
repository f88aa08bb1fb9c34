# mypy: ignore-errors
"""paged_attention of few query rows over packed caches on Hopper, in Gluon: triton.py's fold.

A program is one warp. It copies tiles of codes to shared memory, takes them from there into the
registers of mma.sync's operands, and unpacks them there: no number of the model's dtype goes
through shared memory, and no warp waits for another. Every segment is left as an entry for the
second kernel of triton.py. See docs/kernels/attention.md.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from lockstep.kernels.attention.split_kv import MULTIPROCESSORS, Sizes, leave, part_of
from lockstep.kernels.attention.triton import LOG2E, fold_entries
from lockstep.kernels.attention.warpgroup import NO_SCORE, TILES
from lockstep.kernels.device.mma_layouts import LEFT, MMA, RIGHT, column_of
from lockstep.kernels.formats.kv import PackedKV
from lockstep.kernels.formats.kv.launch import opened

WARPS = 8
"""Of a multiprocessor: as many as its registers hold at 255 a thread. 8B, 8 x 1, 16,384, fp8: 87.3
us, 88.1 with 10, 90.3 with 12, 125 with 16 (H200)."""
WORD = 4
"""Bytes."""
DIM = 128
"""Of heads. At 256 the output of 8 rows takes as many registers as that of 16 here, and a tile
twice the shared memory: 249 us against 213 of quantized_hopper.py (27B, 8 x 1, 32,768, fp8)."""
COLUMN = gl.constexpr(gl.SliceLayout(0, MMA.value))
"""Of one number for each row of queries."""


@gluon.constexpr_function
def copied(words):
    """How a warp copies a tile [64, words]: 16 bytes a lane."""
    across = min(32, words // 4)
    return gl.BlockedLayout([1, 4], [32 // across, across], [1, 1], [1, 0])


@gluon.constexpr_function
def across_banks(words, together):
    """A tile [64, words]: 8 tokens, `together` words of each, meet in no bank, or in few."""
    phases = min(words // together, 32 // together)
    per_phase = max(1, 32 // words) if together == 4 else 2
    return gl.SwizzledSharedLayout(together, per_phase, max(phases, 1), [1, 0])


@gluon.jit
def _copy(
    side, page, at, keys, kv, PAGE: gl.constexpr, TOKEN: gl.constexpr, HKV: gl.constexpr,
    COUNT: gl.constexpr,
):  # fmt: skip
    """Starts to copy a tile: its codes, and the words of its numbers. 0 from `keys` on."""
    codes_in = side[0]
    numbers_in = side[1]
    codes = side[2]
    numbers = side[3]
    PLANES: gl.constexpr = codes_in.shape[0]
    WORDS: gl.constexpr = codes_in.shape[2]
    BESIDE: gl.constexpr = numbers_in.shape[0]
    layout: gl.constexpr = copied(WORDS)
    token = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, layout))[None, :]
    codes += page.to(gl.int64) * PAGE
    for plane in gl.static_range(PLANES):
        async_copy.async_copy_global_to_shared(
            codes_in.index(plane), codes + plane * WORDS + (token * TOKEN + word),
            mask=at + token + word * 0 < keys,
        )  # fmt: skip
    if COUNT > 0:
        flat: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        token = gl.arange(0, 64, flat)
        numbers += page.to(gl.int64) * (32 * HKV * COUNT)
        first = (token * HKV + kv) * COUNT // 2
        for word in gl.static_range(BESIDE):
            async_copy.async_copy_global_to_shared(
                numbers_in.index(word), numbers + first + word, mask=at + token < keys
            )
    async_copy.commit_group()


@gluon.jit
def _queries(q, count, kv, ROWS: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr,
             D: gl.constexpr):  # fmt: skip
    """[D, ROWS]: columns of 16 in the order in which keys are."""
    m = gl.arange(0, ROWS, gl.SliceLayout(0, RIGHT))
    s = gl.arange(0, D, gl.SliceLayout(1, RIGHT))
    d = column_of(s)
    place = (m // GROUP * H + kv * GROUP + m % GROUP) * D
    mask = (m < count * GROUP)[None, :] & (d >= 0)[:, None]
    return gl.load(q + place[None, :] + d[:, None], mask=mask, other=0.0)


@gluon.jit
def _weigh(scores, scale, start, at, GROUP: gl.constexpr):
    """scores [16, ROWS] scaled, those of keys from `at` on that a row does not see left out."""
    scores = scores * scale
    if at + 15 > start:
        key = at + gl.arange(0, 16, gl.SliceLayout(1, MMA))
        m = gl.arange(0, scores.shape[1], COLUMN)
        scores = gl.where(key[:, None] <= (start + m // GROUP)[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def _scores(side, queries, top, scale, start, at, kv, GROUP: gl.constexpr, HKV: gl.constexpr,
            KEYS: gl.constexpr):  # fmt: skip
    """A tile of keys: the larger maximum, and four times the scores of 16 keys [16, ROWS]."""
    D: gl.constexpr = queries.shape[0]
    ROWS: gl.constexpr = queries.shape[1]
    scores = ()
    for i in gl.static_range(4):
        found = gl.zeros((16, ROWS), gl.float32, MMA)
        found = mma_v2(KEYS(side[0], side[1], i, kv, HKV, D), queries, found)
        found = _weigh(found, scale, start, at + 16 * i, GROUP)
        top = gl.maximum(top, gl.max(found, 0))
        scores = scores + (found,)
    return top, scores


@gluon.jit
def _sums(side, scores, top, norm, total, kv, dtype: gl.constexpr, HKV: gl.constexpr,
          VALUES: gl.constexpr):  # fmt: skip
    """The tile's weights and values, added to the sums of weights and the output."""
    D: gl.constexpr = total.shape[0]
    ones = gl.full((16, 16), 1.0, dtype, LEFT)
    for i in gl.static_range(4):
        weights = gl.exp2(scores[i] - top[None, :]).to(dtype)
        weights = gl.convert_layout(weights, RIGHT)
        norm = mma_v2(ones, weights, norm)
        total = mma_v2(VALUES(side[0], side[1], i, kv, HKV, D), weights, total)
    return norm, total


@gluon.jit
def _side(codes, numbers, kv, HEAD: gl.constexpr, COUNT: gl.constexpr, PLANES: gl.constexpr,
          WORDS: gl.constexpr, TOGETHER: gl.constexpr):  # fmt: skip
    """Keys, or values: where a tile of codes and of numbers goes, and where they come from."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    word: gl.constexpr = gl.pointer_type(gl.int32)
    swizzled: gl.constexpr = across_banks(WORDS, TOGETHER)
    tile = gl.allocate_shared_memory(gl.int32, [PLANES, 64, WORDS], swizzled)
    beside = gl.allocate_shared_memory(gl.int32, [max(COUNT // 2, 1), 64], flat)
    first = codes.to(word, bitcast=True) + kv * HEAD
    if COUNT > 0:
        return tile, beside, first, numbers.to(word, bitcast=True)
    else:
        return tile, beside, first, first


@gluon.jit(do_not_specialize=["entries", "table_stride", "Q"])
def _warp_kernel(
    q, k_codes, v_codes, k_numbers, v_numbers, page_table, cu_seqlens, starts, tops, norms, parts,
    scale, entries, table_stride, Q,
    K_PAGE: gl.constexpr, K_TOKEN: gl.constexpr, K_HEAD: gl.constexpr,
    V_PAGE: gl.constexpr, V_TOKEN: gl.constexpr, V_HEAD: gl.constexpr,
    H: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, K_COUNT: gl.constexpr,
    V_COUNT: gl.constexpr, K_PLANES: gl.constexpr, V_PLANES: gl.constexpr, K_SHARE: gl.constexpr,
    V_SHARE: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr, PLACE: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """A KV head of a row, and the segments of one of num_programs(1) equal parts of its context.

    Strides of pages, tokens and heads are in words of four bytes.
    """
    GROUP: gl.constexpr = H // HKV
    s, kv, begin, count, start, first, share, tiles = part_of(cu_seqlens, starts, HKV)
    keys = start + count
    if (count > 0) & (first < tiles):
        tiles = gl.minimum(tiles - first, share)
        k = _side(k_codes, k_numbers, kv, K_HEAD, K_COUNT, K_PLANES, D // K_SHARE, 4)
        v = _side(v_codes, v_numbers, kv, V_HEAD, V_COUNT, V_PLANES, D // V_SHARE, 8)
        skipped = s * Q * entries * H
        pages = page_table + s * table_stride + first
        at = first * 64
        page = gl.load(pages)
        _copy(k, page, at, keys, kv, K_PAGE, K_TOKEN, HKV, K_COUNT)
        _copy(v, page, at, keys, kv, V_PAGE, V_TOKEN, HKV, V_COUNT)
        page = gl.load(pages + 1, mask=at + 64 < keys, other=0)
        queries = _queries(q + begin * (H * D), count, kv, ROWS, H, GROUP, D)
        top = gl.full((ROWS,), NO_SCORE, gl.float32, COLUMN)
        norm = gl.zeros((16, ROWS), gl.float32, MMA)
        total = gl.zeros((D, ROWS), gl.float32, MMA)
        for t in range(tiles):
            async_copy.wait_group(1)
            new_top, scores = _scores(k, queries, top, scale, start, at, kv, GROUP, HKV, KEYS)
            _copy(k, page, at + 64, keys, kv, K_PAGE, K_TOKEN, HKV, K_COUNT)
            fade = gl.exp2(top - new_top)[None, :]
            top = new_top
            async_copy.wait_group(1)
            norm, total = _sums(
                v, scores, top, norm * fade, total * fade, kv, q.dtype.element_ty, HKV, VALUES
            )
            _copy(v, page, at + 64, keys, kv, V_PAGE, V_TOKEN, HKV, V_COUNT)
            page = gl.load(pages + t + 2, mask=at + 128 < keys, other=0)
            if ((first + t + 1) % TILES == 0) | (t + 1 == tiles):
                leave(
                    top, norm, total, tops + skipped, norms + skipped, parts + skipped * D, at,
                    count, start, kv, entries, 0, H, GROUP, PLACE, MMA,
                )  # fmt: skip
                top = gl.full((ROWS,), NO_SCORE, gl.float32, COLUMN)
                norm = gl.zeros((16, ROWS), gl.float32, MMA)
                total = gl.zeros((D, ROWS), gl.float32, MMA)
            at += 64
        async_copy.wait_group(0)


class Division(NamedTuple):
    """How a step is divided, and what a warp takes. Nothing here changes a bit.

    rows: of a program. parts: programs that share a row. registers: of a thread, at most.
    """

    rows: int
    parts: int
    registers: int


def division_of(rows: int, count: int, kv_heads: int, segments: int) -> Division:
    """The division for static sizes, by the times in docs/kernels/attention.md. count: (token, head
    of a group) rows of a KV head. As many programs as are resident at once: registers bind."""
    block = max(8, triton.next_power_of_2(count))
    parts = max(1, min(segments, WARPS * MULTIPROCESSORS // (rows * kv_heads)))
    return Division(block, parts, 255)


def serves(q: Tensor, k_cache: PackedKV, v_cache: PackedKV, count: int) -> bool:
    """Whether this kernel takes such a step: count, as above, rows of bf16, and codecs of both."""
    codecs = (k_cache.codec, v_cache.codec)
    if q.dtype != torch.bfloat16 or q.shape[-1] != DIM:
        return False
    return all(codec.fragments_at and count <= codec.fragments().rows for codec in codecs)


def paged_attention_few(
    q: Tensor,
    k_cache: PackedKV,
    v_cache: PackedKV,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    gates: Tensor | None = None,
    division: Division | None = None,
) -> Tensor:
    """See lockstep.kernels.attention.paged_attention, for steps that `serves` takes; entries of all
    segments fit into ENTRY_BYTES. division: as division_of() says where it is left out."""
    step = Sizes.of(q, k_cache, page_table, starts, query_len)
    how = division or division_of(step.rows, step.count, step.kv_heads, step.segments)
    k = opened(k_cache, q.dtype)
    v = opened(v_cache, q.dtype)
    of_keys = k_cache.codec.fragments()
    of_values = v_cache.codec.fragments()
    sizes = [side.codes.dtype.itemsize for side in (k, v)]
    strides = [
        stride * size // WORD
        for side, size in zip((k, v), sizes, strict=True)
        for stride in side.codes.stride()[:3]
    ]
    kept = step.empty_entries(q.device)
    _warp_kernel[(step.rows * step.kv_heads, how.parts)](
        q, k.codes, v.codes, k.numbers, v.numbers, page_table, cu_seqlens, starts, *kept,
        scale * LOG2E, step.segments, page_table.stride(0), query_len, *strides, *step.layer(),
        k.beside, v.beside, of_keys.planes, of_values.planes, of_keys.share, of_values.share,
        of_keys.keys, of_values.values, of_values.place, how.rows,
        num_warps=1, maxnreg=how.registers, enable_fp_fusion=False,
    )  # fmt: skip
    out = torch.empty_like(q)
    fold_entries(kept, q, cu_seqlens, starts, query_len, step.segments, 1, False, gates, v, out)
    return out
