"""sample: the token that the target emits at each position, and the parameters of its rows."""

from lockstep.kernels.sampling.contract import (
    sample,
)
from lockstep.kernels.sampling.reference import (
    gumbel,
    uniform,
)
from lockstep.kernels.sampling.shard import VOCABULARY_TILE, LogitShard
from lockstep.kernels.sampling.state import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    COLUMNS,
    FILTERS,
    MIN_TOKENS,
    NOISE,
    PENALTIES,
    WORDS,
    RowParameters,
    SamplingState,
)

__all__ = [
    "ALLOWED",
    "BAD_WORDS",
    "BIAS",
    "COLUMNS",
    "FILTERS",
    "LogitShard",
    "MIN_TOKENS",
    "NOISE",
    "PENALTIES",
    "RowParameters",
    "SamplingState",
    "VOCABULARY_TILE",
    "WORDS",
    "gumbel",
    "sample",
    "uniform",
]
