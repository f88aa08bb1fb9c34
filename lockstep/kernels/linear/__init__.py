"""linear: y = x W^T with one fixed reduction tree per weight, whatever the number of rows."""

from lockstep.kernels.linear.contract import (
    draft_linear,
    linear,
    placed,
    run_length,
    segments,
    tree_sum,
    unpacked,
    whole_runs,
)

__all__ = [
    "draft_linear",
    "linear",
    "placed",
    "run_length",
    "segments",
    "tree_sum",
    "unpacked",
    "whole_runs",
]
