"""prepare_step and advance_rows: read a step from the row table, and commit its results to it."""

from lockstep.kernels.step_metadata.contract import (
    RowTensors,
    StepTensors,
    advance_rows,
    prepare_step,
    step_drafts,
)

__all__ = [
    "RowTensors",
    "StepTensors",
    "advance_rows",
    "prepare_step",
    "step_drafts",
]
