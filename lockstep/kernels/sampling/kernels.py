# mypy: ignore-errors
"""sample in Triton: score, then choose. No sort and no host read; one logit row per position.

Where ranks share a logit row, exchange_kernels.py has the kernels that choose.

A position's flags are read on the device. Rows without flags go straight from their logits to the
argmax in one pass. For rows with filters the first pass finds the blocks of large scores, and the
filters run on those alone (device_filter.py). A logit row that these blocks do not decide is read
in full, a few rows at a time. The maximum of a logit row does not depend on how it is cut. A NaN
logit counts as inf, and a logit row whose maximum is not finite has no token.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.sampling import FILTERS, NOISE
from lockstep.kernels.sampling.device_filter import (
    HIGHEST,
    best_of,
    better_of,
    filter_candidates,
    filter_logit_row,
    gather_tile,
    key_of,
)
from lockstep.kernels.sampling.device_score import (
    FLAGS,
    LogitRow,
    integer_of,
    noise_at,
    scores_at,
)

USES_FILTERS = tl.constexpr(FILTERS)
USES_NOISE = tl.constexpr(NOISE)
NONE = tl.constexpr(-1)
UNDECIDED = tl.constexpr(-2)
"""Results: no token, and a logit row whose tile of candidates did not suffice."""


@triton.jit
def filters(use):
    """Return whether a row filters. Greedy rows do not: the argmax passes every filter."""
    return (use & (USES_FILTERS | USES_NOISE)) == (USES_FILTERS | USES_NOISE)


@triton.jit
def _plain_best(logits, begin, VOCAB: tl.constexpr, SPAN: tl.constexpr, GRAIN: tl.constexpr):
    """Return the largest of SPAN logits, inf for NaN, and the first index of its GRAIN logits."""
    column = begin + tl.arange(0, SPAN)
    x = tl.load(logits + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
    x = tl.where(x < float("inf"), x, float("inf"))
    best = tl.max(tl.reshape(x, (SPAN // GRAIN, GRAIN)), 1)
    return best_of(best, begin + GRAIN * tl.arange(0, SPAN // GRAIN))


@triton.jit
def _best_score(
    logit_row, begin, peaks, masses, VOCAB: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Return the best of SPAN scores and its index.

    Rows that do not filter add noise. Rows that filter store the peak of each GROUP, and per BLOCK
    the mass: the sum of exp(score - largest score of the block).
    """
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_column = tl.zeros((BLOCK,), tl.int32) + begin
    for offset in range(begin, begin + SPAN, BLOCK):
        column = offset + tl.arange(0, BLOCK)
        live = column < VOCAB
        x = scores_at(logit_row, column, live)
        if filters(logit_row.use):
            group = offset // GROUP + tl.arange(0, BLOCK // GROUP)
            peak = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), 1)
            tl.store(peaks + group, peak, mask=group * GROUP < VOCAB)
            mass = tl.sum(tl.where(x > float("-inf"), tl.exp(x - tl.max(x, 0)), 0.0), 0)
            tl.store(masses + offset // BLOCK, mass, mask=offset < VOCAB)
        elif logit_row.use & USES_NOISE:
            x += noise_at(logit_row, column, live)
        best, best_column = better_of(x, column, best, best_column)
    return best_of(best, best_column)


@triton.jit(do_not_specialize=["queries", "length", "tokens", "pitch"])
def score_kernel(
    batch, state, peaks, masses, values, best_indices, queries, length, tokens, pitch,
    VOCAB: tl.constexpr, STOPS: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
    WORD_LANES: tl.constexpr, FIRST: tl.constexpr, SPAN: tl.constexpr, GRAIN: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Score SPAN logits of one logit row: store their best, and peaks and masses for filters.

    The rank has VOCAB logits of the row, from index FIRST on; stored indices are the rank's own.
    pitch: VOCAB / ALIGNMENT, where whole rows begin at multiples of ALIGNMENT. The compiler then
    vectorizes loads, and adds, as for whole rows, however the rank's rows are aligned. None for
    whole rows.
    """
    pdl_start()
    query = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = tl.load(batch.row_ids + query // queries)
    begin = part * SPAN
    use = integer_of(state, row, FLAGS)
    if use == 0:
        logits = batch.logits + query * (VOCAB if pitch is None else pitch * ALIGNMENT)
        top, first = _plain_best(logits, begin, VOCAB, SPAN, GRAIN)
    else:
        top, first = _best_score(
            LogitRow(
                batch, state, query, row, use, queries, length, tokens,
                VOCAB if pitch is None else pitch * ALIGNMENT, STOPS, W, L, WORD_LANES, FIRST,
            ),
            begin, peaks + query * GROUPS, masses + query * BLOCKS, VOCAB, SPAN, BLOCK, GROUP,
        )  # fmt: skip
    part += query * tl.num_programs(1)
    tl.store(values + part, top)
    tl.store(best_indices + part, first)


@triton.jit
def pick(scores, columns, logit_row, threshold, last, size, BLOCK: tl.constexpr):
    """Return the index of the best score, noise included, that passed the filters.

    scores: `size` scores. columns: index of each in the logit row, or None. A score passes if its
    key is above threshold, or equals it up to index `last`.
    """
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_column = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, size, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        live = index < size
        column = index
        if columns is not None:
            column = tl.load(columns + index, mask=live, other=0)
        x = tl.load(scores + index, mask=live, other=float("-inf"))
        key = key_of(x)
        noise = noise_at(logit_row, column, live)
        passes = live & ((key > threshold) | ((key == threshold) & (index <= last)))
        x = tl.where(passes, x + noise, float("-inf"))
        best, best_column = better_of(x, column, best, best_column)
    return best_of(best, best_column)[1]


@triton.jit
def best_of_parts(
    logits, values, best_indices, use, VOCAB: tl.constexpr, PARTS: tl.constexpr,
    PART_LANES: tl.constexpr, GRAIN: tl.constexpr,
):  # fmt: skip
    """Return the best score of a row's parts and its index."""
    lanes = tl.arange(0, PART_LANES)
    value = tl.load(values + lanes, mask=lanes < PARTS, other=float("-inf"))
    index = tl.load(best_indices + lanes, mask=lanes < PARTS, other=HIGHEST)
    top, chosen = best_of(value, index)
    if use == 0:  # the index is that of the first of GRAIN logits
        column = chosen + tl.arange(0, GRAIN)
        x = tl.load(logits + column, mask=column < VOCAB, other=float("-inf"))
        first = tl.min(tl.where(x.to(tl.float32) == top, column, HIGHEST), 0)
        chosen = tl.where(first < VOCAB, first, chosen)
    return top, chosen


@triton.jit
def best_candidate(
    logit_row, tile, columns, masses, peak, top, floor, bound,
    VOCAB: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_LANES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return the index of the best token that passes the filters; UNDECIDED if not in the tile."""
    complete, threshold, last = filter_candidates(
        logit_row, tile, peak, masses, top, floor, bound, VOCAB, BLOCKS, BLOCK_LANES, SIZE
    )
    chosen = tl.full((), UNDECIDED, tl.int32)
    if complete:
        chosen = pick(tile, columns, logit_row, threshold, last, SIZE, SIZE)
    return chosen


@triton.jit
def store_token(batch, out, query, chosen):
    """Store the token of the index `chosen`. A negative result is stored as it is."""
    if batch.kept is not None:
        chosen = tl.where(chosen < 0, chosen, tl.load(batch.kept + tl.maximum(chosen, 0)))
    tl.store(out + query, chosen.to(tl.int64))


@triton.jit
def _best_filtered(
    logit_row, peaks, masses, groups, tile, columns,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_LANES: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gather the tile and return its best token: see best_candidate."""
    peak, top, floor, bound = gather_tile(
        logit_row, peaks, groups, tile, columns, VOCAB, GROUPS, LANES, GROUP, TILE
    )
    return best_candidate(
        logit_row, tile, columns, masses, peak, top, floor, bound,
        VOCAB, BLOCKS, BLOCK_LANES, TILE * GROUP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["queries", "length", "tokens"])
def choose_kernel(
    batch, state, peaks, masses, values, best_indices, groups, tile, columns, out,
    queries, length, tokens,
    VOCAB: tl.constexpr, STOPS: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
    WORD_LANES: tl.constexpr, PARTS: tl.constexpr, PART_LANES: tl.constexpr, GRAIN: tl.constexpr,
    GROUPS: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_LANES: tl.constexpr,
    GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Choose the token of one logit row.

    Without filters it is the best of the row's parts. With filters it is the best in the tile, or
    UNDECIDED if the tile does not hold all tokens that pass. NONE if the largest score is not
    finite.
    """
    pdl_start()
    query = tl.program_id(0).to(tl.int64)
    row = tl.load(batch.row_ids + query // queries)
    use = integer_of(state, row, FLAGS)
    top, chosen = best_of_parts(
        batch.logits + query * VOCAB, values + query * PARTS, best_indices + query * PARTS, use,
        VOCAB, PARTS, PART_LANES, GRAIN,
    )  # fmt: skip
    sound = (top > float("-inf")) & (top < float("inf"))
    if filters(use) & sound:
        SIZE: tl.constexpr = TILE * GROUP
        chosen = _best_filtered(
            LogitRow(
                batch, state, query, row, use, queries, length, tokens, VOCAB, STOPS, W, L,
                WORD_LANES, 0,
            ),
            peaks + query * GROUPS, masses + query * BLOCKS, groups + query * TILE,
            tile + query * SIZE, columns + query * SIZE, VOCAB, GROUPS, LANES, BLOCKS, BLOCK_LANES,
            GROUP, TILE,
        )  # fmt: skip
    store_token(batch, out, query, tl.where(sound, chosen, NONE))


@triton.jit
def _best_of_logit_row(logit_row, scores, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the index of the best token that passes the filters, from all scores."""
    SPAN: tl.constexpr = BLOCK // 2  # masks take registers that a filter uses for scores
    best = tl.full((SPAN,), float("-inf"), tl.float32)
    tl.debug_barrier()  # the previous logit row may still read this memory
    for begin in range(0, VOCAB, SPAN):
        column = begin + tl.arange(0, SPAN)
        x = scores_at(logit_row, column, column < VOCAB)
        tl.store(scores + column, x, mask=column < VOCAB)
        best = tl.maximum(best, x)
    tl.debug_barrier()  # every thread reads scores that others have written
    threshold, last = filter_logit_row(scores, tl.max(best, 0), logit_row, VOCAB, BLOCK)
    return pick(scores, None, logit_row, threshold, last, VOCAB, BLOCK)


@triton.jit(do_not_specialize=["logit_rows", "queries", "length", "tokens"])
def whole_kernel(
    batch, state, scores, out, logit_rows, queries, length, tokens,
    VOCAB: tl.constexpr, STOPS: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
    WORD_LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the tokens of UNDECIDED logit rows. Each CTA reuses a buffer of scores."""
    pdl_start()
    cta = tl.program_id(0).to(tl.int64)
    for begin in range(0, logit_rows, tl.num_programs(0)):
        query = begin + cta
        if tl.load(out + query, mask=query < logit_rows, other=NONE) == UNDECIDED:
            row = tl.load(batch.row_ids + query // queries)
            chosen = _best_of_logit_row(
                LogitRow(
                    batch, state, query, row, integer_of(state, row, FLAGS), queries, length,
                    tokens, VOCAB, STOPS, W, L, WORD_LANES, 0,
                ),
                scores + cta * VOCAB, VOCAB, BLOCK,
            )  # fmt: skip
            if batch.kept is not None:
                chosen = tl.load(batch.kept + chosen)
            tl.store(out + query, chosen.to(tl.int64))
