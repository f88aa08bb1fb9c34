"""The module that MTP drafts with, in every family: layers over the last hidden state and the token
behind it (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Head, Linear
from lockstep.layers.norm import AddRMSNorm, RMSNorm
from lockstep.layers.sharding import Columns
from lockstep.models.decoder import Block, Decoder, Sublayer
from lockstep.step import StepContext


class MTPModule(nn.Module, ABC):
    """Its layers over a projection of [norm(embedding), norm(hidden)], and a norm.

    Shares embedding and head with the target; `hidden` of position i and the token after it give
    the draft of the token after that. ids [V']: the tokens that its head shall know, ascending;
    None: all of the target's. module: the checkpoint's name of the one that `projection` is in.
    """

    def __init__(
        self,
        target: Decoder,
        build: BuildContext,
        ids: Tensor | None,
        *,
        module: str,
        projection: str,
    ) -> None:
        super().__init__()
        c = target.config
        self.ids = ids
        self.taps: tuple[int, ...] = ()
        self.embed = target.embed
        self.embed_norm = RMSNorm(build, c.hidden_size, c.eps, c.norm_offset)
        self.hidden_norm = RMSNorm(build, c.hidden_size, c.eps, c.norm_offset)
        at = build.at(build.layer, module)
        self.fc = Linear(at, 2 * c.hidden_size, {projection: Columns.of(c.hidden_size)})
        self.blocks = nn.ModuleList(Block(*sublayers) for sublayers in self.layers(target, build))
        self.norm = AddRMSNorm(build, c.hidden_size, c.eps, c.norm_offset)
        known = c.vocab_size if ids is None else len(ids)
        if ids is None:
            self.head = Head(build, Columns.of(known), c.hidden_size, target.head.loaded)
        else:
            self.head = Head(build, known, c.hidden_size, build.matrix(known, c.hidden_size))
        self.whole = (target.head,)
        """The target's head, no part of this module."""

    @abstractmethod
    def layers(self, target: Decoder, build: BuildContext) -> Iterator[tuple[Sublayer, ...]]:
        """Return the sublayers of each layer.

        The first sublayer of the first layer is a mixer with keep(), and there is no other mixer.
        """

    def finish(self) -> None:
        """Where it knows only some tokens, their rows of the target's head become its own. To be
        called once, when the target's weights are loaded."""
        if self.ids is not None:
            assert self.head.weight is not None, "rows of its own are not packed"
            self.whole[0].gather(self.ids, self.head.weight.data)

    @property
    def head_bytes(self) -> int:
        """Bytes of its own copy of rows of the head; 0 where it shares the target's."""
        return 0 if self.ids is None else self.head.stored.nbytes

    def source(self) -> None:
        """Its weights stand in the target's checkpoint."""

    def begin(self, hidden: Tensor, aux_hidden_states: tuple[Tensor, ...]) -> Tensor:
        """The target's hidden states [T, H], as they are."""
        return hidden

    def forward(self, ids: Tensor, state: Tensor, ctx: StepContext) -> Tensor:
        """ids [T], state [T, H] -> state [T, H] of the draft, fed back for the next one."""
        x = self._mixed(ids, state)
        delta = None
        for block in self.blocks:
            x, delta, _ = block(x, delta, ctx)
        return self.norm(x, delta)[1]

    def logits(self, state: Tensor) -> Tensor:
        """state [S, H] -> [S, V'] over `ids`."""
        return self.head(state)

    def keep(self, ids: Tensor, state: Tensor, ctx: StepContext) -> None:
        """Writes what the mixer keeps of these tokens alone, where no draft is wanted."""
        first: Any = self.blocks[0]
        _, normed = first.tokenwise(self._mixed(ids, state), None, 0, ctx)
        first.sublayers[0].body.keep(normed, ctx)

    def _mixed(self, ids: Tensor, hidden: Tensor) -> Tensor:
        parts = [self.embed_norm(self.embed(ids)), self.hidden_norm(hidden)]
        return self.fc(torch.cat(parts, dim=-1))
