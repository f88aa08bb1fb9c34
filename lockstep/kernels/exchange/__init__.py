"""exchange: the columns of a tensor that each rank computed, gathered on every rank."""

from lockstep.kernels.exchange.contract import (
    Activation,
    AddNorm,
    Gather,
    all_columns,
    exchange,
    exchange_add_rms_norm,
)
from lockstep.kernels.exchange.group import ALONE, RankGroup

__all__ = [
    "ALONE",
    "Activation",
    "AddNorm",
    "Gather",
    "RankGroup",
    "all_columns",
    "exchange",
    "exchange_add_rms_norm",
]
