"""The rows of a prompt step, one after another: what each goes on from, and what it leaves."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.recurrent.history import past_slots
from lockstep.kernels.recurrent.state import RecurrentState
from lockstep.step import GRID


@dataclass(frozen=True)
class PromptRow:
    """A row that has tokens and a state slot.

    tokens: which of the step's are its own, n of them. raw [R + n, C]: the R raw inputs before
    them, then theirs. before [HV, K, V] fp32: the state before them, a copy.
    """

    state: RecurrentState
    start: int
    slot: int
    snapshot: int
    tokens: slice
    raw: Tensor
    before: Tensor

    def keep(self, at_grid: Tensor, after: Tensor) -> None:
        """Leaves the state after the last token in the row's slot, and that at its last grid point
        in its snapshot's, if it has one."""
        length = self.tokens.stop - self.tokens.start
        self._write(self.slot, after, length)
        if self.snapshot:
            self._write(self.snapshot, at_grid, length // GRID * GRID)

    def _write(self, slot: int, s: Tensor, behind: int) -> None:
        """The state behind so many of the row's tokens, and the raw inputs before it."""
        history = len(self.raw) - (self.tokens.stop - self.tokens.start)
        place = past_slots(self.start + behind, history, self.state.conv.shape[1])
        self.state.recurrent[slot] = s
        self.state.conv[slot, place] = self.raw[behind : behind + history]


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
    """Those of a chunked law's arguments that do something. history: R."""
    bounds = cu_seqlens.tolist()
    rows = (x.tolist() for x in (starts, state_src, state_slots, snapshot_slots))
    for i, (start, src, slot, snapshot) in enumerate(zip(*rows, strict=True)):
        tokens = slice(bounds[i], bounds[i + 1])
        if tokens.start == tokens.stop or slot == 0:
            continue
        past = mixed.new_zeros(history, mixed.shape[1])
        before = torch.zeros(state.recurrent.shape[1:])
        if start:
            past = state.conv[src, past_slots(start, history, state.conv.shape[1])]
            before = state.recurrent[src].to(torch.float32, copy=True)
        raw = torch.cat([past, mixed[tokens]])
        yield PromptRow(state, start, slot, snapshot, tokens, raw, before)
