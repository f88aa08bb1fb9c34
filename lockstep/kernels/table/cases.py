"""Random tables and steps of the table's ops for every backend. What no one may read is garbage."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.table import Lines

GARBAGE = 1 << 30
PAGE_SIZE = 4
SIZES = ((1, 1, 60), (5, 4, 2100), (3, 8, 60), (11, 2, 300))
"""(rows of the step, query length, tokens that a line holds)."""


class Draw:
    """Numbers from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """From low to high - 1."""
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def order(self, n: int) -> Tensor:
        """0 .. n - 1 in any order."""
        return torch.randperm(n, generator=self.generator)


def lines(draw: Draw, rows: int, drafts: int, length: int, vocab: int) -> Lines:
    """A table of `rows` rows and the null row; tokens that are not known yet are garbage."""
    room = length - 3 * (drafts + 1)
    computed = draw.ints(0, room, rows + 1)
    tokens = draw.ints(0, vocab, rows + 1, length, dtype=torch.int64)
    tokens[torch.arange(length) > computed[:, None]] = GARBAGE
    found = Lines(
        tokens=tokens,
        prompt_len=draw.ints(1, room, rows + 1),
        computed=computed,
        pending=draw.ints(0, 12, rows + 1),
        drafts=draw.ints(-1, vocab, rows + 1, drafts, dtype=torch.int64),
        page_table=draw.ints(1, 1000, rows + 1, -(-length // PAGE_SIZE)),
        state_slots=draw.ints(1, 99, rows + 1),
    )
    for tensor in (found.prompt_len, found.computed, found.pending, found.state_slots):
        tensor[0] = 0
    found.page_table[0], found.tokens[0, 0] = 0, 0
    return found


def row_ids(draw: Draw, rows: int, table: int) -> Tensor:
    """Rows of the table in any order; from the third row on, the last fifth is null."""
    chosen = draw.order(table)[:rows] + 1
    chosen[max(rows - rows // 5 - (rows > 2), 1) :] = 0
    return chosen


def prepare_step_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of prepare_step on the CPU): generated steps, and chunks of prompts."""
    for rows, query_len, length in SIZES:
        draw = Draw(rows)
        table = lines(draw, rows + 2, 7, length, 50)
        chosen = row_ids(draw, rows, rows + 2)
        common = dict(lines=table, row_ids=chosen, page_size=PAGE_SIZE)
        sources = draw.ints(0, 2, rows) * draw.ints(1, 99, rows)
        sizes = dict(tokens=rows * query_len, query_len=query_len)
        name = f"{rows}x{query_len}"
        yield name, dict(common, query_lens=None, state_src=torch.zeros_like(sources), **sizes)
        chunks = draw.ints(1, 3 * query_len, rows)
        if length > 1000:
            chunks[0], table.computed[chosen[0]] = 600, 900
        sizes = dict(tokens=int(chunks.sum()), query_len=int(chunks.max()))
        yield f"prompts, {name}", dict(common, query_lens=chunks, state_src=sources, **sizes)
    null = dict(common, row_ids=torch.zeros(1, dtype=torch.int64), state_src=sources[:1] * 0)
    yield "tokens of nobody", dict(null, query_lens=sources[:1] * 0, tokens=9, query_len=9)


def advance(
    rows: int, width: int, length: int, prompt: bool, vocab: int = 9, seed: int = 0
) -> dict[str, Any]:
    """Arguments of advance_rows: few token ids, so that tokens repeat and drafts agree."""
    draw = Draw(seed + rows)
    table = lines(draw, rows + 2, 7, length, vocab)
    chosen = row_ids(draw, rows, rows + 2)
    tokens = draw.ints(0, vocab, rows, width, dtype=torch.int64)
    drafts = tokens[:, :-1].clone()
    wrong = draw.ints(0, 3, *drafts.shape) == 0
    drafts[wrong] = draw.ints(-1, vocab, *drafts.shape, dtype=torch.int64)[wrong]
    tokens[draw.ints(0, 8, *tokens.shape) == 0] = -1
    starts = table.computed[chosen]
    counts = draw.ints(0, 5, rows + 3, vocab)
    counts[0] = 0
    return dict(
        lines=table,
        counts=counts,
        row_ids=chosen,
        tokens=tokens,
        drafts=drafts,
        seq_lens=starts + (draw.ints(1, 2 * width + 1, rows) if prompt else width),
        held=table.pending[chosen].long(),
        flush=8,
        prompt=prompt,
    )


def advance_rows_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of advance_rows on the CPU)."""
    for rows, width, length in SIZES:
        yield f"{rows}x{width}", advance(rows, width, length, prompt=False)
        yield f"prompts, {rows}", advance(rows, 1, length, prompt=True)


def follow_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of follow on the CPU), out of steps that are prepared and committed."""
    for name, step in prepare_step_cases(dtype):
        table, chosen = step["lines"], step["row_ids"]
        counts = step["query_lens"]
        window = step["query_len"] if counts is None else 1
        counts = torch.full_like(chosen, window) if counts is None else counts.long()
        bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        owners = torch.arange(len(chosen)).repeat_interleave(counts)
        padding = step["tokens"] - len(owners)
        owners = torch.cat([owners, torch.full((padding,), len(chosen) - 1)])
        first = table.computed[chosen] - bounds[:-1]
        arguments = dict(
            history=table.tokens,
            row_ids=chosen,
            token_rows=owners,
            positions=first[owners] + torch.arange(step["tokens"]),
            cu_seqlens=bounds.int(),
            accepted=Draw(window).ints(0, window, len(chosen)),
            window=window,
        )
        yield name, arguments


def draft_step_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of draft_step on the CPU): every draft of a few, whole blocks of rows."""
    for rows, index in ((1, 0), (5, 1), (11, 2), (64, 0), (65, 2)):
        draw = Draw(rows)
        table, chosen = lines(draw, rows + 2, 3, 60, 50), row_ids(draw, rows, rows + 2)
        arguments = dict(
            computed=table.computed,
            drafts=table.drafts,
            row_ids=chosen,
            tokens=torch.where(chosen > 0, draw.ints(-1, 50, rows).long(), 7),
            page_table=table.page_table[chosen],
            index=index,
            page_size=PAGE_SIZE,
        )
        yield f"draft {index} of {rows}", arguments


def lookup_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of lookup on the CPU): histories of few tokens, matches near and far."""
    for rows, drafts, count, length, vocab, least, most in (
        (5, 3, 3, 60, 3, 2, 4),
        (3, 7, 5, 60, 2, 1, 5),
        (4, 2, 2, 5000, 9, 3, 6),
        (6, 1, 1, 60, 400, 1, 1),
        (5, 3, 0, 60, 3, 1, 4),
    ):
        draw = Draw(length + vocab)
        table = lines(draw, rows + 2, drafts, length, vocab)
        chosen = row_ids(draw, rows, rows + 2)
        if length > 1000:  # the first row's only match lies in another block than its end
            row = table.tokens[chosen[0]]
            row[:4600], table.computed[chosen[0]] = torch.arange(100, 4700), 4600
            row[20:26] = row[4595:4601] = torch.arange(80, 86)
        arguments = dict(
            history=table.tokens,
            computed=table.computed,
            drafts=table.drafts[:, :count],
            row_ids=chosen,
            least=least,
            most=most,
        )
        yield f"{count} behind {least} to {most} of {vocab} in {length}", arguments
