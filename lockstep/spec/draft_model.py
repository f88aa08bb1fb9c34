"""A draft model: a smaller checkpoint with the same tokenizer, which drafts in a chain (Leviathan
et al., arXiv 2211.17192).

It reads every token at that token's own position, as it would alone; its keys and values stand on
the target's pages, so that prefixes found there are its own as well. A model that recurs has its
state in the rows' slots, where snapshots hold both. What is kept of a row, and how many tokens its
state holds, is the same for both, since both see every step.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
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
NO_MODELS = {
    "DFlashDraftModel": "dflash",
    "Eagle3DeepseekV2ForCausalLM": "eagle3",
    "Eagle3DraftModel": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "LlamaForCausalLMEagle3": "eagle3",
}
"""What architectures may name that is no whole model -> the method that drafts with it."""
HEAD_SETTING = "draft_vocab_size"
"""A setting of heads alone: the authors' name a whole model's architecture."""


def refusal(checkpoint: Checkpoint) -> str | None:
    """Why this checkpoint alone cannot be drafted for."""
    return "it needs a smaller model, which speculative_config names as its model"


class DraftModel(nn.Module):
    """A whole model as a DraftModule: no state goes from one draft to the next but its cache.

    vocab: the target's tokens. Of those it knows the first ones, all that it has.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: Any,
        packing: WeightFormat | None,
        vocab: int,
        device: str,
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.model = model
        self.packing = packing
        self.taps: tuple[int, ...] = ()
        self.known = min(vocab, model.config.vocab_size)
        self.ids = None if self.known == vocab else torch.arange(self.known, device=device)

    @property
    def head_bytes(self) -> int:
        """Bytes of its head."""
        return int(self.model.head.stored.nbytes)

    def begin(self, hidden: Tensor, aux_hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Nothing of the target's hidden states is read."""
        return hidden

    def forward(self, ids: Tensor, state: Tensor, step: StepContext) -> Tensor:
        """ids [T] -> its hidden states [T, H]. Tokens that it lacks are read as its last one."""
        found: Tensor = self.model(replace(step, token_ids=ids.clamp_max(self.known - 1)))[0]
        return found

    def logits(self, state: Tensor) -> Tensor:
        """Hidden states [S, H] -> [S, V'] over `ids`."""
        logits: Tensor = self.model.head(state)
        return logits[:, : self.known].contiguous()

    def keep(self, ids: Tensor, state: Tensor, step: StepContext) -> None:
        """All of it but the head runs: every layer keeps something."""
        self(ids, state, step)

    def finish(self) -> None:
        """Nothing is left to do."""

    def source(self) -> Source:
        """Its own checkpoint."""
        return target_source(self.checkpoint, self.model, None, self.packing)


def build(options: Any, checkpoint: Checkpoint, target: Any, build: BuildContext) -> DraftModule:
    """The folder's model, not loaded yet. Raises CheckpointError where it cannot be built, and
    ConfigError where it has another tokenizer."""
    folder = options.folder
    check_whole(folder)
    own = Checkpoint.read(folder)
    if build.tensors is not None:
        check_tokenizers(own, checkpoint)
    packing = read_weight_format(own.quantization(), None)
    tensors = None if build.tensors is None else own.tensors()
    apart = build.reading(tensors, own.prefixes, packing)
    apart.named = "draft."
    model = build_model(own.raw, apart)
    return DraftModel(own, model, packing, target.config.vocab_size, build.device)


def check_whole(folder: Path) -> None:
    """Raises ConfigError where the folder holds what another method drafts with."""
    remedy = "Name the folder of a whole model: config.json and *.safetensors."
    c = ConfigReader(read_config(folder, remedy))
    named = c.get("architectures", list, [])
    methods = {name: NO_MODELS[name] for name in map(str, named) if name in NO_MODELS}
    if not methods and HEAD_SETTING in c.raw:
        methods[f"head, with a {HEAD_SETTING}"] = "eagle3"
    for name, method in methods.items():
        raise ConfigError(
            f"speculative_config model={str(folder)!r} is not allowed: it is a {name}; "
            f'allowed: a whole model. Add "method": "{method}".'
        )


def check_tokenizers(own: Checkpoint, target: Checkpoint) -> None:
    """Raises ConfigError unless both folders' tokenizer.json give every token one number."""
    texts = []
    for checkpoint in (own, target):
        found = token_texts(checkpoint.folder)
        if found is None:
            raise ConfigError(
                f"speculative_config model cannot be compared: {checkpoint.folder} has no "
                "tokenizer.json; allowed: a draft model and a target with equal ones. Add it."
            )
        texts.append(found)
    differing = sorted(set(texts[0].items()) ^ set(texts[1].items()))
    if differing:
        number = differing[0][0]
        here, there = (text.get(number) for text in texts)
        raise ConfigError(
            f"speculative_config model={str(own.folder)!r} has another tokenizer than "
            f"{target.folder}: token {number} is {here!r} there and {there!r} here; allowed: the "
            "same tokenizer. Choose a draft model of the same family."
        )


def passes(rows: int, tokens: int, count: int) -> tuple[int, ...]:
    """The step's tokens, the rows' last ones, and all drafts but the last."""
    return (tokens, *[rows] * count)


class DraftModelDrafter(ChainDrafter):
    """Its module reads each token at the token's own position."""

    behind = 1

    def keep(self, step: StepContext, after: Tensor, state: Tensor) -> None:
        """The keys and values of the step's tokens, each at its own position."""
        self.context.module.keep(step.token_ids, state, step)

    def first(self, step: StepContext, after: Tensor, last: Tensor, state: Tensor) -> Tensor:
        """keep(), then the step of the rows' last tokens; its place of drafts is overwritten by the
        first of them."""
        self.keep(step, after, state)
        one = self.on(step, after[last], 0, behind=0)
        found: Tensor = self.context.module(one.token_ids, state[last], one)
        return found


def create(context: DraftContext) -> DraftModelDrafter:
    """The drafter of this file."""
    return DraftModelDrafter(context)
