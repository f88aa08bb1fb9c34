# mypy: ignore-errors
"""sample in Triton where ranks share a logit row: propose, exchange, then choose on every rank.

After score_kernel each rank packs one record per logit row: its best score, and for rows that
filter the peaks and masses of its blocks and its TILE groups of logits with the highest peaks.
Records are exchanged. Then every rank chooses the same token from the same records: the TILE groups
of the row with the highest peaks are among the proposed ones, and they are put into the tile that a
single rank gathers. A row that its tile does not decide is gathered whole.

A shard begins at a multiple of BLOCK, so every group and every block is that of a single rank.
"""

import triton
import triton.language as tl

from lockstep.kernels.sampling.device_filter import (
    HIGHEST,
    NOTHING,
    best_of,
    bound_of,
    compact,
    floor_of,
    key_of,
    limits_of,
)
from lockstep.kernels.sampling.device_score import (
    FLAGS,
    LogitRow,
    integer_of,
    scores_of,
)
from lockstep.kernels.sampling.kernels import (
    NONE,
    UNDECIDED,
    best_candidate,
    best_of_parts,
    filters,
    store_token,
)
from lockstep.kernels.sampling.shard import HEADER_WORDS

HEADER = tl.constexpr(HEADER_WORDS)
BEST = tl.constexpr(0)
BEST_INDEX = tl.constexpr(1)
BOUND = tl.constexpr(2)
FIRST_BLOCK = tl.constexpr(3)
NUM_BLOCKS = tl.constexpr(4)
"""Words of the header: best score and its index in the whole row; the smallest key that at most
TILE of the rank's peaks reach; the rank's first block and number of blocks. See RecordLayout for
the rest."""


