"""What the decoders here have in common: settings, blocks, stack and head. Their mixers differ."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from lockstep.layers.attention import Attention
from lockstep.layers.build import Build
from lockstep.layers.linear import Embedding, Head
from lockstep.layers.mlp import GatedMLP
from lockstep.layers.norm import AddRMSNorm
from lockstep.layers.rotary import Rotary
from lockstep.models.reading import ConfigReader
from lockstep.step import Step


@dataclass(frozen=True)
class DecoderConfig:
    """The settings that every decoder has. norm_offset: 1 where norms are stored around zero."""

    norm_offset: ClassVar[float] = 0.0

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    rotary_width: int
    tied: bool


def read_common(c: ConfigReader, head_dim: int, partial: float) -> dict[str, Any]:
    """The fields of DecoderConfig from config.json.

    head_dim and partial, the share of a head that turns, count where the file does not say.
    """
    c.only("hidden_act", "silu", default="silu")
    c.only("attention_bias", False, default=False)
    c.only("quantization_config", None, default=None)
    rope = c.plain_rope()
    heads, kv_heads = c.size("num_attention_heads"), c.size("num_key_value_heads")
    head_dim = c.size("head_dim", head_dim)
    share = rope.get("partial_rotary_factor", float, partial)
    rope.need(0 < share <= 1, "partial_rotary_factor", "shares above 0, up to 1")
    width = int(head_dim * share)
    c.need(heads % kv_heads == 0, "num_attention_heads", "multiples of num_key_value_heads")
    turns = 0 < width <= head_dim and width % 2 == 0
    rope.need(turns, "partial_rotary_factor", f"shares of {head_dim} that are even and not 0")
    return dict(
        vocab_size=c.size("vocab_size"),
        hidden_size=c.size("hidden_size"),
        intermediate_size=c.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=c.positive("rms_norm_eps"),
        theta=rope.positive("rope_theta"),
        rotary_width=width,
        tied=c.get("tie_word_embeddings", bool, False),
    )


class Block(nn.Module):
    """x += mixer(norm x); x += mlp(norm x). What stands before and after the mixer is row-local.

    A block hands on the residual x and the delta that is still to be added to it: the next norm
    adds and norms in one pass.
    """

    def __init__(self, c: DecoderConfig, build: Build, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer_norm = AddRMSNorm(build, c.hidden_size, c.eps, c.norm_offset)
        self.mixer = mixer
        self.mlp_norm = AddRMSNorm(build, c.hidden_size, c.eps, c.norm_offset)
        self.mlp = GatedMLP(build, c.hidden_size, c.intermediate_size)

    def forward(self, x: Tensor, delta: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        """x, delta [T, H] (None before the first block) -> the same of the next block."""
        x, normed = self.pre_mixer(x, delta)
        return self.post_mixer(x, self.mixer(normed, step))

    def pre_mixer(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """-> the residual and the mixer's input, each [T, H]."""
        return self.mixer_norm(x, delta)

    def post_mixer(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """The residual and the mixer's output -> the residual and the MLP's, each [T, H]."""
        x, normed = self.mlp_norm(x, mixed)
        return x, self.mlp(normed)

    def weights(self) -> dict[str, Tensor]:
        """Checkpoint name within the layer -> the tensor that it fills, but for the mixer's."""
        return {
            "input_layernorm.weight": self.mixer_norm.weight,
            "post_attention_layernorm.weight": self.mlp_norm.weight,
            "mlp.gate_proj.weight": self.mlp.gate_up.part(0),
            "mlp.up_proj.weight": self.mlp.gate_up.part(1),
            "mlp.down_proj.weight": self.mlp.down.weight,
        }


def attention(c: DecoderConfig, build: Build, rotary: Rotary, *, gated: bool) -> Attention:
    """The softmax mixer of these settings."""
    dims = (c.hidden_size, c.heads, c.kv_heads, c.head_dim)
    return Attention(build, *dims, rotary, c.eps, gated=gated, norm_offset=c.norm_offset)


def attention_weights(mixer: Attention) -> dict[str, Tensor]:
    """Checkpoint name within the layer -> the tensor of an attention mixer that it fills."""
    return {
        "self_attn.q_proj.weight": mixer.qkv.part(0),
        "self_attn.k_proj.weight": mixer.qkv.part(1),
        "self_attn.v_proj.weight": mixer.qkv.part(2),
        "self_attn.o_proj.weight": mixer.out.weight,
        "self_attn.q_norm.weight": mixer.q_norm.weight,
        "self_attn.k_norm.weight": mixer.k_norm.weight,
    }


class Decoder(nn.Module, ABC):
    """The target: embedding, `layers` blocks, final norm, head."""

    def __init__(self, config: DecoderConfig, build: Build, layers: int) -> None:
        super().__init__()
        c = self.config = config
        self.embed = Embedding(build, c.vocab_size, c.hidden_size)
        rotary = Rotary(build, c.rotary_width, c.theta)
        builds = [build.at(f"layers.{i}") for i in range(layers)]
        self.blocks = nn.ModuleList(
            Block(c, b, self.mixer(i, b, rotary)) for i, b in enumerate(builds)
        )
        self.norm = AddRMSNorm(build.at("norm"), c.hidden_size, c.eps, c.norm_offset)
        own = build.matrix(c.vocab_size, c.hidden_size) if not c.tied else self.embed.weight
        self.head = Head(build.at("head"), own)

    @abstractmethod
    def mixer(self, index: int, build: Build, rotary: Rotary) -> nn.Module:
        """The mixer of a layer: x [T, H], step -> [T, H]."""

    @abstractmethod
    def mixer_weights(self, mixer: nn.Module) -> dict[str, Tensor]:
        """Checkpoint name within the layer -> the tensor of this mixer that it fills."""

    def forward(self, step: Step) -> tuple[Tensor, tuple[Tensor, ...]]:
        """-> hidden [T, H] after the final norm, aux_hidden_states (none)."""
        x, delta = self.embed(step.token_ids), None
        for block in self.blocks:
            x, delta = block(x, delta, step)
        return self.norm(x, delta)[1], ()

    def logits(self, hidden: Tensor, step: Step) -> Tensor:
        """hidden [T, H] -> [N, V] at the step's logit rows."""
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
            own = block.weights() | self.mixer_weights(block.mixer)
            table.update({f"layers.{i}.{name}": tensor for name, tensor in own.items()})
        return table
