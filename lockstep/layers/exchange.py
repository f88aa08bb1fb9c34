"""Exchange of a layer: the columns of each tensor-parallel rank, gathered on every rank."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Exchange(nn.Module):
    """Exchange of certain columns: this rank's [T, n] -> all ranks' [T, N].

    A module, so that whoever walks a model finds its exchanges: for floors, explain and traces.

    Args:
        gather: backend of the op, bound to these columns and to the group.
        layer: name of the layer that the columns belong to.
        token_bytes: bytes per token of a step that come from other ranks.
    """

    def __init__(self, gather: Callable[..., Tensor], layer: str, token_bytes: int) -> None:
        super().__init__()
        self.gather = gather
        self.layer = layer
        self.token_bytes = token_bytes

    def forward(self, local: Tensor, **options: Any) -> Tensor:
        """Return all columns. options: of the op."""
        return self.gather(local, **options)
