"""exchange: the columns of a tensor that each rank computed, gathered on every rank."""

from lockstep.kernels.exchange.contract import Gather, all_columns, exchange
from lockstep.kernels.exchange.group import ALONE, RankGroup

__all__ = ["ALONE", "Gather", "RankGroup", "all_columns", "exchange"]
