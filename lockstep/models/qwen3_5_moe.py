"""Qwen3.5 and Qwen3.6 with a mixture of experts: the dense models' layers, other MLPs.

Every layer's MLP is a mixture with a shared expert, which has a gate.
"""

from dataclasses import dataclass
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.layers.build_context import BuildContext
from lockstep.models import qwen3_5
from lockstep.models.config_reader import ConfigReader
from lockstep.models.decoder import Sublayer, mlp_sublayer
from lockstep.models.moe_config import MoEConfig, read_routing
from lockstep.models.qwen3_5 import DRAFT_PREFIX, IGNORED, PREFIXES, Draft, read_hybrid

__all__ = ["DRAFT_PREFIX", "IGNORED", "PREFIXES", "Config", "Draft", "Model"]


@dataclass(frozen=True)
class Config(qwen3_5.Config):
    """Settings of config.json that the model is built from."""

    mixture: MoEConfig

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Config":
        """Read the settings of config.json.

        Raises:
            CheckpointError: a setting is missing or not supported.
        """
        c = ConfigReader(raw)
        c.one_of("norm_topk_prob", True, default=True)
        c.one_of("mlp_only_layers", [], None, default=None)
        c.one_of("decoder_sparse_step", 1, default=1)
        mixture = MoEConfig(
            read_routing(c),
            inner=c.size("moe_intermediate_size"),
            shared_inner=c.size("shared_expert_intermediate_size"),
        )
        config = cls(mixture=mixture, **read_hybrid(c, dense=False))
        c.refuse_unread(qwen3_5.WITHOUT_EFFECT)
        return config


class Model(qwen3_5.Model):
    """Qwen3_5MoeForCausalLM, and the text part of Qwen3_5MoeForConditionalGeneration."""

    config: Config

    def mlp(self, build: BuildContext, layer: int | None) -> Sublayer:
        """Build the mixture, or a dense MLP where config.json or the tensors say so."""
        c = self.config
        dense = layer in c.mixture.dense_layers
        if layer is None:
            dense = bool(build.submodule_tensors("mlp.gate_proj"))
        if dense and not c.intermediate_size:
            raise CheckpointError(
                f"config.json has no intermediate_size, and {build.path}.mlp is a dense MLP. "
                "Add it to config.json."
            )
        return mlp_sublayer(build, c) if dense else c.mixture.sublayer(build, c)
