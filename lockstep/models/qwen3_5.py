"""Qwen3.5 and Qwen3.6, dense: Gated DeltaNet and gated attention in turn, and the MTP module."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import CheckpointError, choice_error
from lockstep.layers.attention import GatedAttention
from lockstep.layers.build import Build
from lockstep.layers.gated_delta_net import GatedDeltaNet
from lockstep.layers.linear import Embedding, Head, Linear
from lockstep.layers.mlp import GatedMLP
from lockstep.layers.norm import RMSNorm
from lockstep.layers.rotary import Rotary
from lockstep.models.reading import ConfigReader
from lockstep.step import Step

PREFIXES = ("model.language_model.", "model.")
IGNORED = ("model.visual.",)
DRAFT_PREFIX = "mtp."


@dataclass(frozen=True)
class Config:
    """The settings that decide the math."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    eps: float
    theta: float
    rotary_width: int
    max_positions: int
    tied: bool
    draft_layers: int

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Config":
        """From config.json. Raises CheckpointError on what is missing or not built."""
        c = ConfigReader(raw)
        c.only("hidden_act", "silu", default="silu")
        c.only("attention_bias", False, default=False)
        c.only("attn_output_gate", True, default=True)
        c.only("output_gate_type", "swish", "silu", default="swish")
        c.only("mamba_ssm_dtype", "float32", default="float32")
        c.only("mtp_use_dedicated_embeddings", False, default=False)
        c.only("layer_scale", False, None, default=None)
        c.only("quantization_config", None, default=None)
        c.only("rope_scaling", None, default=None)
        rope = ConfigReader(c.get("rope_parameters", dict))
        rope.only("rope_type", "default", default="default")
        head_dim = c.size("head_dim", 256)
        return cls(
            vocab_size=c.size("vocab_size"),
            hidden_size=c.size("hidden_size"),
            intermediate_size=c.size("intermediate_size"),
            layer_types=_layer_types(c),
            heads=c.size("num_attention_heads"),
            kv_heads=c.size("num_key_value_heads", divides="num_attention_heads"),
            head_dim=head_dim,
            key_heads=c.size("linear_num_key_heads", divides="linear_num_value_heads"),
            value_heads=c.size("linear_num_value_heads"),
            key_dim=c.size("linear_key_head_dim"),
            value_dim=c.size("linear_value_head_dim"),
            kernel=c.size("linear_conv_kernel_dim"),
            eps=c.get("rms_norm_eps", float),
            theta=rope.get("rope_theta", float),
            rotary_width=_rotary_width(c, rope, head_dim),
            max_positions=c.size("max_position_embeddings"),
            tied=c.get("tie_word_embeddings", bool, False),
            draft_layers=c.only("mtp_num_hidden_layers", 0, 1, default=0),
        )


def _layer_types(c: ConfigReader) -> tuple[str, ...]:
    """The kind of every layer: full attention every Nth where the checkpoint does not list them."""
    layers, every = c.size("num_hidden_layers"), c.size("full_attention_interval", 4)
    kinds = [("linear", "full")[(i + 1) % every == 0] + "_attention" for i in range(layers)]
    found = c.get("layer_types", list, kinds)
    for kind in found:
        ConfigReader({"layer_types": kind}).only("layer_types", *MIXERS)
    if len(found) != layers:
        allowed = f"{layers} entries (num_hidden_layers)"
        remedy = "Mend config.json."
        raise choice_error(CheckpointError, "config.json layer_types", found, allowed, remedy)
    return tuple(found)


def _rotary_width(c: ConfigReader, rope: ConfigReader, head_dim: int) -> int:
    """How many of a head's dimensions are rotated, in pairs."""
    outer = c.get("partial_rotary_factor", float, 0.25)
    partial = rope.get("partial_rotary_factor", float, outer)
    width = int(head_dim * partial)
    if not 2 <= width <= head_dim or width % 2:
        name, allowed = "config.json partial_rotary_factor", f"an even share of head_dim={head_dim}"
        raise choice_error(CheckpointError, name, partial, allowed, "Mend config.json.")
    return width


def _attention(c: Config, build: Build, rotary: Rotary) -> nn.Module:
    return GatedAttention(build, c.hidden_size, c.heads, c.kv_heads, c.head_dim, rotary, c.eps)


def _delta_net(c: Config, build: Build, rotary: Rotary) -> nn.Module:
    dims = (c.key_heads, c.value_heads, c.key_dim, c.value_dim)
    return GatedDeltaNet(build, c.hidden_size, *dims, c.kernel, c.eps)


MIXERS = {"linear_attention": _delta_net, "full_attention": _attention}


