"""experts: the grouped MLPs of a mixture of experts, each token through its top-k experts."""

from lockstep.kernels.experts.contract import experts, experts_in, of_expert, with_shared

__all__ = ["experts", "experts_in", "of_expert", "with_shared"]
