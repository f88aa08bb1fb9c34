"""Qwen3, dense: grouped-query attention with a norm on every query and key head, and SwiGLU.

Nothing recurs: all tokens follow one law, so generated pages are shared by prefix too, and prompt
chunks may end anywhere.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lockstep.layers.build import Build
from lockstep.layers.rotary import Rotary
from lockstep.models.decoder import (
    Decoder,
    DecoderConfig,
    attention,
    attention_weights,
    read_common,
)
from lockstep.models.reading import MOST_LAYERS, ConfigReader

PREFIXES = ("model.",)
IGNORED = ()


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The settings that decide the math."""

    layers: int

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Config":
        """From config.json. Raises CheckpointError on what is missing or not built."""
        c = ConfigReader(raw)
        c.only("use_sliding_window", False, default=False)
        layers = c.size("num_hidden_layers", most=MOST_LAYERS)
        c.layer_types(layers, {"full_attention"}, ["full_attention"] * layers)
        return cls(layers=layers, **read_common(c, head_dim=128, partial=1.0))


class Model(Decoder):
    """Embedding, blocks, final norm, head: Qwen3ForCausalLM."""

    def __init__(self, config: Config, build: Build) -> None:
        super().__init__(config, build, config.layers)

    def mixer(self, index: int, build: Build, rotary: Rotary) -> nn.Module:
        """Softmax attention in every layer: plain norms, the whole head turned, no output gate."""
        return attention(self.config, build, rotary, gated=False)

    def mixer_weights(self, mixer: nn.Module) -> dict[str, Tensor]:
        """self_attn.{q,k,v,o}_proj and self_attn.{q,k}_norm."""
        return attention_weights(mixer)
