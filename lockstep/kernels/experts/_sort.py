# mypy: ignore-errors
"""Pairs of a token and a slot, sorted by expert on the device: a stable counting sort, no atomics.

Two launches. Where a pair stands changes no bit; the order is fixed all the same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.experts.tiles import most_tiles

CHUNK = 512
"""Pairs of a program: 8,192 tokens x 8 are 128 programs, one for a multiprocessor."""
TOGETHER = 32
"""Pairs, or chunks, that a turn of a loop takes: blocks of 32 x 512, 64 numbers a thread."""
ENTRIES = 64
"""Tiles that a program describes."""
WARPS = 8
FIELDS = 3
"""Numbers of a tile's description: its expert (-1: none), its first place in the order, the end of
its expert's places."""


@triton.jit
def clamped(ids, at, live, experts):
    """The experts of pairs `at`; -1 where they are not live."""
    own = tl.load(ids + at, mask=live, other=0)
    return tl.where(live, tl.minimum(tl.maximum(own, 0), experts - 1), -1)


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(
    ids, counts, pairs, experts,
    LANES: tl.constexpr, CHUNK: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """counts [chunks, LANES]: how many of a chunk's pairs go to each expert."""
    chunk = tl.program_id(0)
    expert = tl.arange(0, LANES)
    found = tl.zeros((LANES,), tl.int32)
    for begin in range(chunk * CHUNK, (chunk + 1) * CHUNK, TOGETHER):
        at = begin + tl.arange(0, TOGETHER)
        own = clamped(ids, at, at < pairs, experts)
        found += tl.sum((own[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts + chunk * LANES + expert, found)


@triton.jit
def _describe(table, first, total, start, tiles, M: tl.constexpr, ENTRIES: tl.constexpr,
              FIELDS: tl.constexpr):  # fmt: skip
    """Entries first .. first + ENTRIES of the table. total, start [LANES]: of an expert's pairs."""
    tile = first + tl.arange(0, ENTRIES)
    own = (total + (M - 1)) // M
    end = tl.cumsum(own, 0)
    expert = tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), 1)
    used = expert < total.shape[0]
    safe = tl.where(used, expert, 0)
    begin = tl.gather(start, safe, 0) + (tile - tl.gather(end - own, safe, 0)) * M
    to = table + tile * FIELDS
    live = tile < tiles
    tl.store(to, tl.where(used, expert, -1), mask=live)
    tl.store(to + 1, begin, mask=live)
    tl.store(to + 2, tl.gather(start + total, safe, 0), mask=live)


@triton.jit(do_not_specialize=["pairs", "chunks", "tiles"])
def _place_kernel(
    ids, counts, order, table, pairs, chunks, tiles, experts,
    M: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr, TOGETHER: tl.constexpr,
    ENTRIES: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """order [pairs]: a chunk's pairs at their places; table: ENTRIES of the tiles."""
    chunk = tl.program_id(0)
    expert = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.int32)
    before = tl.zeros((LANES,), tl.int32)
    for begin in range(0, chunks, TOGETHER):
        of = begin + tl.arange(0, TOGETHER)[:, None]
        found = tl.load(counts + of * LANES + expert[None, :], mask=of < chunks, other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where(of < chunk, found, 0), 0)
    start = tl.cumsum(total, 0) - total
    _describe(table, chunk * ENTRIES, total, start, tiles, M, ENTRIES, FIELDS)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    own = clamped(ids, at, at < pairs, experts)
    place = tl.gather(start + before, tl.maximum(own, 0), 0)
    for begin in range(chunk * CHUNK, (chunk + 1) * CHUNK, TOGETHER):
        earlier = begin + tl.arange(0, TOGETHER)
        other = clamped(ids, earlier, earlier < pairs, experts)
        same = (other[None, :] == own[:, None]) & (earlier[None, :] < at[:, None])
        place += tl.sum(same.to(tl.int32), 1)
    tl.store(order + place, at, mask=at < pairs)


def sort_pairs(ids: Tensor, experts: int, tokens: int) -> tuple[Tensor, Tensor]:
    """ids [T, k], contiguous -> order [T * k] int32: pairs t * k + slot by expert, then by number;
    table [tiles, FIELDS] int32: which of them a tile of `tokens` holds."""
    pairs = ids.numel()
    chunks = triton.cdiv(pairs, CHUNK)
    lanes = triton.next_power_of_2(experts)
    tiles = most_tiles(pairs, experts, tokens)
    options = dict(num_warps=WARPS, enable_fp_fusion=False)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids.device)

    counts = ints(chunks, lanes)
    order = ints(pairs)
    table = ints(tiles, FIELDS)
    _count_kernel[(chunks,)](ids, counts, pairs, experts, lanes, CHUNK, TOGETHER, **options)
    _place_kernel[(max(chunks, triton.cdiv(tiles, ENTRIES)),)](
        ids, counts, order, table, pairs, chunks, tiles, experts,
        tokens, lanes, CHUNK, TOGETHER, ENTRIES, FIELDS, **options,
    )  # fmt: skip
    return order, table
