"""Column of the row table with the predicted text of each row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.kernels.stream_copies import copy_to_device
from lockstep.spec.drafter import Predictions


class PredictionColumn:
    """Predicted texts of R rows, at most `max_len` tokens each."""

    def __init__(self, rows: int, max_len: int, device: str) -> None:
        self.texts = torch.zeros(rows, max_len, dtype=torch.int64, device=device)
        self.text_lens = torch.zeros(rows, dtype=torch.int32, device=device)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the column, which move with a preempted row."""
        return [self.texts, self.text_lens]

    def write(self, row: int, token_ids: Sequence[int]) -> None:
        """Write the text of a request that gets a row; tokens past the maximum are left out."""
        text = torch.tensor(token_ids[: self.texts.shape[1]], dtype=torch.int64)
        copy_to_device(text, self.texts[row, : len(text)])
        copy_to_device(len(text), self.text_lens[row])

    def predictions(self, prompt_len: Tensor) -> Predictions | None:
        """Return the texts for a drafter."""
        return Predictions(self.texts, self.text_lens, prompt_len)


class NoPredictionColumn:
    """Column of an engine whose drafter reads no predicted texts: it has no tensor."""

    def tensors(self) -> list[Tensor]:
        return []

    def write(self, row: int, token_ids: Sequence[int]) -> None: ...

    def predictions(self, prompt_len: Tensor) -> Predictions | None:
        return None


def prediction_column(
    is_read: bool, rows: int, max_len: int, device: str
) -> PredictionColumn | NoPredictionColumn:
    """Return the column of a row table. is_read: whether the engine's drafter reads it."""
    return PredictionColumn(rows, max_len, device) if is_read else NoPredictionColumn()
