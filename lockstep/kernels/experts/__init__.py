"""experts: the grouped MLPs of a mixture of experts, each token through its top-k experts."""

from lockstep.kernels.experts.contract import combine, count_experts, expert_weight, experts

__all__ = ["combine", "count_experts", "expert_weight", "experts"]
