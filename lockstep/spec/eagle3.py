"""EAGLE-3: a trained head over the target's own layers, which drafts in a chain."""

from dataclasses import dataclass
from typing import Any

from lockstep.layers.build_context import BuildContext
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.eagle3 import Config, Eagle3Head, HeadCheckpoint
from lockstep.quantization import read_weight_format
from lockstep.settings import setting
from lockstep.spec.chain import ChainDrafter, passes
from lockstep.spec.drafter import DraftContext, DraftModule
from lockstep.spec.options import FolderOptions

__all__ = ["NEEDS_MODULE", "Options", "build", "create", "passes", "refusal"]

NEEDS_MODULE = True


@dataclass(frozen=True)
class Options(FolderOptions):
    """Keys of this method."""

    aux_hidden_layer_outputs: bool = setting(
        False,
        "whether eagle_aux_hidden_state_layer_ids name layers whose output the head was trained "
        "on, as SGLang reads them, not layers whose input it was, as vLLM does",
        remedy="Choose the one with the higher acceptance.",
    )


def refusal(checkpoint: Checkpoint) -> str | None:
    """Return why this checkpoint alone has no drafts."""
    return "it needs an EAGLE-3 head, which speculative_config names as its model"


def build(
    options: Options, checkpoint: Checkpoint, target: Any, build: BuildContext
) -> DraftModule:
    """Build the folder's head without weights.

    Raises CheckpointError where it cannot be built or belongs to another target, and ConfigError
    where the folder is missing.
    """
    head = HeadCheckpoint.at(options.folder)
    config = Config.read(head, target, options.aux_hidden_layer_outputs)
    tensors = None if build.tensors is None else head.tensors()
    context = build.for_checkpoint(
        tensors, head.prefixes, read_weight_format(head.quantization(), None)
    )
    return Eagle3Head(target, context, config, head)


def create(context: DraftContext) -> ChainDrafter:
    """Return the drafter."""
    return ChainDrafter(context)
