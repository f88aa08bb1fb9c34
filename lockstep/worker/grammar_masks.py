"""Upload of grammar masks to the device between the two halves of a step.

A mask depends on the tokens of the previous step and on the drafts that this step verifies. Both
are in the row table once the previous step has ended. So they are copied to the host before this
step, `forward` of this step is launched, and the host computes the masks while it runs. A step
whose rows have no grammar copies nothing and waits for nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from lockstep.kernels.step_metadata import step_drafts
from lockstep.kernels.stream_copies import copy_to_device, copy_to_host
from lockstep.scheduling.grammar import FillMasks, MaskQuery
from lockstep.scheduling.schedule import MaskedRow
from lockstep.worker.program import do_nothing
from lockstep.worker.row_table import RowTable
from lockstep.worker.rows import remove_masks


@dataclass(frozen=True)
class StepRow:
    """A row that needs masks, with its index among the rows of the step."""

    index: int
    masked: MaskedRow


class GrammarMasks:
    """Masks in `table.allowed` of the rows that a grammar constrains.

    max_query_len: maximum tokens that a row commits in one step, forced ones included.
    """

    def __init__(self, table: RowTable, max_query_len: int) -> None:
        self.table = table
        self.max_query_len = max_query_len
        self.host = torch.zeros_like(table.allowed, device="cpu")
        if table.allowed.is_cuda:
            self.host = self.host.pin_memory()
        self.memory = self.host.numpy().data

    def begin(
        self,
        rows: Sequence[int],
        masked: dict[int, MaskedRow],
        query_len: int,
        fill_masks: FillMasks,
        offset: int = 0,
    ) -> Callable[[], None]:
        """Start the copies for a step -> function to call between the halves of the step.

        masked: rows that need masks, by row. query_len: tokens decided per row. offset: number of
        masks that the earlier steps of the same forward pass may have.
        """
        if not masked:
            return do_nothing
        chosen = [StepRow(i, masked[row]) for i, row in enumerate(rows) if row in masked]
        if not chosen:
            return do_nothing
        unseen = copy_to_host(self._gather_unseen(chosen, query_len - 1))
        event = torch.cuda.Event() if self.host.is_pinned() else None
        if event is not None:
            event.record()

        def before_decide() -> None:
            if event is not None:
                event.synchronize()
            self._upload(chosen, unseen, query_len, fill_masks, offset)

        return before_decide

    def _gather_unseen(self, chosen: list[StepRow], num_drafts: int) -> Tensor:
        """Gather what the grammars have not seen.

        Returns [S, 1 + Q + num_drafts] int64 per row: number of computed tokens, the Q tokens after
        the known ones, and the drafts of this step, forced tokens among them.
        """
        table = self.table
        columns = torch.tensor(
            [[step_row.masked.row, step_row.masked.num_known] for step_row in chosen],
            dtype=torch.int64,
        )
        on_device = torch.empty_like(columns, device=table.tokens.device)
        copy_to_device(columns, on_device)
        ids, known = on_device.split(1, dim=1)
        offsets = torch.arange(self.max_query_len, device=ids.device)
        at = (known + offsets).clamp_max(table.tokens.shape[1] - 1)
        computed = table.computed[ids].to(torch.int64)
        _, drafts = step_drafts(table, ids[:, 0], num_drafts + 1)
        return torch.cat([computed, table.tokens[ids, at], drafts], dim=1)

    def _upload(
        self,
        chosen: list[StepRow],
        unseen: Tensor,
        query_len: int,
        fill_masks: FillMasks,
        offset: int,
    ) -> None:
        """Get the masks of the step from the host and copy them to the device."""
        queries = []
        for step_row, numbers in zip(chosen, unseen.tolist(), strict=True):
            computed, *tokens = numbers
            drafts = tokens[self.max_query_len :][: query_len - 1]
            new_tokens = tokens[: max(computed + 1 - step_row.masked.num_known, 0)]
            valid = list(takewhile(lambda token: token >= 0, drafts))
            # The device may still copy the masks of an earlier step of the same pass.
            first = offset + step_row.index * query_len
            queries.append(MaskQuery(step_row.masked.request_id, new_tokens, valid, first))
        free = fill_masks(queries, self.memory)
        for step_row in chosen:
            if step_row.masked.request_id in free:
                # `decide` is not launched yet, so this step already samples without masks.
                remove_masks(self.table.sampling, step_row.masked.row)
        span = slice(chosen[0].index * query_len, (chosen[-1].index + 1) * query_len)
        self.table.allowed[span].copy_(self.host[offset:][span], non_blocking=True)
