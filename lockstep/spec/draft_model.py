"""Draft model: a smaller checkpoint with the same tokenizer, which drafts in a chain (Leviathan et
al., arXiv 2211.17192).

It reads every token at that token's own position, unlike modules that read the target's hidden
states. Its keys and values use the target's page tables, so cached prefixes serve both models. A
recurrent draft model keeps its state in the rows' slots, and a snapshot has the states of both.
Both models run in every step, so committed and folded tokens of a row are the same for both.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.kernels.sampling import LogitShard
from lockstep.layers.build_context import BuildContext
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.config_reader import ConfigReader
from lockstep.models.json_files import read_config
from lockstep.models.loader import Source, build_model, target_source
from lockstep.quantization import WeightFormat, read_weight_format
from lockstep.spec.chain import ChainDrafter
from lockstep.spec.drafter import DraftContext, DraftModule
from lockstep.spec.options import FolderOptions
from lockstep.spec.vocabulary import token_texts
from lockstep.step import StepContext

NEEDS_MODULE = True
Options = FolderOptions
DRAFTER_ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "Eagle3DeepseekV2ForCausalLM": "eagle3",
    "Eagle3DraftModel": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "LlamaForCausalLMEagle3": "eagle3",
}
"""Architectures of drafters that are not whole models -> the method that uses them."""
HEAD_SETTING = "draft_vocab_size"
"""Setting that only EAGLE-3 heads have; some of them name the architecture of a whole model."""


def refusal(checkpoint: Checkpoint) -> str | None:
    """Return why this checkpoint alone has no drafts."""
    return "it needs a smaller model, which speculative_config names as its model"


class DraftModel(nn.Module):
    """Whole model as a DraftModule: only its cache carries over from one draft to the next.

    vocab: number of the target's tokens; the draft model knows the first `known` of them.
    logit_shard: share of the logits of known tokens that this rank returns.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: Any,
        weight_format: WeightFormat | None,
        vocab: int,
        device: str,
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.model = model
        self.weight_format = weight_format
        self.aux_hidden_layers: tuple[int, ...] = ()
        self.known = min(vocab, model.config.vocab_size)
        self.ids = None if self.known == vocab else torch.arange(self.known, device=device)
        self.logit_shard: LogitShard = model.head.logit_shard.first(self.known)

    @property
    def head_bytes(self) -> int:
        """Return the bytes of its head."""
        return int(self.model.head.stored.nbytes)

    def begin(self, hidden: Tensor, aux_hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Ignore the target's hidden states."""
        return hidden

    def forward(self, ids: Tensor, state: Tensor, step: StepContext) -> Tensor:
        """Compute hidden states [T, H] of ids [T]. Unknown tokens are read as its last one."""
        hidden: Tensor = self.model(replace(step, token_ids=ids.clamp_max(self.known - 1)))[0]
        return hidden

    def logits(self, state: Tensor) -> Tensor:
        """Compute this rank's logits [S, n] over `ids` from hidden states [S, H]."""
        logits: Tensor = self.model.head(state)
        # Padding tokens of the smaller model's head are no tokens of the target.
        return logits[:, : self.logit_shard.width].contiguous()

    def write_cache(self, ids: Tensor, state: Tensor, step: StepContext) -> None:
        """Run all layers: each writes its part of the cache."""
        self(ids, state, step)

    def finish(self) -> None:
        """Do nothing."""

    def source(self) -> Source:
        """Return its own checkpoint."""
        return target_source(self.checkpoint, self.model, None, self.weight_format)


def build(options: Any, checkpoint: Checkpoint, target: Any, build: BuildContext) -> DraftModule:
    """Build the folder's model without weights.

    Raises CheckpointError where it cannot be built, and ConfigError where its tokenizer differs.
    """
    folder = options.folder
    check_whole(folder)
    draft = Checkpoint.read(folder)
    if build.tensors is not None:  # random weights need no tokenizer
        check_tokenizers(draft, checkpoint)
    weight_format = read_weight_format(draft.quantization(), None)
    tensors = None if build.tensors is None else draft.tensors()
    context = build.for_checkpoint(tensors, draft.prefixes, weight_format)
    context.name_prefix = "draft."
    model = build_model(draft.raw, context)
    return DraftModel(draft, model, weight_format, target.config.vocab_size, build.device)


def check_whole(folder: Path) -> None:
    """Raise ConfigError where the folder has a module for another method."""
    remedy = "Name the folder of a whole model: config.json and *.safetensors."
    c = ConfigReader(read_config(folder, remedy))
    named = c.get("architectures", list, [])
    known = DRAFTER_ARCHITECTURES
    methods = {name: known[name] for name in map(str, named) if name in known}
    if not methods and HEAD_SETTING in c.raw:
        methods[f"head, with a {HEAD_SETTING}"] = "eagle3"
    for name, method in methods.items():
        raise ConfigError(
            f"speculative_config model={str(folder)!r} is not allowed: it is a {name}; "
            f'allowed: a whole model. Add "method": "{method}".'
        )


def check_tokenizers(draft: Checkpoint, target: Checkpoint) -> None:
    """Raise ConfigError unless both folders' tokenizer.json map tokens to equal ids."""
    texts = []
    for checkpoint in (draft, target):
        tokens = token_texts(checkpoint.folder)
        if tokens is None:
            raise ConfigError(
                f"speculative_config model cannot be compared: {checkpoint.folder} has no "
                "tokenizer.json; allowed: a draft model and a target with equal ones. Add it."
            )
        texts.append(tokens)
    differing = sorted(set(texts[0].items()) ^ set(texts[1].items()))
    if differing:
        number = differing[0][0]
        here, there = (text.get(number) for text in texts)
        raise ConfigError(
            f"speculative_config model={str(draft.folder)!r} has another tokenizer than "
            f"{target.folder}: token {number} is {here!r} there and {there!r} here; allowed: the "
            "same tokenizer. Choose a draft model of the same family."
        )


def passes(rows: int, tokens: int, num_drafts: int) -> tuple[int, ...]:
    """Return the tokens of each pass: the step's, the rows' last tokens, all drafts but the
    last.
    """
    return (tokens, *[rows] * num_drafts)


class DraftModelDrafter(ChainDrafter):
    """Chain drafter whose module reads each token at the token's own position."""

    shift = 1

    def write_cache(self, step: StepContext, next_tokens: Tensor, state: Tensor) -> None:
        """Write the keys and values of the step's tokens, each at its own position."""
        self.context.module.write_cache(step.token_ids, state, step)

    def first_states(
        self, step: StepContext, next_tokens: Tensor, last: Tensor, state: Tensor
    ) -> Tensor:
        """Write the cache of the step's tokens, then return the states of the rows' last tokens.

        drafts[:, 0] of a row contains its last token until the first draft overwrites it.
        """
        self.write_cache(step, next_tokens, state)
        next_step = self.next_step(step, next_tokens[last], 0, shift=0)
        states: Tensor = self.context.module(next_step.token_ids, state[last], next_step)
        return states


def create(context: DraftContext) -> DraftModelDrafter:
    """Return the drafter."""
    return DraftModelDrafter(context)
