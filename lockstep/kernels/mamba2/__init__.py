"""mamba2_step and mamba2_chunk: the two laws of a Mamba-2 mixer.

They stand between its projections and its gated norm.

Both take the raw projections and do convolution, SiLU, time steps and recurrence (Dao and Gu,
Transformers are SSMs, 2024; layout of Nemotron-H checkpoints). Generated tokens go through the
token-by-token update; prompt tokens through the chunked (SSD) form on the absolute 64-token grid.
H heads of P channels, G groups of N state numbers; head h reads B and C of group h // (H / G).
C = H P + 2 G N channels, ordered [all x | all B | all C]. W window tokens, R conv kernel - 1.

In lockstep.kernels.recurrent's words B is a key, C a query, dt x what is written: HK = G, HV = H,
K = N and V = P.
"""

from lockstep.kernels.mamba2.contract import (
    Mamba2Weights,
    mamba2_chunk,
    mamba2_step,
    time_steps,
)
from lockstep.kernels.mamba2.reference import (
    heads_of,
)

__all__ = [
    "Mamba2Weights",
    "heads_of",
    "mamba2_chunk",
    "mamba2_step",
    "time_steps",
]
