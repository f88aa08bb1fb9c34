"""Test cases of prepare_step and advance_rows: random tables and steps.

Entries that nothing may read are GARBAGE.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.step_metadata import RowTensors

GARBAGE = 1 << 30
PAGE_SIZE = 4
MAX_DRAFTS = 15
"""Draft columns of a table."""
FORCED_WINDOW = 16
"""Tokens of a window of forced tokens."""
SIZES = ((1, 1, 60), (5, 4, 2100), (3, 8, 60), (11, 2, 300), (2, 16, 60))
"""(rows of the step, query length, tokens per row of the table)."""


class RandomSource:
    """Random integers from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return random integers from low to high - 1."""
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def permutation(self, n: int) -> Tensor:
        """Return a random permutation of 0 .. n - 1."""
        return torch.randperm(n, generator=self.generator)


def random_table(
    source: RandomSource, rows: int, drafts: int, length: int, vocab: int
) -> RowTensors:
    """Return a table of `rows` rows and the null row. Unknown tokens are GARBAGE."""
    max_computed = length - 3 * (drafts + 1)
    computed = source.ints(0, max_computed, rows + 1)
    tokens = source.ints(0, vocab, rows + 1, length, dtype=torch.int64)
    tokens[torch.arange(length) > computed[:, None]] = GARBAGE
    table = RowTensors(
        tokens=tokens,
        prompt_len=source.ints(1, max_computed, rows + 1),
        forced_end=torch.zeros(rows + 1, dtype=torch.int32),
        computed=computed,
        folded=(computed - source.ints(0, 30, rows + 1)).clamp_min(0),
        drafts=source.ints(-1, vocab, rows + 1, drafts, dtype=torch.int64),
        draft_limit=source.ints(0, drafts + 1, rows + 1),
        page_table=source.ints(1, 1000, rows + 1, -(-length // PAGE_SIZE)),
        state_slots=source.ints(1, 99, rows + 1),
    )
    for tensor in (table.prompt_len, table.computed, table.folded, table.state_slots):
        tensor[0] = 0
    table.page_table[0] = 0
    table.tokens[0, 0] = 0
    return table


def force(table: RowTensors, source: RandomSource, row: int, count: int, vocab: int) -> None:
    """Give a row `count` forced tokens after its last one."""
    start = int(table.computed[row]) + 1
    table.tokens[row, start : start + count] = source.ints(0, vocab, count, dtype=torch.int64)
    table.forced_end[row] = start + count
    table.prompt_len[row].clamp_(max=start - 1)  # forced tokens follow the prompt


def row_ids(source: RandomSource, rows: int, table: int) -> Tensor:
    """Return random rows of the table; with three rows or more, the last fifth are null."""
    chosen = source.permutation(table)[:rows] + 1
    chosen[max(rows - rows // 5 - (rows > 2), 1) :] = 0
    return chosen


def prepare_step_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments on the CPU) of prepare_step: generated steps and prompt chunks."""
    for rows, query_len, length in SIZES:
        source = RandomSource(rows)
        table = random_table(source, rows + 2, MAX_DRAFTS, length, 50)
        chosen = row_ids(source, rows, rows + 2)
        common = dict(table=table, row_ids=chosen, page_size=PAGE_SIZE)
        sources = source.ints(0, 2, rows) * source.ints(1, 99, rows)
        sizes = dict(tokens=rows * query_len, query_len=query_len)
        name = f"{rows}x{query_len}"
        own_slots = torch.zeros_like(sources)
        yield name, dict(common, query_lens=None, state_src=own_slots, **sizes)
        # Windows of forced tokens that are padded, full, longer than the window, or empty.
        window = FORCED_WINDOW
        forced = random_table(source, rows + 2, MAX_DRAFTS, length + 4 * window, 50)
        counts = [5, window - 1, 3 * window, 0, 1]
        for index, row in enumerate(chosen[chosen > 0].tolist()):
            force(forced, source, row, counts[index % len(counts)], 50)
        sizes = dict(tokens=rows * window, query_len=window)
        arguments = dict(common, table=forced, query_lens=None, state_src=own_slots, **sizes)
        yield f"forced, {name}", arguments
        chunks = source.ints(1, 3 * query_len, rows)
        if length > 1000:
            chunks[0] = 600
            table.computed[chosen[0]] = 900
        sizes = dict(tokens=int(chunks.sum()), query_len=int(chunks.max()))
        yield f"prompts, {name}", dict(common, query_lens=chunks, state_src=sources, **sizes)
    null = dict(common, row_ids=torch.zeros(1, dtype=torch.int64), state_src=sources[:1] * 0)
    yield "padding only", dict(null, query_lens=sources[:1] * 0, tokens=9, query_len=9)


def advance(
    rows: int,
    width: int,
    length: int,
    prompt: bool,
    vocab: int = 9,
    seed: int = 0,
    state_grid: int = 1,
    forced: bool = False,
) -> dict[str, Any]:
    """Return arguments of advance_rows. A small vocabulary makes tokens repeat and drafts match.

    Every third row has forced tokens, up to several windows. forced: the others have one or none,
    and no drafts.
    """
    source = RandomSource(seed + rows)
    table = random_table(source, rows + 2, MAX_DRAFTS, length, vocab)
    chosen = row_ids(source, rows, rows + 2)
    tokens = source.ints(0, vocab, rows, width, dtype=torch.int64)
    drafts = tokens[:, :-1].clone()
    wrong = source.ints(0, 3, *drafts.shape) == 0
    drafts[wrong] = source.ints(-1, vocab, *drafts.shape, dtype=torch.int64)[wrong]
    tokens[source.ints(0, 8, *tokens.shape) == 0] = -1
    starts = table.computed[chosen]
    seq_lens = starts + (source.ints(1, 2 * width + 1, rows) if prompt else width)
    if forced:
        drafts[:] = -1
    for index, row in enumerate(chosen.tolist()):
        if row == 0 or (index % 3 and not forced):
            continue
        count = int(source.ints(0, 3 * width if index % 3 == 0 else 2, 1))
        force(table, source, row, count, vocab)
        # As prepare_step: forced tokens are the drafts of the window.
        first = int(starts[index]) + 1
        shown = min(count, width - 1)
        if shown:
            drafts[index] = -1
            drafts[index, :shown] = table.tokens[row, first : first + shown]
        if prompt:
            table.forced_end[row] = int(seq_lens[index]) + count
            table.tokens[row, int(seq_lens[index])] = 1
    counts = source.ints(0, 5, rows + 3, vocab)
    counts[0] = 0
    return dict(
        table=table,
        counts=counts,
        row_ids=chosen,
        tokens=tokens,
        drafts=drafts,
        seq_lens=seq_lens,
        flush=8,
        state_grid=state_grid,
        prompt=prompt,
        forced=forced,
    )


def advance_rows_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments on the CPU) of advance_rows."""
    for rows, width, length in SIZES:
        for grid in (1, 16):
            arguments = advance(rows, width, length, prompt=False, state_grid=grid)
            yield f"{rows}x{width}, grid {grid}", arguments
            window = FORCED_WINDOW
            arguments = advance(
                rows, window, length + 5 * window, False, state_grid=grid, forced=True
            )
            yield f"forced, {rows}, grid {grid}", arguments
        yield f"prompts, {rows}", advance(rows, 1, length, prompt=True)
