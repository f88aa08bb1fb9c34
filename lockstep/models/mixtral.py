"""Mixtral: Llama's attention without biases, and a mixture of experts for the MLP in every layer.

Sliding windows, which the files may turn on, are not built.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.layers.build_context import BuildContext
from lockstep.models.config_reader import MAX_LAYERS, ConfigReader
from lockstep.models.decoder import Decoder, DecoderConfig, Sublayer, attention_layers, read_common
from lockstep.models.moe_config import MoEConfig, read_routing

PREFIXES = ("model.",)
IGNORED = ()
EXPERT = ("w1", "w3", "w2")
"""Names of an expert's gate, up and down projections."""


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
        c.one_of("sliding_window", None, default=None)
        layers = c.size("num_hidden_layers", max_value=MAX_LAYERS)
        mixture = MoEConfig(read_routing(c), inner=c.size("intermediate_size"))
        config = cls(layers=layers, mixture=mixture, **read_common(c))
        c.refuse_unread({})
        return config


class Model(Decoder):
    """MixtralForCausalLM."""

    config: Config

    def layers(self, build: BuildContext) -> Iterator[tuple[Sublayer, ...]]:
        """Yield full attention and a mixture of experts for every layer."""
        c = self.config

        def mlp(layer_build: BuildContext, layer: int) -> Sublayer:
            return c.mixture.sublayer(layer_build, c, "block_sparse_moe", names=EXPERT)

        return attention_layers(build, c, c.layers, mlp)
