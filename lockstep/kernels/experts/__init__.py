"""experts: the grouped MLPs of a mixture of experts, each token through its top-k experts."""

from lockstep.kernels.experts.contract import (
    add_shared_expert,
    count_experts,
    expert_weight,
    experts,
)

__all__ = ["experts", "count_experts", "expert_weight", "add_shared_expert"]
