"""Integer ops of drafters: inputs of draft modules, their next steps, and lookups."""

from lockstep.kernels.drafting.contract import (
    BlockTensors,
    DraftTensors,
    block_step,
    mtp_inputs,
    next_draft_step,
    ngram_lookup,
    prediction_lookup,
)

__all__ = [
    "BlockTensors",
    "DraftTensors",
    "block_step",
    "mtp_inputs",
    "next_draft_step",
    "ngram_lookup",
    "prediction_lookup",
]
