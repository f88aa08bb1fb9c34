"""DFlash: a draft model that proposes all drafts of a step in one pass (lockstep.models.dflash).

The row's last token and one mask token per draft form a block, whose tokens attend to each other.
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
from lockstep.step import NEVER_FLUSH, StepContext, StepShape, Verdict

NEEDS_MODULE = True
Options = FolderOptions


def refusal(checkpoint: Checkpoint) -> str | None:
    """Return why this checkpoint alone has no drafts."""
    return "it needs a draft model for blocks, which speculative_config names as its model"


def build(options: Any, checkpoint: Checkpoint, target: Any, build: BuildContext) -> DraftModule:
    """Build the folder's model without weights.

    Raises CheckpointError where it cannot be built or belongs to another target, and ConfigError
    where its blocks are too short for K drafts.
    """
    draft = BlockCheckpoint.at(options.folder)
    config = Config.read(draft, target)
    if options.num_speculative_tokens >= config.block:
        raise ConfigError(
            f"speculative_config num_speculative_tokens={options.num_speculative_tokens} is not "
            f"allowed; allowed: 1 to {config.block - 1}, one less than the block_size of "
            f"{draft.folder}. Lower it."
        )
    tensors = None if build.tensors is None else draft.tensors()
    weight_format = read_weight_format(draft.quantization(), None)
    context = build.for_checkpoint(tensors, draft.prefixes, weight_format)
    context.name_prefix = "draft."
    return BlockDraftModel(target, context, config, draft)


def passes(rows: int, tokens: int, num_drafts: int) -> tuple[int, ...]:
    """Return the tokens of the block pass; the step's own tokens cost little."""
    return (rows * (num_drafts + 1),)


class BlockDrafter:
    """Drafter of all drafts of a step in one pass of its module over a block per row."""

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
        """Write the drafts of the next step.

        Sampled rows use the noise of the position itself; penalties do not count other drafts of
        the block.
        """
        c = self.context
        state = c.module.begin(hidden, aux_hidden_states)
        c.module.write_cache(step.token_ids, state, step)  # KV of the verified tokens
        num_drafts = step.shape.next_drafts
        if not num_drafts:
            return
        rows = step.row_ids
        block = self.block_of(step, num_drafts + 1)
        states = c.module(block.token_ids, state, block).unflatten(0, (-1, num_drafts + 1))[:, 1:]
        logits = c.module.logits(states.flatten(0, 1)).unflatten(0, (-1, num_drafts))
        # All drafts of a block are sampled at once, so none can count another in penalties.
        no_tokens = rows.new_full((rows.shape[0], num_drafts - 1), -1)
        c.drafts[rows, :num_drafts] = c.sample(logits, block.sample_at, no_tokens, rows)

    def block_of(self, step: StepContext, width: int) -> StepContext:
        """Return the step of the rows' blocks of `width` tokens."""
        c = self.context
        table = step.page_table
        mask = c.module.config.mask
        tensors = self.block_step(
            c.computed, c.tokens, step.row_ids, table, width, mask, c.page_size
        )
        return replace(
            step,
            shape=StepShape.uniform(step.shape.rows, width),
            logit_rows=slice(None),
            flush=NEVER_FLUSH,
            **vars(tensors),
        )


def create(context: DraftContext) -> BlockDrafter:
    """Return the drafter."""
    return BlockDrafter(context)
