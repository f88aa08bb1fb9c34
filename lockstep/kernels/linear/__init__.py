"""linear: y = x W^T with one fixed reduction tree per weight, whatever the number of rows."""

from lockstep.kernels.linear.contract import (
    choose_plain_split_k,
    choose_split_k,
    dequantized,
    draft_linear,
    linear,
    pad_partitions,
    partition_length,
    sum_partials,
    tree_sum,
    write_out,
)

__all__ = [
    "draft_linear",
    "linear",
    "write_out",
    "partition_length",
    "choose_plain_split_k",
    "choose_split_k",
    "sum_partials",
    "tree_sum",
    "dequantized",
    "pad_partitions",
]
