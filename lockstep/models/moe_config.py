"""Settings of mixtures of experts, and the sublayer that they configure."""

from dataclasses import dataclass
from typing import Any

from lockstep.layers.build_context import BuildContext
from lockstep.layers.moe import MoE, Routing
from lockstep.models.config_reader import MAX_EXPERTS, ConfigReader
from lockstep.models.decoder import DecoderConfig, Sublayer


@dataclass(frozen=True)
class MoEConfig:
    """Settings of a mixture of experts.

    inner: width of an expert. shared_inner: width of the shared expert, 0 for none. shared_gate:
    whether it has a gate. dense_layers: layers with a dense MLP instead.
    """

    routing: Routing
    inner: int
    shared_inner: int = 0
    shared_gate: bool = True
    dense_layers: frozenset[int] = frozenset()

    def sublayer(
        self, build: BuildContext, c: DecoderConfig, name: str = "mlp", **options: Any
    ) -> Sublayer:
        """Build the mixture's sublayer. name: in the checkpoint; options: those of
        lockstep.layers.moe.MoE.
        """
        moe = MoE(
            build.for_submodule(name),
            c.hidden_size,
            self.inner,
            self.routing,
            shared_inner=self.shared_inner,
            shared_gate=self.shared_gate and self.shared_inner > 0,
            **options,
        )
        return Sublayer(build, c, "post_attention_layernorm", name, moe)


def read_routing(c: ConfigReader, renormalize: bool = True) -> Routing:
    """Read the number of experts and of those per token.

    transformers 5.23 writes num_experts as num_local_experts in some families.
    """
    local = c.raw.get("num_experts") is None and "num_local_experts" in c.raw
    experts = c.size("num_local_experts" if local else "num_experts", max_value=MAX_EXPERTS)
    top_k = c.size("num_experts_per_tok")
    c.need(top_k <= experts, "num_experts_per_tok", f"1 to {experts}, the number of experts")
    return Routing(experts, top_k, renormalize=renormalize)


def read_dense_layers(c: ConfigReader, layers: int) -> frozenset[int]:
    """Return the layers with a dense MLP: mlp_only_layers, and all but every
    decoder_sparse_step-th.
    """
    listed = c.get("mlp_only_layers", list, [])
    known = all(type(i) is int and 0 <= i < layers for i in listed)
    c.need(known, "mlp_only_layers", f"lists of layers, 0 to {layers - 1}")
    every = c.size("decoder_sparse_step", 1)
    return frozenset(i for i in range(layers) if i in listed or (i + 1) % every)
