# mypy: ignore-errors
"""Pairs of a token and a slot, sorted by expert on the device: a stable counting sort.

One launch, or three for many pairs. Where a pair stands changes no bit; the order is fixed all the
same, since nothing but whole numbers is summed. A few KB are sorted, so latencies are all the time
there is: a program's loads are all under way at once, and no loop waits for one after the other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.experts.tiles import most_tiles

ALONE = 4096
"""The most pairs that every program counts by itself. That takes about 60 instructions of a warp
for 32 pairs and 256 experts, twice: 2 us at 4,096 pairs, less than the two launches that spare
it."""
CHUNK = 64
"""Pairs of a program: each is compared with each, 16 comparisons a thread. 8,192 tokens x 8 are
1,024 programs."""
WARP = 32
"""Threads. Whoever counts has a pair for each of its threads at least, and an expert for each of a
warp's: tl.histogram compares ballots of a warp."""
WARPS = 8
MANY_WARPS = 16
"""Where a program counts more than MANY pairs: 4 or 8 in each thread."""
MANY = 1024
COLUMNS = 8
"""Experts of a program that adds up counts: 32 bytes, what memory gives at once."""
TOGETHER = 512
"""Chunks that it takes at once, 16 in each thread: 2 turns at 65,536 pairs."""
FIELDS = 2
"""Numbers of a tile's description: its expert (-1: none), how many pairs it holds."""


@triton.jit
def clamped(ids, at, live, experts):
    """The experts of pairs `at`; -1 where they are not live."""
    own = tl.load(ids + at, mask=live, other=0)
    return tl.where(live, tl.minimum(tl.maximum(own, 0), experts - 1), -1)


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(ids, counts, pairs, experts, LANES: tl.constexpr, CHUNK: tl.constexpr):
    """counts [chunks + 1, LANES]: how many of a chunk's pairs go to each expert."""
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    own = clamped(ids, pair, pair < pairs, experts)
    found = tl.histogram(own, LANES, mask=pair < pairs)
    tl.store(counts + chunk * LANES + tl.arange(0, LANES), found)


@triton.jit(do_not_specialize=["chunks"])
def _add_kernel(
    counts, chunks, LANES: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr
):  # fmt: skip
    """counts [chunks + 1, LANES]: of a chunk's row, the sum of those before it."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), tl.int32)
    for begin in range(0, chunks, TOGETHER):
        chunk = begin + tl.arange(0, TOGETHER)[:, None]
        at = counts + chunk * LANES + column[None, :]
        found = tl.load(at, mask=chunk < chunks, other=0)
        tl.store(at, before[None, :] + tl.cumsum(found, 0) - found, mask=chunk < chunks)
        before += tl.sum(found, 0)
    tl.store(counts + chunks * LANES + column, before)


@triton.jit
def _describe(table, total, own, first, tokens, tiles, LANES: tl.constexpr, FIELDS: tl.constexpr):
    """Fills the table. total, own, first [LANES]: an expert's pairs, tiles, and first tile."""
    expert = tl.arange(0, LANES)
    for turn in range(0, tl.max(own, 0)):
        to = table + (first + turn) * FIELDS
        live = turn < own
        tl.store(to, expert, mask=live)
        tl.store(to + 1, tl.minimum(total - turn * tokens, tokens), mask=live)
    unused = tl.sum(own, 0) + expert
    tl.store(table + unused * FIELDS, -1, mask=unused < tiles)


@triton.jit(do_not_specialize=["pairs", "chunks", "tokens", "tiles"])
def _place_kernel(
    ids, counts, order, table, pairs, chunks, tokens, tiles, experts,
    LANES: tl.constexpr, CHUNK: tl.constexpr, EVERY: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """order [tiles * tokens]: a chunk's pairs at their places; by the first program, before the
    chunks', the table. counts: added up, or None where each program counts all pairs, EVERY at
    most."""
    chunk = tl.program_id(0) - 1
    lane = tl.arange(0, LANES)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    live = (at >= 0) & (at < pairs)
    own = clamped(ids, at, live, experts)
    if counts is None:
        pair = tl.arange(0, EVERY)
        every = clamped(ids, pair, pair < pairs, experts)
        total = tl.histogram(every, LANES, mask=pair < pairs)
        before = tl.histogram(every, LANES, mask=pair < tl.minimum(chunk * CHUNK, pairs))
    else:
        total = tl.load(counts + chunks * LANES + lane)
        before = tl.load(counts + tl.maximum(chunk, 0) * LANES + lane)
    filled = (total + (tokens - 1)) // tokens
    first = tl.cumsum(filled, 0) - filled
    if chunk < 0:
        _describe(table, total, filled, first, tokens, tiles, LANES, FIELDS)
    else:
        same = (own[None, :] == own[:, None]) & (at[None, :] < at[:, None])
        begin = tl.gather(first * tokens + before, tl.maximum(own, 0), 0)
        place = begin + tl.sum(same.to(tl.int32), 1)
        tl.store(order + place, at, mask=live)


def sort_pairs(ids: Tensor, experts: int, tokens: int) -> tuple[Tensor, Tensor]:
    """ids [T, k], contiguous -> order [tiles, tokens] int32: pairs t * k + slot by expert, then by
    number, an expert's from the beginning of a tile on; table [tiles, FIELDS] int32: the expert of
    a tile of `tokens`, and how many pairs it holds. Of an entry whose expert is -1, and of places
    that hold no pair, the numbers may be anything."""
    pairs = ids.numel()
    lanes = max(WARP, triton.next_power_of_2(experts))
    tiles = most_tiles(pairs, experts, tokens)
    chunks = triton.cdiv(pairs, CHUNK)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids.device)

    counts = None
    every = 0
    warps = WARPS
    if pairs <= ALONE:
        every = max(WARP * WARPS, triton.next_power_of_2(pairs))
        warps = WARPS if every <= MANY else MANY_WARPS
    else:
        counts = ints(chunks + 1, lanes)
        _count_kernel[(chunks,)](
            ids, counts, pairs, experts, lanes, CHUNK, num_warps=CHUNK // WARP
        )  # fmt: skip
        _add_kernel[(lanes // COLUMNS,)](counts, chunks, lanes, COLUMNS, TOGETHER, num_warps=WARPS)
    order = ints(tiles, tokens)
    table = ints(tiles, FIELDS)
    _place_kernel[(1 + chunks,)](
        ids, counts, order, table, pairs, chunks, tokens, tiles, experts,
        lanes, CHUNK, every, FIELDS, num_warps=warps,
    )  # fmt: skip
    return order, table
