"""sample: the one token that the target emits at each position.

argmax over processed logits / T + Gumbel(seed, position, token id), ties by the smaller id;
temperature 0 is plain argmax. -1 where there is no such token: a logit is NaN or +inf, or nothing
is left to choose from. Every row is its own: parameters, masks and noise come from the row's
row of the table and the absolute position, never from the batch. Penalties count the drafts in
front of a position, so a draft changes nothing but the time at which a token is known.
"""

from lockstep.kernels.sampling.contract import (
    sample,
)
from lockstep.kernels.sampling.reference import (
    gumbel,
    uniform,
)
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
    "MIN_TOKENS",
    "NOISE",
    "PENALTIES",
    "RowParameters",
    "SamplingState",
    "WORDS",
    "gumbel",
    "sample",
    "uniform",
]
