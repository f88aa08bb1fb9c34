"""Llama 3, 3.1, 3.2 and 3.3, text: grouped-query attention with rotary positions, and SwiGLU.

Queries and keys have no norms. config.json decides biases and rotary scaling; the released models
have no biases, and "llama3" scaling from 3.1 on. No layer is recurrent.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.layers.build_context import BuildContext
from lockstep.models.config_reader import MAX_LAYERS, ConfigReader
from lockstep.models.decoder import (
    Decoder,
    DecoderConfig,
    Sublayer,
    attention_layers,
    mlp_sublayer,
    read_common,
)

PREFIXES = ("model.",)
IGNORED = ()


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Settings of config.json that the model is built from."""

    layers: int
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Config":
        """Read the settings of config.json.

        Raises:
            CheckpointError: a setting is missing or not supported.
        """
        c = ConfigReader(raw)
        c.one_of("pretraining_tp", 1, None, default=1)
        config = cls(
            layers=c.size("num_hidden_layers", max_value=MAX_LAYERS),
            attention_bias=c.get("attention_bias", bool, False),
            mlp_bias=c.get("mlp_bias", bool, False),
            **read_common(c),
        )
        c.refuse_unread({})
        return config


class Model(Decoder):
    """LlamaForCausalLM."""

    config: Config

    def layers(self, build: BuildContext) -> Iterator[tuple[Sublayer, ...]]:
        """Yield full attention and an MLP for every layer."""
        c = self.config
        biases = dict(bias=c.attention_bias, out_bias=c.attention_bias)

        def mlp(layer_build: BuildContext, layer: int) -> Sublayer:
            return mlp_sublayer(layer_build, c, bias=c.mlp_bias)

        return attention_layers(build, c, c.layers, mlp, **biases)
