"""The mixture of experts: each token through the few MLPs that its router chose."""

from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lockstep.errors import CheckpointError, ConfigError
from lockstep.kernels.activations import Act
from lockstep.kernels.experts import experts as experts_op
from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.route import Scoring
from lockstep.kernels.route import route as route_op
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import (
    Linear,
    PartialLinear,
    Target,
    Weight,
    filled,
    products_of,
    runs_of,
)
from lockstep.quantization import CheckpointLinear, Layout, TensorInfo, WeightSink
from lockstep.quantization.weight_sink import FLOAT_DTYPES, FusedExpertSink

BLOCK = 128
"""Outputs that a format keeps together at most: FP8's blocks."""
GATED_MLP = ("gate_proj", "up_proj", "down_proj")
"""A gated MLP's weights, as most checkpoints call them; Mixtral's are w1, w3, w2."""
RELU_MLP = ("up_proj", "down_proj")
"""Those of an MLP without a gate."""


@dataclass(frozen=True)
class Routing:
    """How a token chooses top_k of the experts.

    scoring, renormalize, scale, groups, top_groups: see lockstep.kernels.route. bias: a correction
    bias [experts] fp32 goes into the choice. Raises ConfigError where top_k cannot be chosen.
    """

    experts: int
    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    bias: bool = False
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        sound = self.experts % self.groups == 0 and 1 <= self.top_groups <= self.groups
        sound = sound and (self.groups == 1 or self.experts >= 2 * self.groups)
        if not sound or not 1 <= self.top_k <= self.top_groups * self.experts // self.groups:
            raise ConfigError(
                f"top_k={self.top_k} out of top_groups={self.top_groups} of groups={self.groups} "
                f"of experts={self.experts} is not allowed; allowed: equal groups, of 2 experts at "
                "least if there are several, whose chosen ones hold top_k experts. "
                "Mend config.json."
            )


class ExpertWeight(Weight):
    """A linear map of all experts: E weights of [N, K], E * N rows of one storage.

    outputs: name of each weight within an expert -> its rows, N together. fused: what a checkpoint
    calls all of them as one tensor [E, N, K] (Qwen3.5: no `.weight`), if it has them so. weight is
    [E, N, K]. Raises CheckpointError where experts are packed in different ways.
    """

    def __init__(
        self,
        build: BuildContext,
        experts: int,
        top_k: int,
        inputs: int,
        outputs: Mapping[str, int],
        fused: str,
    ) -> None:
        info = build.found("experts").get(fused)
        self.fused = None if info is None else f"experts.{fused}"
        self.packing = build.packing
        self.experts = experts
        self.top_k = top_k
        self.rows = sum(outputs.values())
        self.names = [f"experts.{e}.{name}" for e in range(experts) for name in outputs]
        sizes = list(outputs.values()) * experts
        reads = zip(self.names, sizes, strict=True)
        self.reads = [_read(build, name, n, inputs, info) for name, n in reads]
        layout = _one_layout(build, self.reads)
        super().__init__(build, inputs, [(layout, experts * self.rows)])

    def _matrix(self, build: BuildContext) -> nn.Parameter:
        return build.matrices(self.experts, self.rows, self.shape[1])

    def _lying(self, begin: int, end: int) -> Tensor | QuantizedWeight:
        """Rows of one expert as they lie once they are loaded."""
        found = self.loaded
        if not isinstance(found, Tensor):
            return found.rows(begin, end)
        (expert, first) = divmod(begin, self.rows)
        return found[expert, first : first + end - begin]

    def weights(self) -> dict[str, Target]:
        """Checkpoint name within the mixture -> what it fills: expert by expert, or all at once."""
        if self.fused is not None and isinstance(self.stored, Tensor):
            return {self.fused: self.stored}
        table: dict[str, Target] = {}
        begin = 0
        for name, read in zip(self.names, self.reads, strict=True):
            rows = self.stored_rows(begin, begin + read.outputs)
            table |= filled(name, rows, self.packing, read)
            begin += read.outputs
        if self.fused is not None:
            parts = [WeightSink.of(table.pop(f"{name}.weight")) for name in self.names]
            table[self.fused] = self._shared_out(parts)
        elif isinstance(self.stored, QuantizedWeight):
            self._stack(self.stored, table)
        return table

    def _stack(self, weight: QuantizedWeight, table: dict[str, Target]) -> None:
        """Puts slots that hand over all experts' tensors of a kind at once in place of theirs.

        Only where no word and no block of scales could reach from one expert into the next.
        """
        assert self.packing is not None, "a format packed it"
        if any(read.outputs % BLOCK for read in self.reads):
            return
        first = self.reads[0]
        every = replace(first, outputs=weight.shape[0])
        whole = self.packing.slots(every, weight)
        for suffix in {name.rpartition(".")[2] for name in table}:
            names = [f"{name}.{suffix}" for name in self.names]
            if all(name in table for name in names):
                parts = [WeightSink.of(table[name]) for name in names]
                table |= zip(names, FusedExpertSink.slots(whole.get(suffix), parts), strict=True)

    def _shared_out(self, parts: list[WeightSink]) -> WeightSink:
        """One tensor [E, N, K] that is packed while it is loaded: its rows go to these slots."""
        sizes = [read.outputs for read in self.reads]

        def fill(tensor: Tensor) -> None:
            for part, rows in zip(parts, tensor.flatten(0, 1).split(sizes), strict=True):
                part.fill(rows)

        shape = (self.experts, self.rows, self.shape[1])
        return WeightSink(shape, FLOAT_DTYPES, self.stored.device, fill)


