"""Qwen3.5 and Qwen3.6, dense: Gated DeltaNet and gated attention in turn, and the MTP module."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lockstep.layers.attention import Attention
from lockstep.layers.build import Build
from lockstep.layers.gated_delta_net import GatedDeltaNet
from lockstep.layers.linear import Head, Linear
from lockstep.layers.norm import AddRMSNorm, RMSNorm
from lockstep.layers.rotary import Rotary
from lockstep.models.decoder import (
    Block,
    Decoder,
    DecoderConfig,
    attention,
    attention_weights,
    read_common,
)
from lockstep.models.reading import MOST_LAYERS, ConfigReader
from lockstep.step import Step

PREFIXES = ("model.language_model.", "model.")
IGNORED = ("model.visual.",)
DRAFT_PREFIX = "mtp."


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The settings that decide the math."""

    norm_offset: ClassVar[float] = 1.0

    layer_types: tuple[str, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    draft_layers: int

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Config":
        """From config.json. Raises CheckpointError on what is missing or not built."""
        c = ConfigReader(raw)
        c.only("attn_output_gate", True, default=True)
        c.only("output_gate_type", "swish", "silu", default="swish")
        c.only("mamba_ssm_dtype", "float32", default="float32")
        c.only("mtp_use_dedicated_embeddings", False, default=False)
        c.only("layer_scale", False, None, default=None)
        every, layers = (
            c.size("full_attention_interval", 4),
            c.size("num_hidden_layers", most=MOST_LAYERS),
        )
        kinds = [("linear", "full")[(i + 1) % every == 0] + "_attention" for i in range(layers)]
        key_heads, value_heads = c.size("linear_num_key_heads"), c.size("linear_num_value_heads")
        c.need(value_heads % key_heads == 0, "linear_num_value_heads", "multiples of key heads")
        return cls(
            layer_types=c.layer_types(layers, {"linear_attention", "full_attention"}, kinds),
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=c.size("linear_key_head_dim"),
            value_dim=c.size("linear_value_head_dim"),
            kernel=c.size("linear_conv_kernel_dim"),
            draft_layers=c.only("mtp_num_hidden_layers", 0, 1, default=0),
            **read_common(c, head_dim=256, partial=0.25),
        )


class Model(Decoder):
    """Embedding, blocks, final norm, head. Every few layers attend, the others recur."""

    config: Config

    def __init__(self, config: Config, build: Build) -> None:
        super().__init__(config, build, len(config.layer_types))

    def mixer(self, index: int, build: Build, rotary: Rotary) -> nn.Module:
        """What layer_types says."""
        c = self.config
        if c.layer_types[index] == "full_attention":
            return attention(c, build, rotary, gated=True)
        dims = (c.key_heads, c.value_heads, c.key_dim, c.value_dim)
        return GatedDeltaNet(build, c.hidden_size, *dims, c.kernel, c.eps)

    def mixer_weights(self, mixer: nn.Module) -> dict[str, Tensor]:
        """self_attn.* or linear_attn.*"""
        return attention_weights(mixer) if isinstance(mixer, Attention) else delta_weights(mixer)


def delta_weights(mixer: GatedDeltaNet) -> dict[str, Tensor]:
    """Checkpoint name within the layer -> the tensor of a Gated DeltaNet that it fills."""
    return {
        "linear_attn.in_proj_qkv.weight": mixer.in_proj.part(0),
        "linear_attn.in_proj_z.weight": mixer.in_proj.part(1),
        "linear_attn.in_proj_b.weight": mixer.in_proj.part(2),
        "linear_attn.in_proj_a.weight": mixer.in_proj.part(3),
        "linear_attn.conv1d.weight": mixer.conv,
        "linear_attn.A_log": mixer.a_log,
        "linear_attn.dt_bias": mixer.dt_bias,
        "linear_attn.norm.weight": mixer.norm.weight,
        "linear_attn.out_proj.weight": mixer.out.weight,
    }


class Draft(nn.Module):
    """The MTP module: one full-attention block over fc([norm(embedding), norm(hidden)]).

    Shares embedding and head with the target; `hidden` of position i and the token after it give
    the draft of the token after that. ids [V']: the tokens that its head shall know, ascending;
    None: all of the target's.
    """

    def __init__(self, target: Model, build: Build, ids: Tensor | None = None) -> None:
        super().__init__()
        c = target.config
        self.ids = ids
        self.embed = target.embed
        self.embed_norm = RMSNorm(build, c.hidden_size, c.eps, c.norm_offset)
        self.hidden_norm = RMSNorm(build, c.hidden_size, c.eps, c.norm_offset)
        self.fc = Linear(build, 2 * c.hidden_size, c.hidden_size)
        rotary = Rotary(build, c.rotary_width, c.theta)
        self.block = Block(c, build, attention(c, build, rotary, gated=True))
        self.norm = AddRMSNorm(build, c.hidden_size, c.eps, c.norm_offset)
        self.head = Head(build, target.head.weight)
        self.build = build

    def finish(self) -> None:
        """Where it knows only some tokens, its head becomes a copy of their rows of the target's.
        To be called once, when the target's weights are loaded."""
        if self.ids is None:
            return
        full = self.head.weight
        rows = self.build.matrix(len(self.ids), full.shape[1])
        rows.data.copy_(full[self.ids])
        self.head = Head(self.build, rows)

    @property
    def head_bytes(self) -> int:
        """Bytes of its own copy of rows of the head; 0 where it shares the target's."""
        weight = self.head.weight
        return 0 if self.ids is None else weight.numel() * weight.itemsize

    def begin(self, hidden: Tensor, aux_hidden_states: tuple[Tensor, ...]) -> Tensor:
        """The target's hidden states [T, H], as they are."""
        return hidden

    def forward(self, ids: Tensor, state: Tensor, step: Step) -> Tensor:
        """ids [T], state [T, H] -> state [T, H] of the draft, fed back for the next one."""
        return self.norm(*self.block(self._mixed(ids, state), None, step))[1]

    def logits(self, state: Tensor) -> Tensor:
        """state [S, H] -> [S, V'] over `ids`."""
        return self.head(state)

    def keep(self, ids: Tensor, state: Tensor, step: Step) -> None:
        """Writes the keys and values of these tokens alone, where no draft is wanted."""
        self.block.mixer.keep(self.block.pre_mixer(self._mixed(ids, state), None)[1], step)

    def _mixed(self, ids: Tensor, hidden: Tensor) -> Tensor:
        parts = [self.embed_norm(self.embed(ids)), self.hidden_norm(hidden)]
        return self.fc(torch.cat(parts, dim=-1))

    def weights(self) -> dict[str, Tensor]:
        """Checkpoint name, less DRAFT_PREFIX -> the tensor that it fills."""
        own = self.block.weights() | attention_weights(self.block.mixer)
        return {f"layers.0.{name}": tensor for name, tensor in own.items()} | {
            "fc.weight": self.fc.weight,
            "pre_fc_norm_embedding.weight": self.embed_norm.weight,
            "pre_fc_norm_hidden.weight": self.hidden_norm.weight,
            "norm.weight": self.norm.weight,
        }
