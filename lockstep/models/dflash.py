"""DFlash draft model: a few layers that predict a block of masked tokens in one forward pass, from
auxiliary hidden states of the target (Chen et al., DFlash, arXiv 2602.06036).

Each layer has one key and one value per token that the target has computed, projected from the
auxiliary hidden states. A block is the row's last token followed by mask tokens, at consecutive
positions. Its tokens attend to those keys and to each other. Tensor names and settings are those of
the authors' files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.kernels.sampling import LogitShard
from lockstep.layers.attention import Attention
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import GatheredLinear, Head, Target
from lockstep.layers.norm import AddRMSNorm, RMSNorm
from lockstep.layers.sharding import Columns
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.config_reader import DRAFTER_REMEDY, MAX_LAYERS, ConfigReader
from lockstep.models.decoder import (
    UNUSED_WINDOW,
    Block,
    Decoder,
    DecoderConfig,
    Sublayer,
    mlp_sublayer,
    read_attention_layers,
    read_common,
)
from lockstep.models.json_files import read_config
from lockstep.models.loader import Source, weight_specs
from lockstep.step import StepContext

ARCHITECTURE = "DFlashDraftModel"
MAX_BLOCK_SIZE = 1024
"""Maximum tokens of a block, far above any real checkpoint."""
INNER = "dflash_config"


class BlockCheckpoint(Checkpoint):
    """Checkpoint of a draft model. raw: its settings."""

    prefixes = ("model.",)

    @classmethod
    def at(cls, folder: Path) -> "BlockCheckpoint":
        """Read the checkpoint of a folder.

        Raises:
            CheckpointError: config.json is missing or unsound.
        """
        remedy = "Name the folder of a DFlash draft model: config.json and *.safetensors."
        return cls(folder, read_config(folder, remedy))


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Settings of a block draft model.

    block: tokens of a block, the row's last token included. mask: token id of positions to draft.
    aux_hidden_layers: see Decoder.
    """

    layers: int
    block: int
    mask: int
    aux_hidden_layers: tuple[int, ...]

    @classmethod
    def read(cls, checkpoint: BlockCheckpoint, target: Decoder) -> "Config":
        """Read the settings.

        Raises:
            CheckpointError: a setting is missing, not supported, or does not fit the target.
        """
        c = ConfigReader(checkpoint.raw, file=str(checkpoint.folder / "config.json"))
        c.one_of("speculators_model_type", None, default=None)
        inner = c.part(INNER)
        named = c.get("architectures", list, [ARCHITECTURE])
        c.need(named == [ARCHITECTURE], "architectures", f"[{ARCHITECTURE!r}]")
        c.one_of("attention_bias", False, default=False)
        c.one_of("is_causal", False, None, default=None)
        for name in ("causal", "causal_head"):
            inner.one_of(name, False, None, default=None)
        inner.one_of("attention_mode", "gqa", "mha", None, default=None)
        inner.one_of("projector_type", None, default=None)
        inner.one_of("final_logit_softcapping", None, default=None)
        for name in ("output_multiplier", "input_embedding_scale"):
            inner.one_of(name, 1, 1.0, None, default=None)
        width = target.config.hidden_size
        vocab = target.config.vocab_size
        c.need(c.size("hidden_size") == width, "hidden_size", f"the target's, {width}")
        c.need(c.size("vocab_size") == vocab, "vocab_size", f"the target's, {vocab}")
        depth = len(target.blocks)
        target_layers = c.size("num_target_layers", depth)
        c.need(target_layers == depth, "num_target_layers", f"the target's, {depth}")
        layers = read_attention_layers(c)
        mask = inner.get("mask_token_id", int)
        inner.need(0 <= mask < vocab, "mask_token_id", f"0 to {vocab - 1}, the target's tokens")
        sized = inner if "block_size" in inner.raw else c
        block = sized.size("block_size", max_value=MAX_BLOCK_SIZE)
        sized.need(block > 1, "block_size", "2 or more")
        config = cls(
            layers=layers,
            block=block,
            mask=mask,
            aux_hidden_layers=_aux_hidden_layers(inner, layers, depth),
            **read_common(c, head_dim=128),
        )
        inner.refuse_unread(UNUSED_WINDOW, DRAFTER_REMEDY)
        c.refuse_unread(UNUSED_WINDOW, DRAFTER_REMEDY)
        return config