class MoE(nn.Module):
    """x [T, H] -> a delta of [T, H]: the weighted sum of the experts that a token chose, and of a
    shared one.

    act: silu_mul, of gated MLPs, or relu2. names: an expert's gate (if it has one), up and down in
    the checkpoint. shared_inner: width of the shared expert, 0 for none; shared_name: what it is
    called (DeepSeek: shared_experts); shared_gate: it counts as sigmoid(x w^T). latent: the width
    in which the routed experts work, between fc1_latent_proj and fc2_latent_proj (Nemotron 3
    Super); 0: that of x. bias: of the shared expert and of these two.

    The router of families that score by softmax (Qwen, Mixtral) gives logits and experts' weights
    of the model's dtype, the softmax in fp32 between them; that of families that score by sigmoid
    (DeepSeek-V3, Nemotron-H) is fp32 all through, its weight too. The shared expert's gate and up
    are outputs of the router's product, before its own, where all are of one dtype and can be one
    product (lockstep.layers.linear.products_of).

    Raises CheckpointError where experts are packed in different ways.
    """

    def __init__(
        self,
        build: BuildContext,
        hidden: int,
        inner: int,
        routing: Routing,
        *,
        act: Act = "silu_mul",
        names: tuple[str, ...] = GATED_MLP,
        shared_inner: int = 0,
        shared_name: str = "shared_expert",
        shared_gate: bool = False,
        latent: int = 0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if shared_gate and (routing.scoring != "softmax" or not shared_inner):
            raise ConfigError(
                f"shared_gate=True is not allowed; allowed: False with scoring={routing.scoring!r} "
                f"and shared_inner={shared_inner}. Mend config.json."
            )
        self.experts = routing.experts
        self.top_k = routing.top_k
        self.act: Act = act
        *shared_into, shared_out = GATED_MLP if act == "silu_mul" else RELU_MLP
        shared_up = {f"{shared_name}.{n}": shared_inner for n in shared_into if shared_inner}
        routed = {"gate": self.experts} | ({f"{shared_name}_gate": 1} if shared_gate else {})
        self._build_router(build, hidden, routed, shared_up, routing, bias)
        self._build_experts(build, inner, latent or hidden, names)
        self.into_latent = self.out_of_latent = None
        if latent:
            self.into_latent = Linear(build, hidden, {"fc1_latent_proj": latent}, bias=bias)
            self.out_of_latent = Linear(build, latent, {"fc2_latent_proj": hidden}, bias=bias)
        self.shared_down = None
        if shared_inner:
            down = {f"{shared_name}.{shared_out}": hidden}
            last = Linear if latent else PartialLinear
            self.shared_down = last(build, shared_inner, down, bias=bias)

    def _build_router(
        self,
        build: BuildContext,
        hidden: int,
        routed: dict[str, int],
        shared_up: dict[str, int],
        routing: Routing,
        bias: bool,
    ) -> None:
        """The router's product of the outputs `routed`, `shared_up` before them or on its own, and
        the choice that follows."""
        router = _in_fp32(build) if routing.scoring == "sigmoid" else build
        alike = (
            not bias
            and router.dtype == build.dtype
            and _one_product(build, hidden, shared_up | routed)
        )
        beside = shared_up if alike else {}
        apart = shared_up and not alike
        self.shared_up = PartialLinear(build, hidden, shared_up, bias=bias) if apart else None
        self.router = PartialLinear(router, hidden, beside | routed)
        self.widths = (sum(beside.values()), self.experts, len(routed) - 1)
        self.bias = build.empty(self.experts, dtype=torch.float32) if routing.bias else None
        self.choice = dict(
            scoring=routing.scoring, renormalize=routing.renormalize, scale=routing.scale,
            groups=routing.groups, top_groups=routing.top_groups, dtype=router.dtype,
            act=self.act, shared_dtype=build.dtype,
        )  # fmt: skip
        self.route = build.op(route_op, experts=self.experts)

    def _build_experts(
        self, build: BuildContext, inner: int, width: int, names: tuple[str, ...]
    ) -> None:
        """The experts' weights, between `width` and `inner`, and their op."""
        *into, down_name = names
        sizes = (build, self.experts, self.top_k)
        fused = "gate_up_proj" if self.act == "silu_mul" else "up_proj"
        self.up = ExpertWeight(*sizes, width, dict.fromkeys(into, inner), fused)
        self.down = ExpertWeight(*sizes, inner, {down_name: width}, "down_proj")
        packed = self.up.weight is None or self.down.weight is None
        self.mix = build.op(experts_op, experts=self.experts, top_k=self.top_k, quantized=packed)

    def forward(self, x: Tensor) -> Tensor:
        beside, logits, gate = self.router(x).split(self.widths, dim=-1)
        first = beside if self.shared_up is None else self.shared_up(x)
        ids, weights, inner, part = self.route(
            logits,
            self.top_k,
            bias=self.bias,
            shared=None if self.shared_down is None else first,
            shared_gate=gate if gate.shape[-1] else None,
            **self.choice,
        )
        shared = None if self.shared_down is None else self.shared_down(inner)
        given = (self.up.stored, self.down.stored, ids, weights)
        if self.into_latent is None or self.out_of_latent is None:
            return self.mix(x, *given, shared, part, act=self.act)
        routed = self.out_of_latent(self.mix(self.into_latent(x), *given, act=self.act))
        return routed if shared is None else routed + shared

    def weights(self) -> dict[str, Target]:
        """Checkpoint name within the mixture -> what it fills."""
        maps = (self.router, self.up, self.down, self.shared_up, self.shared_down,
                self.into_latent, self.out_of_latent)  # fmt: skip
        table: dict[str, Target] = {}
        for part in maps:
            table |= {} if part is None else part.weights()
        if self.bias is not None:
            table["gate.e_score_correction_bias"] = self.bias
        return table


def _in_fp32(build: BuildContext) -> BuildContext:
    """The same build for weights in fp32."""
    found = copy(build)
    found.dtype = torch.float32
    return found


def _one_product(build: BuildContext, inputs: int, outputs: Mapping[str, int]) -> bool:
    """Whether these linear maps of `inputs` columns are one product."""
    reads = [build.module(name, n, inputs) for name, n in outputs.items()]
    return len(products_of(runs_of(build, reads), inputs)) == 1


def _read(
    build: BuildContext, name: str, n: int, k: int, fused: TensorInfo | None
) -> CheckpointLinear:
    """An expert's linear map, as the checkpoint has it: by itself, or as a part of `fused`."""
    found = build.module(name, n, k)
    if fused is None:
        return found
    part = TensorInfo(fused.name, (n, k), fused.dtype)
    return CheckpointLinear(found.path, found.names, n, k, {"weight": part})


def _one_layout(build: BuildContext, reads: list[CheckpointLinear]) -> Layout | None:
    """How all of these are packed. Raises CheckpointError naming one that is packed otherwise, or
    shares nothing with the others."""
    layouts = [build.layout(read) for read in reads]
    if layouts[0] is not None and layouts[0].apart:
        raise CheckpointError(
            f"{reads[0].path} has its columns in an order of its own (desc_act or actorder); "
            "allowed: experts with columns in order, since those of a layer are one weight. "
            "Serve a checkpoint that was packed without it."
        )
    (usual, _), *others = Counter(layouts).most_common()
    for layout, read in zip(layouts, reads, strict=True):
        if others and layout != usual:
            raise CheckpointError(
                f"{read.path} is stored as {_named(layout, read)}, other experts of its layer as "
                f"{_named(usual, reads[layouts.index(usual)])}; allowed: one way for all of them. "
                "Serve a checkpoint whose experts are all there and packed alike."
            )
    return usual


def _named(layout: Layout | None, read: CheckpointLinear) -> str:
    if layout is None:
        return "nothing: it has no tensors" if read.tensors == {} else "a plain weight"
    return str(layout)
