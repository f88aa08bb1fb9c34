"""mamba2_step and mamba2_chunk: recurrent form and chunked form of Mamba-2."""

from lockstep.kernels.mamba2.contract import (
    Mamba2Weights,
    discretize,
    mamba2_chunk,
    mamba2_step,
)
from lockstep.kernels.mamba2.reference import (
    heads_of,
)

__all__ = [
    "Mamba2Weights",
    "heads_of",
    "mamba2_chunk",
    "mamba2_step",
    "discretize",
]
