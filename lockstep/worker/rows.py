"""Writes of the host to the row table: admission, preemption and resumption of rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels import sampling as s
from lockstep.kernels.stream_copies import copy_to_device, copy_to_host
from lockstep.scheduling.schedule import RowSpec
from lockstep.worker.row_table import RowTable
from lockstep.worker.transfers import Transfers

MAX_BIAS = 1e30
"""Bound of a logit bias: larger ones change nothing, and fp32 sums stay finite."""
FURTHEST = 2**31 - 1
"""Position after the end of every row."""


@dataclass
class HostRow:
    """Preempted row in host memory: tensors of the table, pages and state."""

    table: list[Tensor]
    pages: list[list[Tensor]]
    state: list[list[Tensor]]


def write_row(table: RowTable, row: int, spec: RowSpec, start: int) -> None:
    """Write the row of a request whose first `start` tokens are cached."""
    prompt = torch.tensor(spec.prompt_token_ids, dtype=torch.int64)
    forced = torch.tensor(spec.params.forced_token_ids or (), dtype=torch.int64)
    known = torch.cat([prompt, forced])
    copy_to_device(known, table.tokens[row, : len(known)])
    copy_to_device(len(prompt), table.prompt_len[row])
    copy_to_device(len(known), table.forced_end[row])
    copy_to_device(start, table.computed[row])
    copy_to_device(start, table.folded[row])
    copy_to_device(-1, table.drafts[row])  # drafts of the row's previous request
    max_drafts = table.drafts.shape[1] if spec.speculate else 0
    copy_to_device(max_drafts, table.draft_limit[row])
    table.adapters.write(row, spec.adapter)
    predicted = spec.params.prediction or ()
    assert not isinstance(predicted, str)
    table.predictions.write(row, predicted)
    write_sampling(table.sampling, row, spec, prompt)


def write_pages_and_slot(table: RowTable, row: int, pages: list[int], slot: int) -> None:
    """Write the page table and the state slot of a row."""
    # Columns past the granted pages point to the null page.
    copy_to_device(0, table.page_table[row])
    write_pages(table, row, 0, pages)
    copy_to_device(slot, table.state_slots[row])


def write_pages(table: RowTable, row: int, column: int, pages: list[int]) -> None:
    """Write granted pages to a row's page table, from one column on."""
    ids = torch.tensor(pages, dtype=torch.int32)
    copy_to_device(ids, table.page_table[row, column : column + len(pages)])


def write_sampling(state: s.SamplingState, row: int, spec: RowSpec, prompt: Tensor) -> None:
    """Write the sampling parameters of a request to its row."""
    p = spec.params
    vocab = state.bias.shape[1]
    flags = 0
    copy_to_device(0, state.counts[row])
    copy_to_device(False, state.in_prompt[row])
    if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty:
        flags |= s.PENALTIES
        there = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, prompt, True)
        copy_to_device(there, state.in_prompt[row])
    if p.logit_bias or p.allowed_token_ids is not None:
        flags |= s.BIAS
        copy_to_device(_bias(spec, vocab), state.bias[row])
    if p.min_tokens:
        flags |= s.MIN_TOKENS
        stops = sorted(spec.eos_token_ids | set(p.stop_token_ids or ()))
        copy_to_device(_padded(stops, state.stop_ids.shape[1]), state.stop_ids[row])
    if p.bad_words_ids:
        flags |= s.BAD_WORDS
        copy_to_device(_words(p.bad_words_ids, state.bad_words[row].shape), state.bad_words[row])
    if spec.is_constrained:
        flags |= s.ALLOWED
    if not p.greedy:
        flags |= s.NOISE
        if p.top_k > 0 or p.top_p < 1 or p.min_p > 0:
            flags |= s.FILTERS
    parameters = s.RowParameters(
        seed=spec.seed,
        flags=flags,
        top_k=max(p.top_k, 0),
        min_position=min(len(prompt) + p.min_tokens, FURTHEST),
        temperature=p.temperature,
        top_p=p.top_p,
        min_p=p.min_p,
        repetition=p.repetition_penalty,
        presence=p.presence_penalty,
        frequency=p.frequency_penalty,
    )
    copy_to_device(parameters.words(), state.scalars[row])


def remove_masks(state: s.SamplingState, row: int) -> None:
    """Make a row sample without masks, in steps decided after this point of the stream."""
    state.flags[row].bitwise_and_(~s.ALLOWED)


def _bias(spec: RowSpec, vocab: int) -> Tensor:
    p = spec.params
    bias = torch.zeros(vocab)
    if p.allowed_token_ids is not None:
        bias.fill_(-torch.inf)
        bias[torch.tensor(list(p.allowed_token_ids), dtype=torch.int64)] = 0.0
    for token, value in (p.logit_bias or {}).items():
        bias[int(token)] += min(max(float(value), -MAX_BIAS), MAX_BIAS)
    return bias


def _padded(values: list[int], length: int) -> Tensor:
    return torch.tensor((values + [-1] * length)[:length], dtype=torch.int64)


def _words(words: Sequence[Sequence[int]], shape: torch.Size) -> Tensor:
    out = torch.full(shape, -1, dtype=torch.int64)
    for i, word in enumerate(words):
        # Right-aligned: the last column is the token that would complete the word.
        out[i, shape[1] - len(word) :] = torch.tensor(list(word), dtype=torch.int64)
    return out


def save_row(
    table: RowTable, row: int, pages: list[int], slot: int, transfers: Transfers
) -> HostRow:
    """Copy a row to host memory in the order of device work. slot: 0 for none."""
    return HostRow(
        [copy_to_host(tensor[row]) for tensor in table.row_tensors()],
        transfers.save(transfers.pages, pages),
        transfers.save(transfers.slots, [slot] if slot else []),
    )


def restore_row(
    table: RowTable,
    row: int,
    saved: HostRow,
    pages: list[int],
    slot: int,
    transfers: Transfers,
) -> None:
    """Copy a saved row into a new row. Pages past the saved ones are fresh."""
    for tensor, kept in zip(table.row_tensors(), saved.table, strict=True):
        copy_to_device(kept, tensor[row])
    write_pages_and_slot(table, row, pages, slot)
    transfers.copy_in(transfers.pages, pages[: len(saved.pages)], saved.pages)
    transfers.copy_in(transfers.slots, [slot] if slot else [], saved.state)
