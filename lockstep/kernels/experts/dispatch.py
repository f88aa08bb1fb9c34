# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""Dispatch of experts: pairs (token, slot) sorted by expert on the device, a stable counting sort.

It takes one launch, or three for many pairs. A pair's position changes no bit; it is deterministic
all the same, since only integers are summed. A few KB are sorted, so latency is all that counts: a
CTA's loads are all in flight at once, and no loop waits for one load after the other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.architecture import WARP_SIZE
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.experts.tiles import max_tiles
from lockstep.kernels.integers import ceil_div, next_power_of_2

MAX_FUSED_PAIRS = 4096
"""Maximum pairs of the one-launch form, where every CTA counts all pairs. Counting takes about 60
instructions of a warp for 32 pairs and 256 experts, twice: 2 us at 4,096 pairs, less than two more
launches."""
CHUNK = 64
"""Pairs of a CTA: each is compared with each, 16 comparisons a thread. 8,192 tokens x 8 are 1,024
CTAs."""
WARPS = 8
LARGE_WARPS = 16
"""Warps of a CTA that counts more than LARGE pairs: 4 or 8 pairs in each thread."""
LARGE = 1024
COLUMNS = 8
"""Experts of a CTA of the prefix sum: 32 bytes, one memory sector."""
CHUNKS_PER_STEP = 512
"""Chunks that it adds at once, 16 in each thread: 2 steps at 65,536 pairs."""
FIELDS = 2
"""Fields of a tile in the table: its expert (-1: none), the number of its pairs."""


@triton.jit
def clamped_experts(ids_ptr, offsets, mask, experts):
    """Load the experts of pairs, clamped into range; -1 where masked."""
    ids = tl.load(ids_ptr + offsets, mask=mask, other=0)
    return tl.where(mask, tl.minimum(tl.maximum(ids, 0), experts - 1), -1)


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(ids_ptr, counts_ptr, pairs, experts, LANES: tl.constexpr, CHUNK: tl.constexpr):
    """Count the pairs of one chunk per expert: counts [chunks + 1, LANES]."""
    pdl_start()
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    chunk_experts = clamped_experts(ids_ptr, pair, pair < pairs, experts)
    histogram = tl.histogram(chunk_experts, LANES, mask=pair < pairs)
    tl.store(counts_ptr + chunk * LANES + tl.arange(0, LANES), histogram)


@triton.jit(do_not_specialize=["chunks"])
def _prefix_sum_kernel(
    counts_ptr, chunks, LANES: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS_PER_STEP: tl.constexpr
):  # fmt: skip
    """Replace each chunk's counts [chunks + 1, LANES] by the sum over the chunks before it."""
    pdl_start()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), tl.int32)
    for begin in range(0, chunks, CHUNKS_PER_STEP):
        chunk = begin + tl.arange(0, CHUNKS_PER_STEP)[:, None]
        ptrs = counts_ptr + chunk * LANES + column[None, :]
        counts = tl.load(ptrs, mask=chunk < chunks, other=0)
        exclusive = before[None, :] + tl.cumsum(counts, 0) - counts
        tl.store(ptrs, exclusive, mask=chunk < chunks)
        before += tl.sum(counts, 0)
    tl.store(counts_ptr + chunks * LANES + column, before)


