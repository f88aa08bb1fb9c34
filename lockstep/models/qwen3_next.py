"""Qwen3-Next: Qwen3.5's layers with a mixture of experts, in an older layout.

Rows of a recurrent layer's projections are grouped by key head, and layers may have a dense MLP.
config.json does not say whether there is an MTP module.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from lockstep.models import qwen3_5_moe
from lockstep.models.config_reader import MAX_LAYERS, ConfigReader
from lockstep.models.moe_config import MoEConfig, read_dense_layers, read_routing
from lockstep.models.qwen3_5 import DRAFT_PREFIX, WITHOUT_EFFECT, Draft, read_hybrid
from lockstep.models.qwen3_5_moe import Model

__all__ = ["DRAFT_PREFIX", "IGNORED", "PREFIXES", "Config", "Draft", "Model"]

PREFIXES = ("model.",)
IGNORED = ()


@dataclass(frozen=True)
class Config(qwen3_5_moe.Config):
    """Settings of config.json that the model is built from."""

    grouped: ClassVar[bool] = True

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Config":
        """Read the settings of config.json.

        Raises:
            CheckpointError: a setting is missing or not supported.
        """
        c = ConfigReader(raw)
        c.one_of("use_sliding_window", False, default=False)
        dense = read_dense_layers(c, c.size("num_hidden_layers", max_value=MAX_LAYERS))
        mixture = MoEConfig(
            read_routing(c, c.get("norm_topk_prob", bool)),
            inner=c.size("moe_intermediate_size"),
            shared_inner=c.size("shared_expert_intermediate_size"),
            dense_layers=dense,
        )
        config = cls(mixture=mixture, **read_hybrid(c, dense=bool(dense)))
        c.refuse_unread(WITHOUT_EFFECT)
        return config
