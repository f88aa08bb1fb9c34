"""Rows of a prompt step on a CPU, one after another: what each resumes from and what it saves."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.recurrent.history import past_indices
from lockstep.kernels.recurrent.state import RecurrentState
from lockstep.step import GRID


@dataclass(frozen=True)
class PromptRow:
    """Row of a prompt step that has n > 0 tokens and a state slot.

    start: position of its first token. slot, snapshot: slots to save to; snapshot 0 is none.
    tokens: the row's slice of the step's tokens. raw [R + n, C]: raw inputs, R of them before the
    first token. before [HV, K, V] fp32: copy of the state before the first token.
    """

    state: RecurrentState
    start: int
    slot: int
    snapshot: int
    tokens: slice
    raw: Tensor
    before: Tensor

    def save(self, at_grid: Tensor, after: Tensor) -> None:
        """Save the state after the last token, and the state at the last grid point as snapshot."""
        length = self.tokens.stop - self.tokens.start
        self._write(self.slot, after, length)
        if self.snapshot:
            self._write(self.snapshot, at_grid, length // GRID * GRID)

    def _write(self, slot: int, s: Tensor, count: int) -> None:
        """Write the state s after the row's first `count` tokens, with the raw inputs before it."""
        history = len(self.raw) - (self.tokens.stop - self.tokens.start)
        indices = past_indices(self.start + count, history, self.state.conv.shape[1])
        self.state.recurrent[slot] = s
        self.state.conv[slot, indices] = self.raw[count : count + history]


def prompt_rows(
    mixed: Tensor,
    state: RecurrentState,
    history: int,
    cu_seqlens: Tensor,
    starts: Tensor,
    state_src: Tensor,
    state_slots: Tensor,
    snapshot_slots: Tensor,
) -> Iterator[PromptRow]:
    """Yield the rows of a chunked op's arguments that have tokens and a state slot. history: R."""
    bounds = cu_seqlens.tolist()
    rows = (x.tolist() for x in (starts, state_src, state_slots, snapshot_slots))
    for i, (start, src, slot, snapshot) in enumerate(zip(*rows, strict=True)):
        tokens = slice(bounds[i], bounds[i + 1])
        if tokens.start == tokens.stop or slot == 0:
            continue
        past = mixed.new_zeros(history, mixed.shape[1])
        before = torch.zeros(state.recurrent.shape[1:])
        if start:
            past = state.conv[src, past_indices(start, history, state.conv.shape[1])]
            # A copy, since src may be the slot that the row saves to.
            before = state.recurrent[src].to(torch.float32, copy=True)
        raw = torch.cat([past, mixed[tokens]])
        yield PromptRow(state, start, slot, snapshot, tokens, raw, before)