def _aux_hidden_layers(c: ConfigReader, layers: int, depth: int) -> tuple[int, ...]:
    """Return Decoder.aux_hidden_layers: the residuals after the layers in target_layer_ids.

    Without the setting, one per layer of the draft model, spread from the target's second layer to
    its last but two. depth: layers of the target.
    """
    last = max(depth - 3, 1)
    spread = [round(1 + i * (last - 1) / max(layers - 1, 1)) for i in range(layers)]
    layer_ids = c.get("target_layer_ids", list, spread if layers > 1 else [depth // 2])
    is_list = 0 < len(layer_ids) <= MAX_LAYERS and all(type(i) is int for i in layer_ids)
    ascending = is_list and all(a < b for a, b in zip(layer_ids, layer_ids[1:], strict=False))
    sound = ascending and 0 <= layer_ids[0] and layer_ids[-1] < depth
    c.need(sound, "target_layer_ids", f"ascending numbers of layers, 0 to {depth - 1}")
    return tuple(i + 1 for i in layer_ids)


class BlockAttention(Attention):
    """Attention in which every token of a block attends to the whole block and all tokens before
    it.

    To the op a block [S B, H] is one token, its last one, with B times the heads: keys are read
    once.
    """

    def _mix(self, qkv: Tensor, ctx: StepContext) -> Tensor:
        q = self._rotate_and_cache(qkv, ctx)
        rows = ctx.starts.shape[0]
        group = self.heads // self.kv_heads
        blocks = q.view(rows, -1, self.kv_heads, group, self.head_dim)
        mixed = self.attend(
            blocks.transpose(1, 2).reshape(rows, -1, self.head_dim),
            self.k_cache,
            self.v_cache,
            ctx.page_table,
            ctx.cu_seqlens,
            ctx.starts,
            1,
            self.scale,
        )
        outputs = mixed.view(rows, self.kv_heads, -1, group, self.head_dim).transpose(1, 2)
        return outputs.reshape(len(qkv), -1)


class BlockDraftModel(nn.Module):
    """Block draft model, which shares embedding and head with the target.

    hidden_norm(fc(auxiliary hidden states)) gives the keys and values of computed tokens; the
    layers read a block.
    """

    def __init__(
        self, target: Decoder, build: BuildContext, c: Config, checkpoint: BlockCheckpoint
    ) -> None:
        super().__init__()
        self.config = c
        self.checkpoint = checkpoint
        self.aux_hidden_layers = c.aux_hidden_layers
        self.ids: Tensor | None = None
        self.embed = target.embed
        top = build.for_layer(build.layer, "")
        width = len(c.aux_hidden_layers) * c.hidden_size
        self.fc = GatheredLinear(top, width, {"fc": Columns.of(c.hidden_size)})
        self.hidden_norm = RMSNorm(build, c.hidden_size, c.eps)
        self.blocks = nn.ModuleList(Block(*sublayers) for sublayers in self.layers(build))
        self.norm = AddRMSNorm(build, c.hidden_size, c.eps)
        self.head = Head(build, c.vocab_size, c.hidden_size, target.head)

    def layers(self, build: BuildContext) -> Iterator[tuple[Sublayer, ...]]:
        """Yield block attention and an MLP for every layer."""
        c = self.config
        rotary = c.rope.rotary(build)
        sizes = (c.hidden_size, c.heads, c.kv_heads, c.head_dim)
        for i in range(c.layers):
            layer_build = build.for_layer(f"layers.{i}")
            attention = layer_build.for_submodule("self_attn")
            mixer = BlockAttention(attention, *sizes, rotary=rotary, qk_norm=True, eps=c.eps)
            yield (
                Sublayer(layer_build, c, "input_layernorm", "self_attn", mixer),
                mlp_sublayer(layer_build, c),
            )

    @property
    def logit_shard(self) -> LogitShard:
        """Share of the logits that this rank returns."""
        return self.head.logit_shard

    @property
    def head_bytes(self) -> int:
        """Bytes of an own head: 0, the target's is shared."""
        return 0

    def begin(self, hidden: Tensor, aux_hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Return the state [T, H] that keys and values are computed from."""
        return self.hidden_norm(self.fc(torch.cat(aux_hidden_states, dim=-1), None))

    def forward(self, ids: Tensor, state: Tensor, ctx: StepContext) -> Tensor:
        """Return hidden states [T, H] of the tokens of blocks [T]; state is not read."""
        x = self.embed(ids)
        delta = None
        for block in self.blocks:
            x, delta, _ = block(x, delta, ctx)
        return self.norm(x, delta)[1]

    def logits(self, state: Tensor) -> Tensor:
        """Return this rank's logits [S, n] of state [S, H]."""
        return self.head(state)

    def write_cache(self, ids: Tensor, state: Tensor, ctx: StepContext) -> None:
        """Write the keys and values of computed tokens; ids are not read."""
        for block in self.blocks:
            sublayers: Any = block.sublayers
            sublayers[0].body.write_cache(state, ctx)

    def finish(self) -> None:
        """Do nothing: the target finishes the layers that it shares."""

    def weights(self) -> dict[str, Target]:
        """Map the checkpoint's tensors, by name, to their destinations."""
        table: dict[str, Target] = {
            "hidden_norm.weight": self.hidden_norm.weight,
            "norm.weight": self.norm.weight,
        }
        table |= self.fc.weights()
        for i, block in enumerate(self.blocks):
            table.update({f"layers.{i}.{name}": t for name, t in block.weights().items()})
        return table

    def source(self) -> Source:
        """Return the tensors of the module's checkpoint."""
        return Source(self.checkpoint, weight_specs(self.weights()))
