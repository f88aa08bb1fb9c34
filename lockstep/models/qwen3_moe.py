"""Qwen3 with a mixture of experts: Qwen3's attention, and in most layers a mixture for the MLP.

There is no shared expert, and no layer is recurrent.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.layers.build_context import BuildContext
from lockstep.models.config_reader import ConfigReader
from lockstep.models.decoder import (
    UNUSED_WINDOW,
    Decoder,
    DecoderConfig,
    Sublayer,
    attention_layers,
    mlp_sublayer,
    read_attention_layers,
    read_common,
)
from lockstep.models.moe_config import MoEConfig, read_dense_layers, read_routing

PREFIXES = ("model.",)
IGNORED = ()


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Settings of config.json that the model is built from."""

    layers: int
    mixture: MoEConfig

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Config":
        """Read the settings of config.json.

        Raises:
            CheckpointError: a setting is missing or not supported.
        """
        c = ConfigReader(raw)
        c.one_of("attention_bias", False, default=False)
        c.one_of("qkv_bias", False, None, default=False)
        c.one_of("use_qk_norm", True, None, default=True)
        c.one_of("shared_expert_intermediate_size", 0, None, default=0)
        layers = read_attention_layers(c)
        mixture = MoEConfig(
            read_routing(c, c.get("norm_topk_prob", bool)),
            inner=c.size("moe_intermediate_size"),
            dense_layers=read_dense_layers(c, layers),
        )
        dense = bool(mixture.dense_layers)
        config = cls(layers=layers, mixture=mixture, **read_common(c, head_dim=128, dense=dense))
        c.refuse_unread(UNUSED_WINDOW)
        return config


class Model(Decoder):
    """Qwen3MoeForCausalLM."""

    config: Config

    def layers(self, build: BuildContext) -> Iterator[tuple[Sublayer, ...]]:
        """Yield attention, then the mixture, or a dense MLP where the file says so."""
        c = self.config

        def mlp(layer_build: BuildContext, layer: int) -> Sublayer:
            dense = layer in c.mixture.dense_layers
            return mlp_sublayer(layer_build, c) if dense else c.mixture.sublayer(layer_build, c)

        return attention_layers(build, c, c.layers, mlp, qk_norm=True, eps=c.eps)
