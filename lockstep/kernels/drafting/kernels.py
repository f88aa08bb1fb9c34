# mypy: ignore-errors
"""The drafters' ops in Triton: a program per row or per block of rows, one launch each.
ngram_lookup has two, the first with a program per block of a text.

A row of the table is written by one program, but for row 0, where all that programs write is the
same. Nothing is added atomically, and no argument but the drafts and the blocks of text of
ngram_lookup is specialised.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.paging import slot_at


@triton.jit(do_not_specialize=["rows", "tokens", "length", "window"])
def mtp_inputs_kernel(
    history, row_ids, token_rows, positions, cu_seqlens, accepted, after, last, sample_at,
    rows, tokens, length, window, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens, and as many rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < tokens
    row = tl.load(row_ids + tl.load(token_rows + at, mask=live, other=0))
    where = tl.minimum(tl.load(positions + at, mask=live, other=0) + 1, length - 1)
    tl.store(after + at, tl.load(history + row * length + where), mask=live)
    live = at < rows
    end = tl.load(cu_seqlens + at + 1, mask=live, other=1)
    place = tl.maximum(end - window + tl.load(accepted + at, mask=live, other=0), 0)
    tl.store(last + at, place.to(tl.int64), mask=live)
    tl.store(sample_at + at, tl.load(positions + place, mask=live, other=0) + 2, mask=live)


@triton.jit(do_not_specialize=["rows", "most_drafts", "index", "behind", "columns", "page_size"])
def next_draft_step_kernel(
    computed, folded, drafts, row_ids, tokens, page_table, token_ids, positions, slot_mapping,
    starts, held, seq_lens, cu_seqlens, token_rows, sample_at, rows, most_drafts, index, behind,
    columns, page_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK rows: keep a draft each, and stand on it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < rows
    row = tl.load(row_ids + at, mask=live, other=0)
    draft = tl.load(tokens + at, mask=live, other=0)
    tl.store(drafts + row * most_drafts + index, draft, mask=live)
    tl.store(token_ids + at, tl.maximum(draft, 0), mask=live)
    start = tl.load(computed + row) + index + behind
    pages = page_table + tl.where(live, at, 0).to(tl.int64) * columns
    tl.store(slot_mapping + at, slot_at(pages, start, columns, page_size), mask=live)
    tl.store(positions + at, start.to(tl.int64), mask=live)
    tl.store(sample_at + at, start.to(tl.int64) + 2 - behind, mask=live)
    tl.store(starts + at, start, mask=live)
    tl.store(held + at, tl.load(folded + row), mask=live)
    tl.store(seq_lens + at, start + 1, mask=live)
    tl.store(token_rows + at, at.to(tl.int64), mask=live)
    tl.store(cu_seqlens + at, at, mask=at <= rows)


@triton.jit(
    do_not_specialize=["rows", "length", "width", "mask_token", "columns", "page_size"],
)
def block_step_kernel(
    computed, history, row_ids, page_table, token_ids, positions, slot_mapping, starts, seq_lens,
    cu_seqlens, token_rows, sample_at, rows, length, width, mask_token, columns, page_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of the rows' blocks."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tokens = rows * width
    live = at < tokens
    s = tl.where(live, at // width, 0)
    order = at % width
    row = tl.load(row_ids + s, mask=live, other=0)
    first = tl.load(computed + row)
    position = first + order
    known = tl.load(history + row * length + first)
    tl.store(token_ids + at, tl.where(order == 0, known, mask_token), mask=live)
    tl.store(positions + at, position.to(tl.int64), mask=live)
    pages = page_table + s.to(tl.int64) * columns
    tl.store(slot_mapping + at, slot_at(pages, position, columns, page_size), mask=live)
    tl.store(token_rows + at, s.to(tl.int64), mask=live)
    ahead = live & (order == 0)
    tl.store(starts + s, first + width - 1, mask=ahead)
    tl.store(seq_lens + s, first + width, mask=ahead)
    tl.store(cu_seqlens + at, at, mask=at <= rows)
    drafted = live & (order > 0)
    tl.store(sample_at + s * (width - 1) + order - 1, position.to(tl.int64), mask=drafted)


@triton.jit
def _longest_match(
    text, origin, size, first, ends, history, known, shift, least, most, BLOCK: tl.constexpr
):  # fmt: skip
    """Over BLOCK places from `first` on of a ring `text` of `size` tokens that begins at origin,
    the best of those below `ends` at which what ends history[:known] has stood:
    (n << 32 | shift + place), 0 for none."""
    behind = first + tl.arange(0, BLOCK)
    alike = (behind > 0) & (behind < ends)
    n = tl.zeros((BLOCK,), tl.int32)
    at = (origin + behind) % size
    back = 1
    going = tl.where(first < ends, most, 0)
    while going > 0:
        inside = alike & (behind >= back)
        place = at - back + tl.where(at < back, size, 0)
        token = tl.load(text + place, mask=inside, other=-1)
        alike = inside & (token == tl.load(history + known - back))
        n += alike.to(tl.int32)
        back += 1
        more = (back <= most) & (back <= known)
        going = tl.max(alike.to(tl.int32), 0) * more.to(tl.int32)
    found = (n.to(tl.int64) << 32) | (behind + shift).to(tl.int64)
    return tl.max(tl.where(n >= least, found, 0), 0)


@triton.jit(do_not_specialize=["length", "room", "least", "most"])
def match_kernel(
    history, computed, texts, oldest, row_ids, matches, length, room, least, most,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK places of one row's history, or, behind the blocks of it, of the ring: the best match
    there. The longest n-gram wins, then the row's own history, then the latest; all in one number,
    n above the place in [ring, history]."""
    row = tl.load(row_ids + tl.program_id(0))
    block = tl.program_id(1)
    known = tl.load(computed + row) + 1
    history += row * length
    least = tl.maximum(least, 1)
    own = tl.cdiv(length, BLOCK)
    if block < own:
        found = _longest_match(
            history, 0, length, block * BLOCK, known, history, known, room, least, most, BLOCK
        )
    else:
        origin = tl.load(oldest).to(tl.int32)
        ends = tl.where(row > 0, room, 0)
        first = (block - own) * BLOCK
        found = _longest_match(
            texts, origin, room, first, ends, history, known, 0, least, most, BLOCK
        )
    tl.store(matches + tl.program_id(0) * tl.num_programs(1) + block, found)


@triton.jit(do_not_specialize=["length", "room", "stride", "count", "blocks"])
def follow_kernel(
    history, computed, texts, oldest, drafts, row_ids, matches, length, room, stride, count, blocks,
    BLOCKS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One row: the tokens behind the best of its matches."""
    row = tl.load(row_ids + tl.program_id(0))
    known = tl.load(computed + row) + 1
    history += row * length
    origin = tl.load(oldest).to(tl.int32)
    size = tl.maximum(room, 1)
    lane = tl.arange(0, BLOCKS)
    found = tl.load(matches + tl.program_id(0) * blocks + lane, mask=lane < blocks, other=0)
    place = (tl.max(found, 0) & 0x7FFFFFFF).to(tl.int32)
    lane = tl.arange(0, LANES)
    mine = place > room
    real = mine & (place - room + lane < known)
    ahead = tl.load(history + place - room + lane, mask=real, other=-1)
    real = (place > 0) & (place + lane < room)
    told = tl.load(texts + (origin + place + lane) % size, mask=real, other=-1)
    ahead = tl.where(mine, ahead, told)
    end = tl.min(tl.where(ahead < 0, lane, LANES), 0)
    tl.store(drafts + row * stride + lane, tl.where(lane < end, ahead, -1), mask=lane < count)
