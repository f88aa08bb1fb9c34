"""Column of the row table with the adapter of each row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.kernels.stream_copies import copy_to_device


class AdapterColumn:
    """Number of each row's adapter [R] int32: 0 for the base model, else from 1 in order of names.

    Row 0 is the null row, which stays at 0.
    """

    def __init__(self, names: Sequence[str], rows: int, device: str) -> None:
        self.numbers = {"": 0} | {name: number for number, name in enumerate(names, 1)}
        self.by_row = torch.zeros(rows, dtype=torch.int32, device=device)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the column, which move with a preempted row."""
        return [self.by_row]

    def write(self, row: int, name: str) -> None:
        """Write the adapter of a request that gets a row."""
        copy_to_device(self.numbers[name], self.by_row[row])

    def of_tokens(self, row_ids: Tensor, token_rows: Tensor) -> Tensor | None:
        """Return the adapter of each token [T] int32. token_rows [T]: its row in row_ids [S]."""
        return self.by_row[row_ids][token_rows]


class NoAdapterColumn:
    """Column of an engine without adapters: it has no tensor, and launches nothing."""

    def tensors(self) -> list[Tensor]:
        return []

    def write(self, row: int, name: str) -> None: ...

    def of_tokens(self, row_ids: Tensor, token_rows: Tensor) -> Tensor | None:
        return None


def adapter_column(names: Sequence[str], rows: int, device: str) -> AdapterColumn | NoAdapterColumn:
    """Return the column of a row table. names: of the engine's adapters."""
    return AdapterColumn(names, rows, device) if names else NoAdapterColumn()
