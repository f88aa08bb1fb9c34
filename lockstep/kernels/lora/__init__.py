"""lora: adds the low-rank product of each token's adapter to a linear layer's output."""

from lockstep.kernels.lora.contract import RANK_BLOCK, halving_sum, lora, padded_rank

__all__ = ["RANK_BLOCK", "halving_sum", "lora", "padded_rank"]
