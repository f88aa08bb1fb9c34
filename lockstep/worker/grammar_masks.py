"""Masks of grammars, brought to the device between the halves of a step.

A mask depends on the tokens of the step before and on the drafts that this step verifies. Both are
in the table once the step before has ended. So they are copied to the host in front of this step,
the model of this step is launched, and while it runs the host waits for them and makes the masks.
A step whose rows have no grammar, or one that allows everything from there on, copies nothing and
waits for nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from lockstep.kernels.stream_copies import copy_to_device, copy_to_host
from lockstep.scheduling.grammar import Fill, Grammar, Wanted
from lockstep.scheduling.request import Request
from lockstep.worker.program import nothing
from lockstep.worker.row_table import RowTable
from lockstep.worker.rows import remove_masks


@dataclass(frozen=True)
class HeldRow:
    """A row of a step that is held to a grammar. place: its number in the step; known: tokens of
    the row, prompt and answer, that the grammar has taken."""

    place: int
    row: int
    grammar: Grammar
    known: int


class GrammarMasks:
    """Fills table.allowed for the rows that are held to a grammar. window: most tokens of a row
    whose token is decided in a step."""

    def __init__(self, table: RowTable, window: int) -> None:
        self.table = table
        self.window = window
        self.host = torch.zeros_like(table.allowed, device="cpu")
        if table.allowed.is_cuda:
            self.host = self.host.pin_memory()
        self.memory = self.host.numpy().data

    def begin(
        self, rows: Sequence[int], requests: Sequence[Request | None], width: int
    ) -> Callable[[], None]:
        """Called in front of a step; what it returns is called between the step's halves.

        requests: None for a row that emits no token; width: tokens of a row that are decided.
        """
        held = [
            HeldRow(
                place,
                row,
                request.grammar,
                len(request.prompt_token_ids) + request.grammar.accepted,
            )
            for place, (row, request) in enumerate(zip(rows, requests, strict=True))
            if request is not None and request.grammar is not None and request.is_constrained
        ]
        if not held:
            return nothing
        seen = copy_to_host(self._unseen(held))
        event = torch.cuda.Event() if self.host.is_pinned() else None
        if event is not None:
            event.record()

        def between() -> None:
            if event is not None:
                event.synchronize()
            self._send(held, seen, width)

        return between

    def _unseen(self, held: list[HeldRow]) -> Tensor:
        """[H, 1 + W + K] int64: tokens computed, the W behind those known, the drafts."""
        table = self.table
        columns = torch.tensor([[one.row, one.known] for one in held], dtype=torch.int64)
        on_device = torch.empty_like(columns, device=table.tokens.device)
        copy_to_device(columns, on_device)
        ids, known = on_device.split(1, dim=1)
        behind = torch.arange(self.window, device=ids.device)
        at = (known + behind).clamp_max(table.tokens.shape[1] - 1)
        computed = table.computed[ids].to(torch.int64)
        return torch.cat([computed, table.tokens[ids, at], table.drafts[ids[:, 0]]], dim=1)

    def _send(self, held: list[HeldRow], seen: Tensor, width: int) -> None:
        """Makes the masks, those of grammars of one kind side by side, and copies them to the
        device."""
        wanted: dict[Fill, list[Wanted[Grammar]]] = {}
        for one, numbers in zip(held, seen.tolist(), strict=True):
            computed, *tokens = numbers
            drafts = tokens[self.window :][: width - 1]
            one.grammar.accept(tokens[: max(computed + 1 - one.known, 0)])
            if one.grammar.is_free:
                # The row needs no mask in this step either: decide is not launched yet.
                remove_masks(self.table.sampling, one.row)
                continue
            real = list(takewhile(lambda token: token >= 0, drafts))
            first = one.place * width
            wanted.setdefault(one.grammar.fill, []).append(Wanted(one.grammar, real, first))
        for fill, alike in wanted.items():
            fill(alike, self.memory)
        span = slice(held[0].place * width, (held[-1].place + 1) * width)
        self.table.allowed[span].copy_(self.host[span], non_blocking=True)
