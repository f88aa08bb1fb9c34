"""gated_delta_step and gated_delta_chunk: the two laws of a Gated DeltaNet mixer.

Both take the raw projections and do gates, convolution, SiLU, l2 norm and recurrence (Yang et al.,
Gated Delta Networks, 2024; layout of Qwen3.5 checkpoints). Generated tokens go through the
token-by-token update; prompt tokens through the chunked (WY) form on the absolute 64-token grid.
HK key heads of K, HV value heads of V; value head h reads key head h // (HV / HK).
C = 2 HK K + HV V channels, ordered [all q | all k | all v]. W window tokens, R conv kernel - 1.
"""

from lockstep.kernels.gated_delta_rule.contract import (
    GatedDeltaWeights,
    gated_delta_chunk,
    gated_delta_step,
    gates,
)
from lockstep.kernels.gated_delta_rule.reference import (
    L2_EPS,
    heads_of,
)

__all__ = [
    "GatedDeltaWeights",
    "L2_EPS",
    "gated_delta_chunk",
    "gated_delta_step",
    "gates",
    "heads_of",
]
