"""What stands between the table and a step: integers only, one pass over the rows each.

prepare_step reads a step out of the table, advance_rows commits a verdict to it. R rows of the
table (row 0 is the null row), L tokens and P pages of a row, S rows and T tokens of the step, Q its
query length, W positions per row whose token is decided: W = Q where rows bring drafts, 1 where
they bring a chunk of a prompt.
"""

from lockstep.kernels.step_metadata.contract import (
    RowTensors,
    StepTensors,
    advance_rows,
    prepare_step,
)

__all__ = [
    "RowTensors",
    "StepTensors",
    "advance_rows",
    "prepare_step",
]
