"""gated_delta_step and gated_delta_chunk: recurrent form and chunked form of Gated DeltaNet."""

from lockstep.kernels.gated_delta_rule.contract import (
    GatedDeltaWeights,
    add_partials,
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
    "add_partials",
    "gated_delta_chunk",
    "gated_delta_step",
    "gates",
    "heads_of",
]
