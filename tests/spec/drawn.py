"""Random tensors of draft modules."""

import torch
from torch import Tensor


class RandomTensors:
    """Generator of random tensors, reproducible in the order of the calls."""

    def __init__(self, seed: int = 5) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, n: int, k: int) -> Tensor:
        """Return a linear layer's weight [n, k], which roughly keeps the magnitude of its input."""
        return torch.randn(n, k, generator=self.generator) * 1.5 * k**-0.5

    def norm(self, size: int) -> Tensor:
        """Return a norm's weight."""
        return torch.rand(size, generator=self.generator) + 0.5