@triton.jit
def _fill_table(
    table_ptr, totals, expert_tiles, first_tiles, tokens, tiles, LANES: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """Write the table of tiles. totals, expert_tiles, first_tiles [LANES]: the number of pairs of
    each expert, the number of its tiles, its first tile."""
    expert = tl.arange(0, LANES)
    for i in range(0, tl.max(expert_tiles, 0)):
        ptrs = table_ptr + (first_tiles + i) * FIELDS
        mask = i < expert_tiles
        tl.store(ptrs, expert, mask=mask)
        tl.store(ptrs + 1, tl.minimum(totals - i * tokens, tokens), mask=mask)
    # At most LANES tiles are left over: mark them as empty.
    unused = tl.sum(expert_tiles, 0) + expert
    tl.store(table_ptr + unused * FIELDS, -1, mask=unused < tiles)


@triton.jit(do_not_specialize=["pairs", "chunks", "tokens", "tiles"])
def _scatter_kernel(
    ids_ptr, counts_ptr, order_ptr, table_ptr, pairs, chunks, tokens, tiles, experts,
    LANES: tl.constexpr, CHUNK: tl.constexpr, ALL_PAIRS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Write a chunk's pairs to their positions in order [tiles * tokens].

    The first CTA, which has no chunk, writes the table. counts_ptr: prefix sums over chunks, or
    None where each CTA counts all pairs itself, ALL_PAIRS at most.
    """
    pdl_start()
    chunk = tl.program_id(0) - 1
    lane = tl.arange(0, LANES)
    pair_ids = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = (pair_ids >= 0) & (pair_ids < pairs)
    chunk_experts = clamped_experts(ids_ptr, pair_ids, mask, experts)
    if counts_ptr is None:
        pair = tl.arange(0, ALL_PAIRS)
        all_experts = clamped_experts(ids_ptr, pair, pair < pairs, experts)
        totals = tl.histogram(all_experts, LANES, mask=pair < pairs)
        before = tl.histogram(all_experts, LANES, mask=pair < tl.minimum(chunk * CHUNK, pairs))
    else:
        totals = tl.load(counts_ptr + chunks * LANES + lane)
        before = tl.load(counts_ptr + tl.maximum(chunk, 0) * LANES + lane)
    expert_tiles = (totals + (tokens - 1)) // tokens
    first_tiles = tl.cumsum(expert_tiles, 0) - expert_tiles
    if chunk < 0:
        _fill_table(table_ptr, totals, expert_tiles, first_tiles, tokens, tiles, LANES, FIELDS)
    else:
        # Stable: the rank within the chunk counts earlier pairs of the same expert.
        same_expert = chunk_experts[None, :] == chunk_experts[:, None]
        earlier = same_expert & (pair_ids[None, :] < pair_ids[:, None])
        begin = tl.gather(first_tiles * tokens + before, tl.maximum(chunk_experts, 0), 0)
        position = begin + tl.sum(earlier.to(tl.int32), 1)
        tl.store(order_ptr + position, pair_ids, mask=mask)


def sort_pairs(ids: Tensor, experts: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Sort the pairs of ids [T, k], contiguous, into tiles of one expert each.

    Returns:
        order [tiles, tokens] int32: pairs t * k + slot by expert, then by number; the pairs of an
            expert begin at a tile. Entries without a pair are undefined.
        table [tiles, FIELDS] int32: expert and number of pairs of each tile. The number is
            undefined where the expert is -1.
    """
    pairs = ids.numel()
    # tl.histogram compares ballots of a warp, so a counting CTA has at least one pair for each of
    # its threads and one expert for each thread of a warp.
    lanes = max(WARP_SIZE, next_power_of_2(experts))
    tiles = max_tiles(pairs, experts, tokens)
    chunks = ceil_div(pairs, CHUNK)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids.device)

    counts = None
    all_pairs = 0
    warps = WARPS
    if pairs <= MAX_FUSED_PAIRS:
        all_pairs = max(WARP_SIZE * WARPS, next_power_of_2(pairs))
        warps = WARPS if all_pairs <= LARGE else LARGE_WARPS
    else:
        counts = empty(chunks + 1, lanes)
        _count_kernel[(chunks,)](
            ids, counts, pairs, experts, lanes, CHUNK, num_warps=CHUNK // WARP_SIZE
        )  # fmt: skip
        _prefix_sum_kernel[(lanes // COLUMNS,)](
            counts, chunks, lanes, COLUMNS, CHUNKS_PER_STEP, num_warps=WARPS
        )
    order = empty(tiles, tokens)
    table = empty(tiles, FIELDS)
    _scatter_kernel[(1 + chunks,)](
        ids, counts, order, table, pairs, chunks, tokens, tiles, experts,
        lanes, CHUNK, all_pairs, FIELDS, num_warps=warps,
    )  # fmt: skip
    return order, table
