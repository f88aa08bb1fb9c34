"""Steps and rows of the drafters' ops for every backend. What no one may read is garbage."""

from collections.abc import Iterator
from typing import Any

import torch

from lockstep.kernels.step_metadata.cases import (
    PAGE_SIZE,
    Draw,
    prepare_step_cases,
    random_table,
    row_ids,
)


def mtp_inputs_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of mtp_inputs on the CPU), out of steps that are prepared and committed."""
    for name, step in prepare_step_cases(dtype):
        table = step["table"]
        chosen = step["row_ids"]
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


def next_draft_step_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of next_draft_step on the CPU): drafts of a few, whole blocks of rows."""
    for rows, index in ((1, 0), (5, 1), (11, 2), (64, 0), (65, 2)):
        draw = Draw(rows)
        table = random_table(draw, rows + 2, 3, 60, 50)
        chosen = row_ids(draw, rows, rows + 2)
        arguments = dict(
            computed=table.computed,
            folded=table.folded,
            drafts=table.drafts,
            row_ids=chosen,
            tokens=torch.where(chosen > 0, draw.ints(-1, 50, rows).long(), 7),
            page_table=table.page_table[chosen],
            index=index,
            page_size=PAGE_SIZE,
        )
        for behind in (0, 1):
            yield f"draft {index} of {rows}, {behind} behind", arguments | dict(behind=behind)


def block_step_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of block_step on the CPU): blocks of a draft up to 15, whole blocks of
    tokens."""
    for rows, width in ((1, 2), (1, 16), (5, 4), (11, 8), (16, 4), (65, 16)):
        draw = Draw(rows + width)
        table = random_table(draw, rows + 2, width - 1, 60, 50)
        chosen = row_ids(draw, rows, rows + 2)
        yield (
            f"{rows} blocks of {width}",
            dict(
                computed=table.computed,
                history=table.tokens,
                row_ids=chosen,
                page_table=table.page_table[chosen],
                width=width,
                mask=49,
                page_size=PAGE_SIZE,
            ),
        )


def ngram_lookup_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of ngram_lookup on the CPU): rows of few tokens, matches near and far."""
    for rows, drafts, count, length, vocab, least, most in (
        (5, 3, 3, 60, 3, 2, 4),
        (3, 7, 5, 60, 2, 1, 5),
        (4, 2, 2, 5000, 9, 3, 6),
        (6, 1, 1, 60, 400, 1, 1),
        (5, 3, 0, 60, 3, 1, 4),
    ):
        draw = Draw(length + vocab)
        table = random_table(draw, rows + 2, drafts, length, vocab)
        chosen = row_ids(draw, rows, rows + 2)
        if length > 1000:  # the first row's only match lies in another block than its end
            row = table.tokens[chosen[0]]
            row[:4600] = torch.arange(100, 4700)
            table.computed[chosen[0]] = 4600
            row[20:26] = torch.arange(80, 86)
            row[4595:4601] = row[20:26]
        arguments = dict(
            history=table.tokens,
            computed=table.computed,
            drafts=table.drafts[:, :count],
            row_ids=chosen,
            least=least,
            most=most,
        )
        name = f"{count} behind {least} to {most} of {vocab} in {length}"
        for room, oldest in ((0, 0), (1, 0), (50, 0), (70, 33), (3000, 2999)):
            place = torch.tensor([oldest])
            ring = dict(texts=ring_of_texts(draw, room, vocab, oldest), oldest=place)
            yield f"{name}, a ring of {room} from {oldest} on", arguments | ring


def ring_of_texts(draw: Draw, room: int, vocab: int, oldest: int) -> torch.Tensor:
    """A ring full of short texts, the newest of which ends in front of the oldest token."""
    texts = draw.ints(0, vocab, room, dtype=torch.int64)
    texts[draw.ints(0, 9, room) == 0] = -1
    texts[oldest - 1 : oldest or None] = -1
    return texts
