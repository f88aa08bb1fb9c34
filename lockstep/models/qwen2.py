"""Qwen2 and Qwen2.5, dense: grouped-query attention with biases on q, k and v, and SwiGLU.

No norms on queries and keys. Sliding windows, which the files may turn on, are not built.
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

PREFIXES = ("model.",)
IGNORED = ()


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Settings of config.json that the model is built from."""

    layers: int

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Config":
        """Read the settings of config.json.

        Raises:
            CheckpointError: a setting is missing or not supported.
        """
        c = ConfigReader(raw)
        layers = read_attention_layers(c)
        config = cls(layers=layers, **read_common(c))
        c.refuse_unread(UNUSED_WINDOW)
        return config


class Model(Decoder):
    """Qwen2ForCausalLM."""

    config: Config

    def layers(self, build: BuildContext) -> Iterator[tuple[Sublayer, ...]]:
        """Yield full attention and an MLP for every layer."""
        c = self.config
        return attention_layers(
            build, c, c.layers, lambda layer_build, _: mlp_sublayer(layer_build, c), bias=True
        )
