"""head_linear: one small linear map per head (MLA's absorbed projections)."""

from lockstep.kernels.head_linear.contract import head_linear

__all__ = ["head_linear"]
