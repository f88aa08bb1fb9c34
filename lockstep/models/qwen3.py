"""Qwen3, dense: grouped-query attention with a norm on every query and key head, and SwiGLU.

No layer is recurrent, so generated pages can be shared as prefixes too, and prompt chunks may end
anywhere.
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
        c.one_of("attention_bias", False, default=False)
        layers = read_attention_layers(c)
        config = cls(layers=layers, **read_common(c, head_dim=128))
        c.refuse_unread(UNUSED_WINDOW)
        return config


class Model(Decoder):
    """Qwen3ForCausalLM."""

    config: Config

    def layers(self, build: BuildContext) -> Iterator[tuple[Sublayer, ...]]:
        """Yield full attention and an MLP for every layer."""
        c = self.config
        norms = dict(qk_norm=True, eps=c.eps)
        return attention_layers(
            build, c, c.layers, lambda layer_build, _: mlp_sublayer(layer_build, c), **norms
        )
