"""Integer ops of drafters: inputs of draft modules, their next steps, and n-gram lookup."""

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
