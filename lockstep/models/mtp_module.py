"""Multi-token prediction (MTP) module of every family.

Its layers read the last hidden state and the next token. Source: DeepSeek-V3, arXiv 2412.19437,
2.2.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.kernels.sampling import LogitShard
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import GatheredLinear, Head
from lockstep.layers.norm import AddRMSNorm, RMSNorm
from lockstep.layers.sharding import Columns
from lockstep.models.decoder import Block, Decoder, Sublayer
from lockstep.step import StepContext


class MTPModule(nn.Module, ABC):
    """MTP draft module: layers over a projection of [norm(embedding), norm(hidden)], and a norm.

    It shares embedding and head with the target. The hidden state of position i and the token after
    it give the draft of the token after that.

    Args:
        ids: the tokens [V'] that its head knows, ascending; None for all of the target's.
        module: the checkpoint's module that contains `projection`.
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
        self.aux_hidden_layers: tuple[int, ...] = ()
        self.embed = target.embed
        self.embed_norm = RMSNorm(build, c.hidden_size, c.eps, c.norm_offset)
        self.hidden_norm = RMSNorm(build, c.hidden_size, c.eps, c.norm_offset)
        layer_build = build.for_layer(build.layer, module)
        self.fc = GatheredLinear(
            layer_build, 2 * c.hidden_size, {projection: Columns.of(c.hidden_size)}
        )
        self.blocks = nn.ModuleList(Block(*sublayers) for sublayers in self.layers(target, build))
        self.norm = AddRMSNorm(build, c.hidden_size, c.eps, c.norm_offset)
        known = c.vocab_size if ids is None else len(ids)
        weight: nn.Parameter | Head = target.head
        if ids is not None:
            weight = build.matrix(len(build.rank.tokens(known)), c.hidden_size)
        self.head = Head(build, known, c.hidden_size, weight)
        # In a tuple, so that nn.Module does not register the target's head as a submodule.
        self.target_head = (target.head,)

    @abstractmethod
    def layers(self, target: Decoder, build: BuildContext) -> Iterator[tuple[Sublayer, ...]]:
        """Return the sublayers of each layer.

        The first sublayer of the first layer is a mixer that has write_cache(). No other sublayer
        is a mixer.
        """

    def finish(self) -> None:
        """Copy the known tokens' rows of the target's head. Call after loading."""
        if self.ids is not None:
            assert self.head.weight is not None, "copied rows are not quantized"
            begin = self.logit_shard.begin
            self.target_head[0].copy_rows(self.ids, self.head.weight.data, begin)

    @property
    def logit_shard(self) -> LogitShard:
        """Share of the logits that this rank returns."""
        return self.head.logit_shard

    @property
    def head_bytes(self) -> int:
        """Bytes of copied head rows; 0 if it shares the target's head."""
        return 0 if self.ids is None else self.head.stored.nbytes

    def source(self) -> None:
        """Return None: the weights are in the target's checkpoint."""

    def begin(self, hidden: Tensor, aux_hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Return the target's hidden states [T, H] unchanged."""
        return hidden

    def forward(self, ids: Tensor, state: Tensor, ctx: StepContext) -> Tensor:
        """Return the next state [T, H] from ids [T] and state [T, H].

        The drafter feeds it back to draft the token after the next.
        """
        x = self._project(ids, state)
        delta = None
        for block in self.blocks:
            x, delta, _ = block(x, delta, ctx)
        return self.norm(x, delta)[1]

    def logits(self, state: Tensor) -> Tensor:
        """Return this rank's logits [S, n] over `ids` of state [S, H]."""
        return self.head(state)

    def write_cache(self, ids: Tensor, state: Tensor, ctx: StepContext) -> None:
        """Write the mixer's cache entries of these tokens without drafting."""
        first: Any = self.blocks[0]
        _, normed = first.tokenwise(self._project(ids, state), None, 0, ctx)
        first.sublayers[0].body.write_cache(normed, ctx)

    def _project(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the projection [T, H] of [norm(embedding), norm(hidden)]."""
        parts = [self.embed_norm(self.embed(ids)), self.hidden_norm(hidden)]
        return self.fc(torch.cat(parts, dim=-1), None)
