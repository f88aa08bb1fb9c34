"""MTP: the checkpoint's own multi-token prediction module, which drafts in a chain."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from lockstep.errors import CheckpointError
from lockstep.layers.build_context import BuildContext
from lockstep.models import architecture, draft_prefix
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.weight_files import has_weights
from lockstep.settings import setting
from lockstep.spec.chain import ChainDrafter, passes
from lockstep.spec.drafter import DraftContext, DraftModule
from lockstep.spec.options import ModuleOptions
from lockstep.spec.vocabulary import HEAD_GRAIN, MAX_TOKENS, draft_vocab_size, frequent_tokens

__all__ = ["NEEDS_MODULE", "Options", "build", "create", "passes", "refusal"]

NEEDS_MODULE = True
SETTING = "mtp_num_hidden_layers"
"""Setting of config.json with the module's number of layers.

Qwen3-Next has no such setting; an architecture may name another one in DRAFT_SETTING.
"""
HeadSize = Annotated[int, Field(ge=HEAD_GRAIN, le=MAX_TOKENS, multiple_of=HEAD_GRAIN)]


@dataclass(frozen=True)
class Options(ModuleOptions):
    """Keys of this method."""

    draft_vocab_size: Literal["auto", "full"] | HeadSize = setting(
        "auto",
        "tokens that the module may propose, the most frequent ones; auto: 32,768 where the model "
        "knows more than 65,536, else all",
        allowed=f"auto, full, or multiples of {HEAD_GRAIN} from {HEAD_GRAIN}",
        remedy="Choose one of them, or leave it out.",
    )


def refusal(checkpoint: Checkpoint) -> str | None:
    """Return why this checkpoint has no drafts; None if it has."""
    return None if _has_module(checkpoint) else "the checkpoint has no MTP module"


def _has_module(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint has an MTP module.

    A setting of 0 means no. Otherwise the tensors decide; without weight files the setting alone
    does. Tools that save through transformers write the setting but none of the module's tensors.
    """
    prefix = draft_prefix(checkpoint.architecture, checkpoint.raw)
    if prefix is None:
        return False
    num_layers = checkpoint.raw.get("text_config", checkpoint.raw).get(_setting(checkpoint))
    if num_layers == 0 or not has_weights(checkpoint.folder):
        return bool(num_layers)
    return any(checkpoint.key(name).startswith(prefix) for name in checkpoint.names())


def _setting(checkpoint: Checkpoint) -> str:
    """Return the name of the setting with the module's number of layers."""
    return getattr(checkpoint.architecture, "DRAFT_SETTING", SETTING)


def build(
    options: Options, checkpoint: Checkpoint, target: Any, build: BuildContext
) -> DraftModule:
    """Build the checkpoint's module without weights.

    Raises CheckpointError where it has none, and ConfigError where draft_vocab_size does not fit
    its vocabulary.
    """
    if refusal(checkpoint) is not None:
        raise CheckpointError(
            "speculative_config method='mtp' needs a checkpoint with an MTP module, and this one "
            f"has none, by {_setting(checkpoint)} or by its tensors. Choose another method, e.g. "
            "ngram."
        )
    vocab = target.config.vocab_size
    size = draft_vocab_size(options.draft_vocab_size, vocab)
    ids = None
    if size < vocab:
        kept = frequent_tokens(checkpoint.folder, size, vocab)
        ids = torch.tensor(kept, device=build.device)
    return architecture(checkpoint.raw["model_type"]).Draft(target, build, ids)


def create(context: DraftContext) -> ChainDrafter:
    """Return the drafter."""
    return ChainDrafter(context)
