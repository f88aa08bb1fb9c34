"""lora: adds the low-rank product of each token's adapter to a linear layer's output."""

from lockstep.kernels.lora.contract import halving_sum, lora

__all__ = ["lora", "halving_sum"]
