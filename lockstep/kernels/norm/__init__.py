"""Norms: rms_norm, add_rms_norm, gated_rms_norm and gated_group_norm."""

from lockstep.kernels.norm.contract import (
    add_rms_norm,
    gated_group_norm,
    gated_rms_norm,
    rms_norm,
)

__all__ = [
    "add_rms_norm",
    "gated_group_norm",
    "gated_rms_norm",
    "rms_norm",
]
