"""MTP: the checkpoint's own next-token module, which drafts in a chain."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from lockstep.errors import CheckpointError
from lockstep.layers.build import Build
from lockstep.models import architecture
from lockstep.models.checkpoint import Checkpoint
from lockstep.settings import setting
from lockstep.spec.chain import ChainDrafter
from lockstep.spec.config import SpeculativeConfig
from lockstep.spec.drafter import DraftContext, DraftModule
from lockstep.spec.vocabulary import HEAD_GRAIN, MOST_TOKENS, draft_vocab_size, frequent_tokens

NEEDS_MODULE = True
SETTING = "mtp_num_hidden_layers"
"""What config.json says of the module: its number of layers."""
HeadSize = Annotated[int, Field(ge=HEAD_GRAIN, le=MOST_TOKENS, multiple_of=HEAD_GRAIN)]


@dataclass(frozen=True)
class Options(SpeculativeConfig):
    """The keys of this method."""

    draft_vocab_size: Literal["auto", "full"] | HeadSize = setting(
        "auto",
        "tokens that the module may propose, the most frequent ones; auto: 32,768 where the model "
        "knows more than 65,536, else all",
        allowed=f"auto, full, or multiples of {HEAD_GRAIN} from {HEAD_GRAIN}",
        remedy="Choose one of them, or leave it out.",
    )


def refusal(raw: dict[str, Any]) -> str | None:
    """Why a checkpoint of this config.json cannot be drafted for; None if it can."""
    built = hasattr(architecture(raw.get("model_type")), "Draft")
    has_module = built and raw.get("text_config", raw).get(SETTING)
    return None if has_module else "the checkpoint has no MTP module"


def build(options: Options, checkpoint: Checkpoint, target: Any, build: Build) -> DraftModule:
    """The checkpoint's module, not loaded yet. Raises CheckpointError where it has none, and
    ConfigError where draft_vocab_size does not fit its vocabulary."""
    if refusal(checkpoint.raw) is not None:
        raise CheckpointError(
            "speculative_config method='mtp' needs a checkpoint with an MTP module, and this one "
            f"has none ({SETTING}). Choose another method, e.g. ngram."
        )
    vocab = target.config.vocab_size
    size = draft_vocab_size(options.draft_vocab_size, vocab)
    ids = None
    if size < vocab:
        kept = frequent_tokens(checkpoint.folder, size, vocab)
        ids = torch.tensor(kept, device=build.device)
    return architecture(checkpoint.raw["model_type"]).Draft(target, build, ids)


def create(context: DraftContext) -> ChainDrafter:
    """The drafter of this file."""
    return ChainDrafter(context)
