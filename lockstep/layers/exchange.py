"""Exchange of a layer: the columns of each tensor-parallel rank, gathered on every rank."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Exchange(nn.Module):
    """Exchange of certain columns: this rank's [T, n] -> all ranks' [T, N], or their norm.

    A module, so that whoever walks a model finds its exchanges: for floors, explain and traces.

    Args:
        run: backend of an op of lockstep.kernels.exchange, bound to these columns and to the group.
        layer: name of the layer that the columns belong to.
        token_bytes: bytes per token of a step that come from other ranks.
    """

    def __init__(self, run: Callable[..., Any], layer: str, token_bytes: int) -> None:
        super().__init__()
        self.run = run
        self.layer = layer
        self.token_bytes = token_bytes

    def forward(self, *tensors: Any, **options: Any) -> Any:
        """Run the op on this rank's columns and its other arguments."""
        return self.run(*tensors, **options)
