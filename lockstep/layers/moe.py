"""The mixture of experts: each token through the few gated MLPs that its router chose."""

from copy import copy

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.kernels.experts import experts as experts_op
from lockstep.kernels.route import Scoring
from lockstep.kernels.route import route as route_op
from lockstep.layers.build import Build
from lockstep.layers.linear import Linear
from lockstep.layers.mlp import GatedMLP

GATED_MLP = ("gate_proj", "up_proj", "down_proj")
"""A gated MLP's weights, as most checkpoints call them; Mixtral's are w1, w3, w2."""


class MoE(nn.Module):
    """x [T, H] -> a delta of [T, H]: the weighted sum of top_k of the experts, and a shared one.

    scoring, renormalise, scale, groups, top_groups: see lockstep.kernels.route. bias: a correction
    bias [experts] fp32 goes into the choice. shared_inner: width of the shared expert, 0 for none;
    shared_gate: it counts as sigmoid(x w^T). The router of families that score by softmax (Qwen,
    Mixtral) gives logits and experts' weights of the model's dtype, the softmax in fp32 between
    them; that of families that score by sigmoid (DeepSeek-V3, Nemotron-H) is fp32 all through, its
    weight too.

    Raises ConfigError where a token cannot choose top_k experts.
    """

    def __init__(
        self,
        build: Build,
        hidden: int,
        inner: int,
        experts: int,
        top_k: int,
        *,
        scoring: Scoring = "softmax",
        renormalise: bool = True,
        scale: float = 1.0,
        bias: bool = False,
        groups: int = 1,
        top_groups: int = 1,
        shared_inner: int = 0,
        shared_gate: bool = False,
    ) -> None:
        super().__init__()
        _check(experts, top_k, groups, top_groups)
        if shared_gate and (scoring != "softmax" or not shared_inner):
            raise ConfigError(
                f"shared_gate=True is not allowed; allowed: False with scoring={scoring!r} and "
                f"shared_inner={shared_inner}. Mend config.json."
            )
        self.inner = inner
        self.experts = experts
        self.top_k = top_k
        router = _in_fp32(build) if scoring == "sigmoid" else build
        self.router_dtype = router.dtype
        outputs = (experts, 1) if shared_gate else (experts,)
        self.router = Linear(router, hidden, *outputs)
        self.bias = build.empty(experts, dtype=torch.float32) if bias else None
        self.up = _matrices(build, experts, 2 * inner, hidden)
        self.down = _matrices(build, experts, hidden, inner)
        self.shared = GatedMLP(build, hidden, shared_inner) if shared_inner else None
        if self.shared is not None:
            self.shared.down.partial = False
        self.choice = dict(
            scoring=scoring, renormalise=renormalise, scale=scale, groups=groups,
            top_groups=top_groups, dtype=router.dtype,
        )  # fmt: skip
        self.route = build.op(route_op, experts=experts)
        self.mix = build.op(experts_op, experts=experts, top_k=top_k)

    def forward(self, x: Tensor) -> Tensor:
        found = self.router(x.to(self.router_dtype))
        logits = found[:, : self.experts]
        gate = found[:, self.experts] if found.shape[1] > self.experts else None
        ids, weights = self.route(logits, self.top_k, bias=self.bias, **self.choice)
        shared = None if self.shared is None else self.shared(x)
        return self.mix(x, self.up, self.down, ids, weights, shared, gate)

    def weights(
        self, shared: str = "shared_expert", names: tuple[str, str, str] = GATED_MLP
    ) -> dict[str, Tensor]:
        """Checkpoint name within the layer -> the tensor that it fills, experts one by one.

        shared: what the shared expert is called (DeepSeek: shared_experts); names: an expert's
        gate, up and down.
        """
        table = self._others(shared)
        for expert in range(self.experts):
            up = self.up[expert]
            parts = (up[: self.inner], up[self.inner :], self.down[expert])
            prefix = f"experts.{expert}"
            table |= {f"{prefix}.{n}.weight": t for n, t in zip(names, parts, strict=True)}
        return table

    def fused_weights(self, shared: str = "shared_expert") -> dict[str, Tensor]:
        """The same, where all experts are one tensor (Qwen3.5): gate above up, no `.weight`."""
        own = {"experts.gate_up_proj": self.up, "experts.down_proj": self.down}
        return self._others(shared) | own

    def _others(self, shared: str) -> dict[str, Target]:
        """All but the experts."""
        names = ("gate", f"{shared}_gate")[: len(self.router.outputs)]
        table = self.router.weights(*names)
        if self.bias is not None:
            table["gate.e_score_correction_bias"] = self.bias
        if self.shared is not None:
            table |= {f"{shared}.{name}": t for name, t in self.shared.weights().items()}
        return table


def _check(experts: int, top_k: int, groups: int, top_groups: int) -> None:
    """Raises ConfigError where a token cannot choose top_k experts out of top_groups groups."""
    sound = experts % groups == 0 and 1 <= top_groups <= groups
    sound = sound and (groups == 1 or experts >= 2 * groups)
    if not sound or not 1 <= top_k <= top_groups * experts // groups:
        raise ConfigError(
            f"top_k={top_k} out of top_groups={top_groups} of groups={groups} of experts={experts} "
            "is not allowed; allowed: equal groups, of 2 experts at least if there are several, "
            "whose chosen ones hold top_k experts. Mend config.json."
        )


def _in_fp32(build: Build) -> Build:
    """The same build for weights in fp32."""
    found = copy(build)
    found.dtype = torch.float32
    return found


def _matrices(build: Build, count: int, n: int, k: int) -> nn.Parameter:
    """Weights [count, n, k] to be filled, stored as Build.matrix stores one: [count, k, n] on a
    CPU."""
    if build.device != "cpu":
        return build.empty(count, n, k)
    return nn.Parameter(build.empty(count, k, n).data.transpose(1, 2), requires_grad=False)
