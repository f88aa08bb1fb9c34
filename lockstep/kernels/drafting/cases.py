"""Test cases of the drafters' ops. Entries that nothing may read are garbage."""

from collections.abc import Iterator
from typing import Any

import torch

from lockstep.kernels.step_metadata.cases import (
    PAGE_SIZE,
    RandomSource,
    prepare_step_cases,
    random_table,
    row_ids,
)


def mtp_inputs_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments on the CPU) of mtp_inputs, from prepared and committed steps."""
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
            accepted=RandomSource(window).ints(0, window, len(chosen)),
            window=window,
        )
        yield name, arguments


def next_draft_step_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments on the CPU) of next_draft_step, up to more than one block of rows."""
    for rows, index in ((1, 0), (5, 1), (11, 2), (64, 0), (65, 2)):
        source = RandomSource(rows)
        table = random_table(source, rows + 2, 3, 60, 50)
        chosen = row_ids(source, rows, rows + 2)
        arguments = dict(
            computed=table.computed,
            folded=table.folded,
            drafts=table.drafts,
            row_ids=chosen,
            tokens=torch.where(chosen > 0, source.ints(-1, 50, rows).long(), 7),
            page_table=table.page_table[chosen],
            index=index,
            page_size=PAGE_SIZE,
        )
        for shift in (0, 1):
            yield f"draft {index} of {rows}, shift {shift}", arguments | dict(shift=shift)


def block_step_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments on the CPU) of block_step, 1 to 15 drafts per block."""
    for rows, width in ((1, 2), (1, 16), (5, 4), (11, 8), (16, 4), (65, 16)):
        source = RandomSource(rows + width)
        table = random_table(source, rows + 2, width - 1, 60, 50)
        chosen = row_ids(source, rows, rows + 2)
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
    """Yield (name, arguments on the CPU) of ngram_lookup: matches near and far."""
    for rows, drafts, count, length, vocab, min_n, max_n in (
        (5, 3, 3, 60, 3, 2, 4),
        (3, 7, 5, 60, 2, 1, 5),
        (4, 2, 2, 5000, 9, 3, 6),
        (6, 1, 1, 60, 400, 1, 1),
        (5, 3, 0, 60, 3, 1, 4),
        (6, 2, 2, 60, 400, 0, 1),
    ):
        source = RandomSource(length + vocab)
        table = random_table(source, rows + 2, drafts, length, vocab)
        chosen = row_ids(source, rows, rows + 2)
        if length > 1000:  # the first row's only match is not in the block of its end
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
            min_n=min_n,
            max_n=max_n,
        )
        name = f"{count} after {min_n} to {max_n} of {vocab} in {length}"
        for num_texts, oldest in ((0, 0), (1, 0), (50, 0), (70, 33), (3000, 2999)):
            oldest_index = torch.tensor([oldest])
            texts = dict(
                texts=circular_texts(source, num_texts, vocab, oldest), oldest=oldest_index
            )
            yield f"{name}, {num_texts} texts from {oldest} on", arguments | texts


def circular_texts(source: RandomSource, num_texts: int, vocab: int, oldest: int) -> torch.Tensor:
    """Return a circular buffer of short texts; the newest ends just before the oldest token."""
    texts = source.ints(0, vocab, num_texts, dtype=torch.int64)
    texts[source.ints(0, 9, num_texts) == 0] = -1
    texts[oldest - 1 : oldest or None] = -1
    return texts


def prediction_lookup_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments on the CPU) of prediction_lookup: texts that answers follow, leave and
    meet again, short answers, empty texts, and rows inside of their prompts.
    """
    for rows, drafts, count, length, vocab, min_n, max_n in (
        (5, 3, 3, 60, 3, 2, 4),
        (11, 7, 5, 60, 2, 1, 9),
        (4, 2, 2, 5000, 9, 3, 6),
        (6, 1, 1, 60, 400, 2, 16),
        (5, 3, 0, 60, 3, 1, 4),
    ):
        source = RandomSource(length + vocab + 1)
        table = random_table(source, rows + 2, drafts, length, vocab)
        chosen = row_ids(source, rows, rows + 2)
        num_rows = len(table.computed)
        texts = source.ints(0, vocab, num_rows, length - 8, dtype=torch.int64)
        text_lens = source.ints(0, length - 7, num_rows)
        prompt_len = torch.zeros_like(table.computed)
        for row in range(1, num_rows):
            known = int(table.computed[row]) + 1
            # Answers of every length up to the known tokens, of no token, and of one.
            answer_len = (known, 0, 1, 2, known // 2, known // 3, known - 1)[row % 7]
            prompt_len[row] = known - min(answer_len, known) + 2 * (answer_len == 0)
            copied = min(answer_len, length - 8)
            if row % 2 and copied:
                texts[row, :copied] = table.tokens[row, known - answer_len :][:copied]
                text_lens[row] = max(int(text_lens[row]), min(copied + 2, length - 8))
            if row % 3 == 0 and copied > 6:  # the answer left the text, and met it again
                texts[row, copied // 2] = (texts[row, copied // 2] + 1) % vocab
        text_lens[0] = 0
        yield (
            f"{count} after {min_n} to {max_n} of {vocab} in {length}",
            dict(
                history=table.tokens,
                computed=table.computed,
                prompt_len=prompt_len,
                texts=texts,
                text_lens=text_lens,
                drafts=table.drafts[:, :count],
                row_ids=chosen,
                min_n=min_n,
                max_n=max_n,
            ),
        )
