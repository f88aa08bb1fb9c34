"""DFlash: a draft model that makes all drafts of a step in one pass (lockstep.models.dflash).

The row's last token and a masked one for every draft are read as a block, whose tokens see each
other.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.kernels.drafting import block_step
from lockstep.layers.build_context import BuildContext
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.dflash import BlockCheckpoint, BlockDraftModel, Config
from lockstep.quantization import read_weight_format
from lockstep.spec.drafter import DraftContext, DraftModule
from lockstep.spec.options import FolderOptions
from lockstep.step import NEVER, StepContext, StepShape, Verdict

NEEDS_MODULE = True
Options = FolderOptions


def refusal(checkpoint: Checkpoint) -> str | None:
    """Why this checkpoint alone cannot be drafted for."""
    return "it needs a draft model for blocks, which speculative_config names as its model"


def build(options: Any, checkpoint: Checkpoint, target: Any, build: BuildContext) -> DraftModule:
    """The folder's model, not loaded yet. Raises CheckpointError where it is not built, or not of
    this target, and ConfigError where its blocks are too short for K drafts."""
    own = BlockCheckpoint.at(options.folder)
    config = Config.read(own, target)
    if options.num_speculative_tokens >= config.block:
        raise ConfigError(
            f"speculative_config num_speculative_tokens={options.num_speculative_tokens} is not "
            f"allowed; allowed: 1 to {config.block - 1}, one less than the block_size of "
            f"{own.folder}. Lower it."
        )
    tensors = None if build.tensors is None else own.tensors()
    packing = read_weight_format(own.quantization(), None)
    apart = build.reading(tensors, own.prefixes, packing)
    apart.named = "draft."
    return BlockDraftModel(target, apart, config, own)


def passes(rows: int, tokens: int, count: int) -> tuple[int, ...]:
    """The blocks; what the step's tokens take besides is little."""
    return (rows * (count + 1),)


class BlockDrafter:
    """All drafts of a step from one pass of its module over a block of each row."""

    def __init__(self, context: DraftContext) -> None:
        self.context = context
        self.block_step = context.op(block_step)

    def propose(
        self,
        step: StepContext,
        hidden: Tensor,
        aux_hidden_states: tuple[Tensor, ...],
        verdict: Verdict,
    ) -> None:
        """Writes as many drafts per row as the step asks for. Sampled rows draft with the noise of
        the position itself; penalties count no other draft of the block."""
        c = self.context
        state = c.module.begin(hidden, aux_hidden_states)
        c.module.keep(step.token_ids, state, step)
        count = step.shape.next_drafts
        if not count:
            return
        rows = step.row_ids
        block = self.block_of(step, count + 1)
        found = c.module(block.token_ids, state, block).unflatten(0, (-1, count + 1))[:, 1:]
        logits = c.module.logits(found.flatten(0, 1)).unflatten(0, (-1, count))
        others = rows.new_full((rows.shape[0], count - 1), -1)
        c.drafts[rows, :count] = c.sample(logits, block.sample_at, others, rows)

    def block_of(self, step: StepContext, width: int) -> StepContext:
        """The step of the rows' blocks of `width` tokens."""
        c = self.context
        table = step.page_table
        mask = c.module.config.mask
        made = self.block_step(c.computed, c.tokens, step.row_ids, table, width, mask, c.page_size)
        return replace(
            step,
            shape=StepShape.uniform(step.shape.rows, width),
            logit_rows=slice(None),
            flush=NEVER,
            **vars(made),
        )


def create(context: DraftContext) -> BlockDrafter:
    """The drafter of this file."""
    return BlockDrafter(context)
