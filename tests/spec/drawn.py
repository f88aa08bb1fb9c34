"""Random tensors of draft modules."""

import torch
from torch import Tensor


class Drawn:
    """Draws tensors in the order in which they are asked for, the same every time."""

    def __init__(self, seed: int = 5) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, n: int, k: int) -> Tensor:
        """A linear map's weight [n, k], which keeps the size of what it maps about."""
        return torch.randn(n, k, generator=self.generator) * 1.5 * k**-0.5

    def norm(self, size: int) -> Tensor:
        """A norm's weight."""
        return torch.rand(size, generator=self.generator) + 0.5
