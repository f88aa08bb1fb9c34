"""What the mixtures of experts here have in common: settings, and the half that a layer has."""

from dataclasses import dataclass
from typing import Any

from lockstep.layers.build_context import BuildContext
from lockstep.layers.moe import MoE, Routing
from lockstep.models.config_reader import MAX_EXPERTS, ConfigReader
from lockstep.models.decoder import DecoderConfig, Sublayer


@dataclass(frozen=True)
class MoEConfig:
    """inner: width of an expert; shared_inner: of the shared one, 0 for none; shared_gate: whether
    that one has a gate. dense_layers: those that have a dense MLP instead."""

    routing: Routing
    inner: int
    shared_inner: int = 0
    shared_gate: bool = True
    dense_layers: frozenset[int] = frozenset()

    def half(
        self, build: BuildContext, c: DecoderConfig, name: str = "mlp", **options: Any
    ) -> Sublayer:
        """The mixture, as the checkpoint calls it. options: those of lockstep.layers.moe.MoE."""
        moe = MoE(
            build.within(name),
            c.hidden_size,
            self.inner,
            self.routing,
            shared_inner=self.shared_inner,
            shared_gate=self.shared_gate and self.shared_inner > 0,
            **options,
        )
        return Sublayer(build, c, "post_attention_layernorm", name, moe)


def read_routing(c: ConfigReader, renormalize: bool = True) -> Routing:
    """How many experts there are, and how many a token goes to.

    transformers 5.23 writes num_experts as num_local_experts in some families.
    """
    local = c.raw.get("num_experts") is None and "num_local_experts" in c.raw
    experts = c.size("num_local_experts" if local else "num_experts", most=MAX_EXPERTS)
    top_k = c.size("num_experts_per_tok")
    c.need(top_k <= experts, "num_experts_per_tok", f"1 to {experts}, the number of experts")
    return Routing(experts, top_k, renormalize=renormalize)


def read_dense_layers(c: ConfigReader, layers: int) -> frozenset[int]:
    """Layers with a dense MLP: mlp_only_layers, and all but every decoder_sparse_step-th."""
    listed = c.get("mlp_only_layers", list, [])
    known = all(type(i) is int and 0 <= i < layers for i in listed)
    c.need(known, "mlp_only_layers", f"lists of layers, 0 to {layers - 1}")
    every = c.size("decoder_sparse_step", 1)
    return frozenset(i for i in range(layers) if i in listed or (i + 1) % every)
