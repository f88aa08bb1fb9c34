"""DeepSeek-V3 and R1, Kimi-K2, and the text part of Kimi-K2.5: latent attention and experts.

The first layers have a dense MLP, the others a mixture: sigmoid scores with a correction bias,
group-limited top-k, and a shared expert without a gate. DeepSeek's MTP module is stored as one more
layer after the last. No layer is recurrent. Math: DeepSeek-V3, arXiv 2412.19437, section 2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Target
from lockstep.layers.moe import Routing
from lockstep.layers.rotary import Rotary
from lockstep.models.config_reader import MAX_EXPERTS, MAX_LAYERS, ConfigReader
from lockstep.models.decoder import Decoder, DecoderConfig, Sublayer, mlp_sublayer
from lockstep.models.latent_config import LatentConfig, read_latent_common
from lockstep.models.moe_config import MoEConfig
from lockstep.models.mtp_module import MTPModule
from lockstep.quantization import WeightSink
from lockstep.quantization.weight_sink import FLOAT_DTYPES

PREFIXES = ("language_model.model.", "language_model.", "model.")
IGNORED = ("vision_tower.", "mm_projector.")
DRAFT_SETTING = "num_nextn_predict_layers"
WITHOUT_EFFECT = {
    "num_key_value_heads": "latent attention has one key and value latent for all heads",
    "head_dim": "derived: qk_rope_head_dim, as transformers writes it",
    "qk_head_dim": "derived: qk_nope_head_dim + qk_rope_head_dim",
}
"""Settings of config.json that may be ignored, each with the reason."""
TWINS = ("embed_tokens", "shared_head.head")
"""Copies of the target's embedding and head in the MTP module's tensors, which are not used."""


def draft_prefix(raw: dict[str, Any]) -> str:
    """Return the prefix of the MTP module: the layer after the last one."""
    layers = ConfigReader(raw).size("num_hidden_layers", max_value=MAX_LAYERS)
    return f"layers.{layers}."


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Settings of config.json that the model is built from."""

    layers: int
    latents: LatentConfig
    mixture: MoEConfig

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Config":
        """Read the settings of config.json.

        Raises:
            CheckpointError: a setting is missing or not supported.
        """
        c = ConfigReader(raw)
        c.one_of("pretraining_tp", 1, None, default=1)
        c.one_of(DRAFT_SETTING, 0, 1, None, default=0)
        layers = c.size("num_hidden_layers", max_value=MAX_LAYERS)
        config = cls(layers=layers, mixture=_read_mixture(c, layers), **read_latent_common(c))
        c.refuse_unread(WITHOUT_EFFECT)
        return config


def _read_mixture(c: ConfigReader, layers: int) -> MoEConfig:
    """Read the mixture of all layers after the first dense ones.

    The file must say how experts are chosen and scaled: the defaults of DeepSeek's code, Kimi's and
    transformers differ.
    """
    c.one_of("scoring_func", "sigmoid", default="sigmoid")
    c.one_of("topk_method", "noaux_tc", default="noaux_tc")
    c.one_of("moe_layer_freq", 1, default=1)
    dense = c.get("first_k_dense_replace", int)
    c.need(0 <= dense <= layers, "first_k_dense_replace", f"0 to {layers}, the number of layers")
    shared = c.get("n_shared_experts", int)
    c.need(shared >= 0, "n_shared_experts", "0 or more")
    inner = c.size("moe_intermediate_size")
    routing = Routing(
        c.size("n_routed_experts", max_value=MAX_EXPERTS),
        c.size("num_experts_per_tok"),
        scoring="sigmoid",
        renormalize=c.get("norm_topk_prob", bool, True),
        scale=c.positive("routed_scaling_factor"),
        bias=True,
        groups=c.size("n_group"),
        top_groups=c.size("topk_group"),
    )
    return MoEConfig(
        routing,
        inner=inner,
        # All shared experts are stored as one MLP of their total width.
        shared_inner=shared * inner,
        shared_gate=False,
        dense_layers=frozenset(range(dense)),
    )


def attention_sublayer(build: BuildContext, c: Config, rotary: Rotary) -> Sublayer:
    """Build a latent-attention sublayer."""
    mixer = c.latents.mixer(build.for_submodule("self_attn"), c.hidden_size, rotary)
    return Sublayer(build, c, "input_layernorm", "self_attn", mixer)


def moe_sublayer(build: BuildContext, c: Config) -> Sublayer:
    """Build a mixture-of-experts sublayer."""
    return c.mixture.sublayer(build, c, shared_name="shared_experts")


class Model(Decoder):
    """DeepseekV3ForCausalLM, and the text part of KimiK25ForConditionalGeneration."""

    config: Config

    def layers(self, build: BuildContext) -> Iterator[tuple[Sublayer, ...]]:
        """Yield latent attention, then a dense MLP (first layers) or the mixture."""
        c = self.config
        rotary = c.rope.rotary(build)
        for i in range(c.layers):
            layer_build = build.for_layer(f"layers.{i}")
            dense = i in c.mixture.dense_layers
            yield (
                attention_sublayer(layer_build, c, rotary),
                mlp_sublayer(layer_build, c) if dense else moe_sublayer(layer_build, c),
            )


class Draft(MTPModule):
    """MTP module: one layer over eh_proj([enorm(embedding), hnorm(hidden)])."""

    def __init__(self, target: Model, build: BuildContext, ids: Tensor | None = None) -> None:
        path = f"layers.{target.config.layers}"
        super().__init__(target, build, ids, module=path, projection="eh_proj")
        layer_build = build.for_layer(build.layer, path)
        self.embed_shape = (target.config.vocab_size, target.config.hidden_size)
        self.twins = [name for name in TWINS if layer_build.submodule_tensors(name)]

    def layers(self, target: Any, build: BuildContext) -> Iterator[tuple[Sublayer, ...]]:
        """Yield latent attention and the mixture."""
        c = target.config
        layer_build = build.for_layer(build.layer, f"layers.{c.layers}")
        yield (
            attention_sublayer(layer_build, c, c.rope.rotary(layer_build)),
            moe_sublayer(layer_build, c),
        )

    def weights(self) -> dict[str, Target]:
        """Map the module's tensors to their destinations; copies of shared weights are read and
        dropped.
        """
        # A sink that drops its tensor: an unexpected tensor would be refused.
        twin = WeightSink(self.embed_shape, FLOAT_DTYPES, torch.device("cpu"), lambda tensor: None)
        return (
            self.blocks[0].weights()
            | self.fc.weights()
            | {
                "enorm.weight": self.embed_norm.weight,
                "hnorm.weight": self.hidden_norm.weight,
                "shared_head.norm.weight": self.norm.weight,
            }
            | {f"{name}.weight": twin for name in self.twins}
        )