class Block(nn.Module):
    """x += mixer(norm x); x += mlp(norm x). What stands before and after the mixer is row-local."""

    def __init__(self, c: Config, build: Build, kind: str, rotary: Rotary) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(build, c.hidden_size, c.eps, offset=1.0)
        self.mixer = MIXERS[kind](c, build, rotary)
        self.mlp_norm = RMSNorm(build, c.hidden_size, c.eps, offset=1.0)
        self.mlp = GatedMLP(build, c.hidden_size, c.intermediate_size)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return self.after(x, self.mixer(self.before(x), step))

    def before(self, x: Tensor) -> Tensor:
        """x [T, H] -> the mixer's input [T, H]."""
        return self.mixer_norm(x)

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The residual x and the mixer's output, each [T, H] -> the block's output [T, H]."""
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """The target: embedding, blocks, final norm, head."""

    def __init__(self, config: Config, build: Build) -> None:
        super().__init__()
        c = self.config = config
        self.embed = Embedding(build, c.vocab_size, c.hidden_size)
        rotary = Rotary(build, c.rotary_width, c.theta)
        self.blocks = nn.ModuleList(
            Block(c, build.at(f"layers.{i}"), kind, rotary) for i, kind in enumerate(c.layer_types)
        )
        self.norm = RMSNorm(build.at("norm"), c.hidden_size, c.eps, offset=1.0)
        own = build.matrix(c.vocab_size, c.hidden_size) if not c.tied else self.embed.weight
        self.head = Head(build.at("head"), own)

    def forward(self, step: Step) -> tuple[Tensor, tuple[Tensor, ...]]:
        """-> hidden [T, H] after the final norm, taps (none)."""
        x = self.embed(step.token_ids)
        for block in self.blocks:
            x = block(x, step)
        return self.norm(x), ()

    def logits(self, hidden: Tensor, step: Step) -> Tensor:
        """hidden [T, H] -> [N, V] fp32 at the step's logit rows."""
        return self.head(hidden[step.logit_rows])

    def weights(self) -> dict[str, Tensor]:
        """Checkpoint name, less its prefix -> the tensor that it fills."""
        table: dict[str, Tensor] = {
            "embed_tokens.weight": self.embed.weight,
            "norm.weight": self.norm.weight,
        }
        if not self.config.tied:
            table["lm_head.weight"] = self.head.weight
        for i, block in enumerate(self.blocks):
            table.update({f"layers.{i}.{k}": v for k, v in block_weights(block).items()})
        return table


def block_weights(block: nn.Module) -> dict[str, Tensor]:
    """The checkpoint names of one decoder layer."""
    mixer: Any = block.mixer
    mlp: Any = block.mlp
    table: dict[str, Tensor] = {
        "input_layernorm.weight": block.mixer_norm.weight,
        "post_attention_layernorm.weight": block.mlp_norm.weight,
        "mlp.gate_proj.weight": mlp.gate_up.part(0),
        "mlp.up_proj.weight": mlp.gate_up.part(1),
        "mlp.down_proj.weight": mlp.down.weight,
    }
    if isinstance(mixer, GatedAttention):
        own: dict[str, Tensor] = {
            f"{n}_proj.weight": mixer.qkv.part(i) for i, n in enumerate("qkv")
        }
        own["o_proj.weight"] = mixer.out.weight
        own.update({"q_norm.weight": mixer.q_norm.weight, "k_norm.weight": mixer.k_norm.weight})
        return table | {f"self_attn.{k}": v for k, v in own.items()}
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    own = {f"{n}.weight": mixer.in_proj.part(i) for i, n in enumerate(names)}
    own.update({"conv1d.weight": mixer.conv, "A_log": mixer.a_log, "dt_bias": mixer.dt_bias})
    own.update({"norm.weight": mixer.norm.weight, "out_proj.weight": mixer.out.weight})
    return table | {f"linear_attn.{k}": v for k, v in own.items()}


class Draft(nn.Module):
    """The MTP module: one full-attention block over fc([norm(embedding), norm(hidden)]).

    Shares embedding and head with the target; `hidden` of position i and the token after it give
    the draft of the token after that.
    """

    def __init__(self, target: Model, build: Build) -> None:
        super().__init__()
        c = target.config
        self.embed = target.embed
        self.embed_norm = RMSNorm(build, c.hidden_size, c.eps, offset=1.0)
        self.hidden_norm = RMSNorm(build, c.hidden_size, c.eps, offset=1.0)
        self.fc = Linear(build, 2 * c.hidden_size, c.hidden_size)
        rotary = Rotary(build, c.rotary_width, c.theta)
        self.block = Block(c, build, "full_attention", rotary)
        self.norm = RMSNorm(build, c.hidden_size, c.eps, offset=1.0)
        self.head = Head(build, target.head.weight)

    def forward(self, ids: Tensor, hidden: Tensor, step: Step) -> Tensor:
        """ids [T], hidden [T, H] -> hidden [T, H] of the draft, fed back for the next one."""
        x = torch.cat([self.embed_norm(self.embed(ids)), self.hidden_norm(hidden)], dim=-1)
        return self.norm(self.block(self.fc(x), step))

    def weights(self) -> dict[str, Tensor]:
        """Checkpoint name, less DRAFT_PREFIX -> the tensor that it fills."""
        own = {f"layers.0.{k}": v for k, v in block_weights(self.block).items()}
        return own | {
            "fc.weight": self.fc.weight,
            "pre_fc_norm_embedding.weight": self.embed_norm.weight,
            "pre_fc_norm_hidden.weight": self.hidden_norm.weight,
            "norm.weight": self.norm.weight,
        }
