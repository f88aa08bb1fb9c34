"""What leads drafters through a step and its rows: integers only, one pass over the rows each.

mtp_inputs and next_draft_step lead a draft module from the step that was verified to its own steps
of one token a row, and block_step one that fills a block of each row at once; ngram_lookup drafts
from a row's own history and other texts. R rows of the table (row 0 is the null row), L tokens of a
row, S rows and T tokens of the step, K drafts of a row, P pages.
"""

from lockstep.kernels.drafting.contract import (
    BlockTensors,
    DraftTensors,
    block_step,
    mtp_inputs,
    next_draft_step,
    ngram_lookup,
)

__all__ = [
    "BlockTensors",
    "DraftTensors",
    "block_step",
    "mtp_inputs",
    "next_draft_step",
    "ngram_lookup",
]
