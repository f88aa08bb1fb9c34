"""Qwen3.5 and Qwen3.6, dense: Gated DeltaNet, gated attention in every fourth layer by default,
MTP.

The layers with attention follow layer_types, or full_attention_interval without it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lockstep.layers.attention import Attention
from lockstep.layers.build_context import BuildContext
from lockstep.layers.gated_delta_net import GatedDeltaNet
from lockstep.layers.linear import Target
from lockstep.layers.rotary import Rotary
from lockstep.models.config_reader import MAX_LAYERS, ConfigReader
from lockstep.models.decoder import (
    Decoder,
    DecoderConfig,
    Sublayer,
    mlp_sublayer,
    read_common,
)
from lockstep.models.mtp_module import MTPModule

PREFIXES = ("model.language_model.", "model.")
IGNORED = ("model.visual.",)
DRAFT_PREFIX = "mtp."
WITHOUT_EFFECT = {
    "sliding_window": "no layer has a window",
    "max_window_layers": "no layer has a window",
    "mlp_only_layers": "every layer of the dense models has a dense MLP",
}
"""Settings of config.json that may be ignored, each with the reason."""


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Settings of config.json.

    norm_offset: added to the weights of norms, which the checkpoint stores around zero. grouped:
    the recurrent layers' projections are ordered by key head, as in Qwen3-Next. key_heads to
    kernel: sizes of a recurrent layer; kernel: taps of its convolution. draft_layers: layers of the
    MTP module, 0 or 1.
    """

    norm_offset: ClassVar[float] = 1.0
    grouped: ClassVar[bool] = False

    layer_types: tuple[str, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    draft_layers: int

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Config":
        """Read the settings of config.json.

        Raises:
            CheckpointError: a setting is missing or not supported.
        """
        c = ConfigReader(raw)
        config = cls(**read_hybrid(c))
        c.refuse_unread(WITHOUT_EFFECT)
        return config


def read_hybrid(c: ConfigReader, dense: bool = True) -> dict[str, Any]:
    """Read the fields of Config. dense: whether there are dense MLPs.

    Raises:
        CheckpointError: a setting is missing or not supported.
    """
    c.one_of("attention_bias", False, default=False)
    c.one_of("attn_output_gate", True, default=True)
    c.one_of("output_gate_type", "swish", "silu", default="swish")
    c.one_of("mamba_ssm_dtype", "float32", default="float32")
    c.one_of("mtp_use_dedicated_embeddings", False, default=False)
    c.one_of("layer_scale", False, None, default=None)
    interval = c.size("full_attention_interval", 4)
    layers = c.size("num_hidden_layers", max_value=MAX_LAYERS)
    kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    key_heads = c.size("linear_num_key_heads")
    value_heads = c.size("linear_num_value_heads")
    c.need(value_heads % key_heads == 0, "linear_num_value_heads", "multiples of key heads")
    types = c.layer_types(layers, {"linear_attention", "full_attention"}, kinds)
    field = "layer_types" if c.raw.get("layer_types") is not None else "full_attention_interval"
    c.need("full_attention" in types, field, "settings by which at least one layer attends")
    return dict(
        layer_types=types,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=c.size("linear_key_head_dim"),
        value_dim=c.size("linear_value_head_dim"),
        kernel=c.size("linear_conv_kernel_dim"),
        draft_layers=c.one_of("mtp_num_hidden_layers", 0, 1, default=0),
        **read_common(c, head_dim=256, partial=0.25, dense=dense),
    )


class Model(Decoder):
    """Qwen3_5ForCausalLM, and the text part of Qwen3_5ForConditionalGeneration."""

    config: Config

    def attention_layers(self) -> list[int]:
        return [i for i, kind in enumerate(self.config.layer_types) if kind == "full_attention"]

    def layers(self, build: BuildContext) -> Iterator[tuple[Sublayer, ...]]:
        """Yield attention or Gated DeltaNet (layer_types), each with an MLP."""
        c = self.config
        rotary = c.rope.rotary(build)
        for i, kind in enumerate(c.layer_types):
            layer_build = build.for_layer(f"layers.{i}")
            if kind == "full_attention":
                yield attention_sublayer(layer_build, c, rotary), self.mlp(layer_build, i)
            else:
                yield recurrent_sublayer(layer_build, c), self.mlp(layer_build, i)

    def mlp(self, build: BuildContext, layer: int | None) -> Sublayer:
        """Build the MLP of a layer, or of the draft module (None)."""
        return mlp_sublayer(build, self.config)


def attention_sublayer(build: BuildContext, c: Config, rotary: Rotary) -> Sublayer:
    """Build a gated-attention sublayer."""
    attention = Attention(
        build.for_submodule("self_attn"),
        c.hidden_size,
        c.heads,
        c.kv_heads,
        c.head_dim,
        rotary=rotary,
        qk_norm=True,
        eps=c.eps,
        norm_offset=c.norm_offset,
        gated=True,
    )
    return Sublayer(build, c, "input_layernorm", "self_attn", attention)


def recurrent_sublayer(build: BuildContext, c: Config) -> Sublayer:
    """Build a Gated DeltaNet sublayer."""
    delta_net = GatedDeltaNet(
        build.for_submodule("linear_attn"),
        c.hidden_size,
        c.key_heads,
        c.value_heads,
        c.key_dim,
        c.value_dim,
        c.kernel,
        c.eps,
        grouped=c.grouped,
    )
    return Sublayer(build, c, "input_layernorm", "linear_attn", delta_net)


class Draft(MTPModule):
    """MTP module: one attention layer over fc([norm(embedding), norm(hidden)])."""

    def __init__(self, target: Model, build: BuildContext, ids: Tensor | None = None) -> None:
        super().__init__(target, build, ids, module="mtp", projection="fc")

    def layers(self, target: Any, build: BuildContext) -> Iterator[tuple[Sublayer, ...]]:
        """Yield gated attention and an MLP."""
        c = target.config
        layer_build = build.for_layer(build.layer, "mtp.layers.0")
        yield (
            attention_sublayer(layer_build, c, c.rope.rotary(layer_build)),
            target.mlp(layer_build, None),
        )

    def weights(self) -> dict[str, Target]:
        """Map the checkpoint's tensors, by name less the prefix, to their destinations."""
        block = self.blocks[0].weights()
        return (
            {f"layers.0.{name}": tensor for name, tensor in block.items()}
            | self.fc.weights()
            | {
                "pre_fc_norm_embedding.weight": self.embed_norm.weight,
                "pre_fc_norm_hidden.weight": self.hidden_norm.weight,
                "norm.weight": self.norm.weight,
            }
        )