@triton.jit
def _pack_blocks(
    record, floats, peak, masses, BLOCKS: tl.constexpr, BLOCK_LANES: tl.constexpr,
    GROUPS_AT: tl.constexpr,
):  # fmt: skip
    """Store the largest peak and the mass of each block. peak: those of the groups."""
    lane = tl.arange(0, BLOCK_LANES)
    peaks = tl.max(tl.reshape(peak, (BLOCK_LANES, peak.shape[0] // BLOCK_LANES)), 1)
    mass = tl.load(masses + lane, mask=lane < BLOCKS, other=0.0)
    block = floats + HEADER + lane
    tl.store(block, peaks, mask=lane < BLOCKS)
    tl.store(block + (GROUPS_AT - HEADER) // 2, mass, mask=lane < BLOCKS)
    tl.store(record + NUM_BLOCKS, BLOCKS)


@triton.jit
def _pack_groups(
    record, floats, packed, logits, peaks, inside,
    VOCAB: tl.constexpr, FIRST: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr, GROUPS_AT: tl.constexpr,
):  # fmt: skip
    """Store the selected groups, at most TILE, in ascending order: number, peak and logits."""
    groups = record + GROUPS_AT
    count = compact(FIRST // GROUP + tl.arange(0, LANES), inside, groups)
    slot = tl.arange(0, TILE)
    live = slot < count
    group = tl.load(groups + slot, mask=live, other=FIRST // GROUP) - FIRST // GROUP
    peak = tl.load(peaks + group, mask=live, other=float("-inf"))
    tl.store(floats + GROUPS_AT + TILE + slot, peak)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + column, mask=live[:, None] & (column < VOCAB), other=float("-inf"))
    tl.store(packed + slot[:, None] * GROUP + tl.arange(0, GROUP)[None, :], x)


@triton.jit(do_not_specialize=["queries"])
def propose_kernel(
    batch, state, peaks, masses, values, best_indices, records, floats, packed, needed, queries,
    VOCAB: tl.constexpr, FIRST: tl.constexpr, PARTS: tl.constexpr, PART_LANES: tl.constexpr,
    GRAIN: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_LANES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
    WORDS: tl.constexpr, GROUPS_AT: tl.constexpr, LOGITS_AT: tl.constexpr,
    LOGIT_WORDS: tl.constexpr,
):  # fmt: skip
    """Pack the record of one logit row, and store how many halves of its words are needed.

    records [N, WORDS] int32. floats, packed: the same memory as fp32 and in the logits' dtype, of
    which LOGIT_WORDS fill a word.
    """
    query = tl.program_id(0).to(tl.int64)
    row = tl.load(batch.row_ids + query // queries)
    use = integer_of(state, row, FLAGS)
    logits = batch.logits + query * VOCAB
    record = records + query * WORDS
    floats += query * WORDS
    top, chosen = best_of_parts(
        logits, values + query * PARTS, best_indices + query * PARTS, use,
        VOCAB, PARTS, PART_LANES, GRAIN,
    )  # fmt: skip
    tl.store(floats + BEST, top)
    tl.store(record + BEST_INDEX, chosen + FIRST)
    halves = tl.full((), 2 * HEADER, tl.int32)
    if filters(use):
        lane = tl.arange(0, LANES)
        peak = tl.load(peaks + query * GROUPS + lane, mask=lane < GROUPS, other=float("-inf"))
        keys = key_of(peak)
        bound = bound_of(keys, TILE, key_of(tl.max(peak, 0)).to(tl.int64))
        bound = tl.maximum(bound, NOTHING + 1).to(tl.int32)
        tl.store(record + BOUND, bound)
        tl.store(record + FIRST_BLOCK, FIRST // BLOCK)
        _pack_blocks(record, floats, peak, masses + query * BLOCKS, BLOCKS, BLOCK_LANES, GROUPS_AT)
        _pack_groups(
            record, floats, packed + (query * WORDS + LOGITS_AT) * LOGIT_WORDS, logits,
            peaks + query * GROUPS, keys >= bound, VOCAB, FIRST, LANES, GROUP, TILE, GROUPS_AT,
        )  # fmt: skip
        halves = tl.full((), 2 * WORDS, tl.int32)
    tl.store(needed + query, halves)


@triton.jit
def _unpack_blocks(
    record, floats, peaks, masses, RANKS: tl.constexpr, WORDS: tl.constexpr,
    GROUPS_AT: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, BLOCK_LANES: tl.constexpr,
    GROUPS_PER_BLOCK: tl.constexpr,
):  # fmt: skip
    """Store each block's mass, and its largest peak as that of its first group.

    The other peaks are -inf: only the largest of a block is read.
    """
    lane = tl.arange(0, LANES)
    tl.store(peaks + lane, tl.full((LANES,), float("-inf"), tl.float32), mask=lane < GROUPS)
    tl.debug_barrier()  # the first groups of blocks are stored again, by other threads
    index = tl.arange(0, BLOCK_LANES)
    for rank in range(RANKS):
        first = tl.load(record + rank * WORDS + FIRST_BLOCK)
        mine = index < tl.load(record + rank * WORDS + NUM_BLOCKS)
        block = floats + rank * WORDS + HEADER + index
        peak = tl.load(block, mask=mine, other=0.0)
        mass = tl.load(block + (GROUPS_AT - HEADER) // 2, mask=mine, other=0.0)
        tl.store(peaks + (first + index) * GROUPS_PER_BLOCK, peak, mask=mine)
        tl.store(masses + first + index, mass, mask=mine)
    tl.debug_barrier()  # peaks and masses are read by other threads


@triton.jit
def _unpack_groups(
    logit_row, record, packed, inside, chosen, tile, columns,
    VOCAB: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr, GROUPS_AT: tl.constexpr,
    LOGITS_AT: tl.constexpr, LOGIT_WORDS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the scores of the selected groups, at most TILE, in the tile in ascending order.

    inside [SLOTS]: which of the ranks' proposed groups are selected.
    """
    count = compact(tl.arange(0, SLOTS), inside, chosen)
    slot = tl.arange(0, TILE)
    proposed = tl.load(chosen + slot, mask=slot < count, other=0)
    rank = proposed // TILE
    number = proposed % TILE
    group = tl.load(record + rank * WORDS + GROUPS_AT + number, mask=slot < count, other=0)
    member = tl.arange(0, GROUP)[None, :]
    column = group[:, None] * GROUP + member
    live = (slot < count)[:, None] & (column < VOCAB)
    logits = packed + ((rank * WORDS + LOGITS_AT) * LOGIT_WORDS + number * GROUP)[:, None] + member
    index = slot[:, None] * GROUP + member
    tl.store(tile + index, scores_of(logit_row, logits, column, live))
    tl.store(columns + index, tl.where(live, column, 0))
    tl.debug_barrier()  # the tile is read in another layout


@triton.jit
def _best_proposed(
    logit_row, record, floats, packed, peaks, masses, chosen, tile, columns, top,
    VOCAB: tl.constexpr, RANKS: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr,
    GROUPS_AT: tl.constexpr, LOGITS_AT: tl.constexpr, LOGIT_WORDS: tl.constexpr,
    GROUPS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_LANES: tl.constexpr,
    GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Make the row's tile of the records and return its best token: see best_candidate."""
    slot = tl.arange(0, SLOTS)
    rank = slot // TILE
    proposed = floats + rank * WORDS + GROUPS_AT + TILE + slot % TILE
    keys = key_of(tl.load(proposed, mask=rank < RANKS, other=float("-inf")))
    # Below a rank's bound are groups that it did not propose.
    bound = tl.load(record + BOUND)
    for index in range(1, RANKS):
        bound = tl.maximum(bound, tl.load(record + index * WORDS + BOUND))
    min_p, _, _ = limits_of(logit_row)
    floor = floor_of(top, min_p)
    highest = key_of(top).to(tl.int64)
    bound = tl.maximum(tl.maximum(bound_of(keys, TILE, highest), floor), bound.to(tl.int64))
    _unpack_groups(
        logit_row, record, packed, keys >= bound.to(tl.int32), chosen, tile, columns,
        VOCAB, SLOTS, WORDS, GROUPS_AT, LOGITS_AT, LOGIT_WORDS, GROUP, TILE,
    )  # fmt: skip
    _unpack_blocks(
        record, floats, peaks, masses,
        RANKS, WORDS, GROUPS_AT, GROUPS, LANES, BLOCK_LANES, LANES // BLOCK_LANES,
    )  # fmt: skip
    lane = tl.arange(0, LANES)
    peak = tl.load(peaks + lane, mask=lane < GROUPS, other=float("-inf"))
    return best_candidate(
        logit_row, tile, columns, masses, peak, top, floor, bound,
        VOCAB, BLOCKS, BLOCK_LANES, TILE * GROUP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["queries", "length", "tokens"])
def choose_proposed_kernel(
    batch, state, records, floats, packed, peaks, masses, slots, tile, columns, out, needed,
    queries, length, tokens,
    VOCAB: tl.constexpr, MAX_WIDTH: tl.constexpr, STOPS: tl.constexpr, W: tl.constexpr,
    L: tl.constexpr, WORD_LANES: tl.constexpr, RANKS: tl.constexpr, RANK_LANES: tl.constexpr,
    WORDS: tl.constexpr, GROUPS_AT: tl.constexpr, LOGITS_AT: tl.constexpr,
    LOGIT_WORDS: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_LANES: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Choose the token of one logit row of VOCAB logits from all ranks' records: see choose_kernel.

    records [N, RANKS, WORDS] int32. needed [N]: MAX_WIDTH where the whole row is needed, else 0.
    """
    query = tl.program_id(0).to(tl.int64)
    row = tl.load(batch.row_ids + query // queries)
    use = integer_of(state, row, FLAGS)
    record = records + query * RANKS * WORDS
    floats += query * RANKS * WORDS
    lanes = tl.arange(0, RANK_LANES)
    value = tl.load(floats + lanes * WORDS + BEST, mask=lanes < RANKS, other=float("-inf"))
    index = tl.load(record + lanes * WORDS + BEST_INDEX, mask=lanes < RANKS, other=HIGHEST)
    top, chosen = best_of(value, index)
    sound = (top > float("-inf")) & (top < float("inf"))
    if filters(use) & sound:
        SIZE: tl.constexpr = TILE * GROUP
        chosen = _best_proposed(
            LogitRow(
                batch, state, query, row, use, queries, length, tokens, VOCAB, STOPS, W, L,
                WORD_LANES, 0,
            ),
            record, floats, packed + query * RANKS * WORDS * LOGIT_WORDS,
            peaks + query * GROUPS, masses + query * BLOCKS, slots + query * TILE,
            tile + query * SIZE, columns + query * SIZE, top, VOCAB, RANKS, RANK_LANES * TILE,
            WORDS, GROUPS_AT, LOGITS_AT, LOGIT_WORDS, GROUPS, LANES, BLOCKS, BLOCK_LANES, GROUP,
            TILE,
        )  # fmt: skip
    chosen = tl.where(sound, chosen, NONE)
    tl.store(needed + query, tl.where(chosen == UNDECIDED, MAX_WIDTH, 0))
    store_token(batch, out, query, chosen)
