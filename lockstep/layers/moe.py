"""Mixture of experts: dispatch a token to its top-k experts, run them, combine their outputs."""

from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lockstep.errors import CheckpointError, ConfigError
from lockstep.kernels.activations import Act
from lockstep.kernels.experts import experts as experts_op
from lockstep.kernels.formats.weights import Fp8Weight, QuantizedWeight
from lockstep.kernels.route import Scoring
from lockstep.kernels.route import route as route_op
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import (
    Linear,
    PartialLinear,
    Target,
    Weight,
    group_into_gemms,
    joined_ranges,
    weight_sinks,
)
from lockstep.layers.sharding import Columns, count_columns
from lockstep.quantization import CheckpointLinear, Layout, TensorInfo, WeightSink
from lockstep.quantization.weight_sink import FLOAT_DTYPES, FusedExpertSink
from lockstep.step import ForwardContext

MAX_BLOCK = 128
"""Maximum output columns that a format stores together (the 128 x 128 blocks of FP8)."""
GATED_MLP = ("gate_proj", "up_proj", "down_proj")
"""Names of a gated MLP's weights in most checkpoints; Mixtral calls them w1, w3, w2."""
RELU_MLP = ("up_proj", "down_proj")
"""Names of the weights of an MLP without a gate."""


@dataclass(frozen=True)
class Routing:
    """Rule by which a token chooses top_k of the experts.

    scoring, renormalize, scale, groups, top_groups: see lockstep.kernels.route. bias: whether a
    correction bias [experts] fp32 is added to the scores for the choice.

    Raises:
        ConfigError: the groups do not contain top_k experts.
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
        # Groups are ranked by the sum of their two best scores, so they need two experts.
        sound = sound and (self.groups == 1 or self.experts >= 2 * self.groups)
        if not sound or not 1 <= self.top_k <= self.top_groups * self.experts // self.groups:
            raise ConfigError(
                f"top_k={self.top_k} out of top_groups={self.top_groups} of groups={self.groups} "
                f"of experts={self.experts} is not allowed; allowed: groups of equal size, "
                "at least 2 experts each if there are several, of which top_groups hold top_k "
                "experts. Correct config.json."
            )


class ExpertWeight(Weight):
    """Linear layer of all experts: E weights [N, K], stored as E * N rows of one format.

    A plain weight is [E, N, K].

    Args:
        inputs: K.
        outputs: name of each weight within an expert -> its columns; together they are N.
        fused: name of all experts' weights as one tensor [E, N, K] (Qwen3.5, without `.weight`),
            which is used if the checkpoint has it.

    Raises:
        CheckpointError: the experts are stored in different formats.
    """

    def __init__(
        self,
        build: BuildContext,
        experts: int,
        top_k: int,
        inputs: int,
        outputs: Mapping[str, Columns],
        fused: str,
    ) -> None:
        info = build.submodule_tensors("experts").get(fused)
        self.fused = None if info is None else f"experts.{fused}"
        self.weight_format = build.weight_format
        self.experts = experts
        self.top_k = top_k
        columns = Columns(tuple(part for output in outputs.values() for part in output.parts))
        self.whole_rows = columns.total
        self.ranges = columns.ranges(build.rank)
        self.rows = count_columns(columns, build.rank)
        self.names = [f"experts.{e}.{name}" for e in range(experts) for name in outputs]
        modules = zip(self.names, [*outputs.values()] * experts, strict=True)
        self.sources = [_describe_expert(build, name, n, inputs, info) for name, n in modules]
        layout = _common_layout(build, self.sources)
        super().__init__(build, inputs, [(layout, experts * self.rows)])
        build.cut(self.weight, self.ranges, self.whole_rows, axis=1)
        for part in self.quantized_parts:
            layout = build.layout(self.sources[0].whole)
            build.cut_quantized(part, layout, *joined_ranges(self.sources))

    def _allocate(self, build: BuildContext) -> nn.Parameter:
        return build.matrices(self.experts, self.rows, self.shape[1])

    def _loaded_rows(self, begin: int, end: int) -> Tensor | QuantizedWeight:
        """Return rows of one expert in the storage that they have once they are loaded."""
        weight = self.loaded
        if isinstance(weight, QuantizedWeight):
            return weight.rows(begin, end)
        assert isinstance(weight, Tensor), "experts are not prepacked"
        (expert, first) = divmod(begin, self.rows)
        return weight[expert, first : first + end - begin]

    def weights(self) -> dict[str, Target]:
        """Map the checkpoint's tensors to their destinations, per expert or fused."""
        if self.fused is not None and isinstance(self.stored, Tensor):
            if not self.ranges:
                return {self.fused: self.stored}
            return {self.fused: self._fused_sink(self.stored.data.copy_)}
        table: dict[str, Target] = {}
        begin = 0
        for name, module in zip(self.names, self.sources, strict=True):
            rows = self.stored_rows(begin, begin + module.outputs)
            table |= weight_sinks(name, rows, self.weight_format, module)
            begin += module.outputs
        if self.fused is not None:
            parts = [WeightSink.of(table.pop(f"{name}.weight")) for name in self.names]
            table[self.fused] = self._fused_sink(self._split_fill(parts))
        elif isinstance(self.stored, QuantizedWeight) and not self.ranges:
            self._fuse_sinks(self.stored, table)
        return table

    def _fuse_sinks(self, weight: QuantizedWeight, table: dict[str, Target]) -> None:
        """Replace the experts' sinks by ones that copy all experts' tensors of a kind at once.

        Does nothing if a word or a block of scales could reach from one expert into the next.
        """
        assert self.weight_format is not None, "only a weight format quantizes"
        if any(module.outputs % MAX_BLOCK for module in self.sources):
            return
        first = self.sources[0]
        rows = weight.shape[0]
        fused_sinks = self.weight_format.sinks(
            replace(first, outputs=rows, whole_outputs=rows), weight
        )
        for suffix in {name.rpartition(".")[2] for name in table}:
            names = [f"{name}.{suffix}" for name in self.names]
            if all(name in table for name in names):
                parts = [WeightSink.of(table[name]) for name in names]
                table |= zip(
                    names, FusedExpertSink.sinks(fused_sinks.get(suffix), parts), strict=True
                )

    def _fused_sink(self, fill: Callable[[Tensor], object]) -> WeightSink:
        """Return the sink of one tensor [E, N, K]; its columns are cut within each expert."""
        shape = (self.experts, self.whole_rows, self.shape[1])
        device = self.stored.device
        return WeightSink(shape, FLOAT_DTYPES, device, fill, shard_axis=1, ranges=self.ranges)

    def _split_fill(self, parts: list[WeightSink]) -> Callable[[Tensor], None]:
        """Return a function that splits the fused tensor among the experts' sinks.

        It quantizes a plain fused tensor while it is loaded.
        """
        sizes = [module.outputs for module in self.sources]

        def fill(tensor: Tensor) -> None:
            for part, rows in zip(parts, tensor.flatten(0, 1).split(sizes), strict=True):
                part.fill(rows)

        return fill


@dataclass
class DispatchResult:
    """Result of dispatch: where each token goes, and the shared expert's part.

    ids [T, k] int32 and weights [T, k]: the experts of each token. shared: output of the shared
    expert [T, H], or its split-K partials. shared_gate [T]: scalar gate of the shared expert.
    """

    ids: Tensor
    weights: Tensor
    shared: Tensor | None
    shared_gate: Tensor | None


class MoE(nn.Module):
    """Mixture of experts: x [T, H] -> delta [T, H].

    The delta is the weighted sum of the outputs of a token's top-k experts, plus a shared expert.
    Families that score by softmax (Qwen, Mixtral) route in the model's dtype, with the softmax in
    fp32; families that score by sigmoid (DeepSeek-V3, Nemotron-H) route in fp32, router weight
    included. The shared expert's gate and up projections are fused with the router where their
    dtypes are equal and one GEMM can serve both (lockstep.layers.linear.group_into_gemms).

    Args:
        hidden: H.
        inner: width between an expert's up and down projections.
        act: silu_mul for gated MLPs, or relu2.
        names: an expert's gate (if it has one), up and down projections in the checkpoint.
        shared_inner: width of the shared expert, 0 for none.
        shared_name: name of the shared expert (DeepSeek: shared_experts).
        shared_gate: multiply the shared expert's output by sigmoid(x w^T).
        latent: width in which the routed experts work, between fc1_latent_proj and fc2_latent_proj
            (Nemotron 3 Super); 0: the width of x.
        bias: whether the shared expert and the latent projections have biases.

    Raises:
        CheckpointError: the experts are stored in different formats.
        ConfigError: the shared expert's gate does not fit the routing, or FP8 activations were
            chosen, which experts do not support.
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
                f"and shared_inner={shared_inner}. Correct config.json."
            )
        self.experts = routing.experts
        self.top_k = routing.top_k
        self.act: Act = act
        *up_names, down_name = GATED_MLP if act == "silu_mul" else RELU_MLP
        shared_up: dict[str, int | Columns] = {}
        if shared_inner:
            shared_up = {f"{shared_name}.{n}": Columns.of(shared_inner) for n in up_names}
        # The router is whole on every rank, so that all ranks choose the same experts.
        routed: dict[str, int | Columns] = {"gate": self.experts}
        routed |= {f"{shared_name}_gate": 1} if shared_gate else {}
        self._build_router(build, hidden, routed, shared_up, routing, bias)
        self._build_experts(build, inner, latent or hidden, names)
        self.into_latent = self.out_of_latent = None
        if latent:
            self.into_latent = Linear(build, hidden, {"fc1_latent_proj": latent}, bias=bias)
            outputs = {"fc2_latent_proj": Columns.of(hidden)}
            self.out_of_latent = Linear(build, Columns.of(latent), outputs, bias=bias)
        self.shared_down = None
        if shared_inner:
            down = {f"{shared_name}.{down_name}": Columns.of(hidden)}
            # combine() adds a whole output; only the experts op adds partials.
            last = Linear if latent else PartialLinear
            self.shared_down = last(build, Columns.of(shared_inner), down, bias=bias)

    def _build_router(
        self,
        build: BuildContext,
        hidden: int,
        routed: dict[str, int | Columns],
        shared_up: dict[str, int | Columns],
        routing: Routing,
        bias: bool,
    ) -> None:
        """Build the router and its op; `shared_up` joins its GEMM, or gets a separate one."""
        # The router has no bias, so a shared expert with one needs a separate GEMM.
        router = _fp32_build(build) if routing.scoring == "sigmoid" else build
        one_gemm = (
            not bias
            and router.dtype == build.dtype
            and _is_one_gemm(build, hidden, shared_up | routed)
        )
        fused = shared_up if one_gemm else {}
        separate = shared_up and not one_gemm
        self.shared_up = PartialLinear(build, hidden, shared_up, bias=bias) if separate else None
        self.router = PartialLinear(router, hidden, fused | routed)
        fused_width = sum(count_columns(columns, build.rank) for columns in fused.values())
        self.widths = (fused_width, self.experts, len(routed) - 1)
        self.bias = build.empty(self.experts, dtype=torch.float32) if routing.bias else None
        self.routing_arguments = dict(
            scoring=routing.scoring, renormalize=routing.renormalize, scale=routing.scale,
            groups=routing.groups, top_groups=routing.top_groups, dtype=router.dtype,
            act=self.act, shared_dtype=build.dtype,
        )  # fmt: skip
        self.route = build.op(route_op, experts=self.experts, top_k=self.top_k)

    def _build_experts(
        self, build: BuildContext, inner: int, width: int, names: tuple[str, ...]
    ) -> None:
        """Build the experts' weights [inner, width] and [width, inner], and their op."""
        *up_names, down_name = names
        sizes = (build, self.experts, self.top_k)
        fused = "gate_up_proj" if self.act == "silu_mul" else "up_proj"
        up = dict.fromkeys(up_names, Columns.of(inner))
        self.up = ExpertWeight(*sizes, width, up, fused)
        self.down = ExpertWeight(*sizes, inner, {down_name: Columns.of(width)}, "down_proj")
        self.gather_inner = build.exchange(Columns.of(inner), rows=self.top_k)
        quantized = self.up.weight is None or self.down.weight is None
        shape = dict(hidden=width, inner=inner, act=self.act)
        self.mlp_op = build.op(
            experts_op, experts=self.experts, top_k=self.top_k, quantized=quantized, **shape
        )

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        dispatched = self.dispatch(x, ctx)
        if self.into_latent is None or self.out_of_latent is None:
            # The op combines in the launch of the down projections.
            return self.grouped_mlp(x, dispatched, dispatched.shared, dispatched.shared_gate)
        latent = self.grouped_mlp(self.into_latent(x, ctx), dispatched)
        return self.combine(self.out_of_latent(latent, ctx), dispatched)

    def dispatch(self, x: Tensor, ctx: ForwardContext) -> DispatchResult:
        """Choose the experts of each token, and run the shared expert."""
        # Strided views of one tensor, which the op reads without copies.
        fused, logits, gate = self.router(x, ctx).split(self.widths, dim=-1)
        shared_inner = fused if self.shared_up is None else self.shared_up(x, ctx)
        ids, weights, activated, shared_gate = self.route(
            logits,
            self.top_k,
            bias=self.bias,
            shared=None if self.shared_down is None else shared_inner,
            shared_gate=gate if gate.shape[-1] else None,
            **self.routing_arguments,
        )
        shared = None if self.shared_down is None else self.shared_down(activated, ctx)
        return DispatchResult(ids, weights, shared, shared_gate)

    def grouped_mlp(
        self,
        x: Tensor,
        routed: DispatchResult,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
    ) -> Tensor:
        """Run each token's experts; return their weighted sum, plus `shared` unless it is None."""
        weights = (self.up.stored, self.down.stored, routed.ids, routed.weights)
        options = dict(act=self.act, count=self.experts, gather=self.gather_inner)
        return self.mlp_op(x, *weights, shared, shared_gate, **options)

    def combine(self, output: Tensor, routed: DispatchResult) -> Tensor:
        """Add the shared expert to the routed experts' output [T, H]."""
        return output if routed.shared is None else output + routed.shared

    def weights(self) -> dict[str, Target]:
        """Map the checkpoint's tensors, by name within the mixture, to their destinations."""
        layers = (self.router, self.up, self.down, self.shared_up, self.shared_down,
                  self.into_latent, self.out_of_latent)  # fmt: skip
        table: dict[str, Target] = {}
        for layer in layers:
            table |= {} if layer is None else layer.weights()
        if self.bias is not None:
            table["gate.e_score_correction_bias"] = self.bias
        return table


def _fp32_build(build: BuildContext) -> BuildContext:
    """Return the same build context for weights in fp32."""
    fp32 = copy(build)
    fp32.dtype = torch.float32
    return fp32


def _is_one_gemm(build: BuildContext, inputs: int, outputs: Mapping[str, int | Columns]) -> bool:
    """Return whether linear layers of `inputs` columns can be served by one GEMM."""
    modules = [build.module(name, n, inputs) for name, n in outputs.items()]
    return len(group_into_gemms(build, modules, inputs)) == 1


def _describe_expert(
    build: BuildContext, name: str, columns: Columns, k: int, fused: TensorInfo | None
) -> CheckpointLinear:
    """Describe an expert's linear layer: a separate tensor, or a part of `fused`."""
    module = build.module(name, columns, k)
    if fused is None:
        return module
    part = TensorInfo(fused.name, (module.whole_outputs, k), fused.dtype)
    return replace(module, tensors={"weight": part})


def _common_layout(build: BuildContext, modules: list[CheckpointLinear]) -> Layout | None:
    """Return the storage format of all experts of a layer.

    Raises:
        CheckpointError: an expert has another format, or one that cannot be fused.
        ConfigError: FP8 activations were chosen, and the experts have e4m3 weights.
    """
    layouts = [build.layout(module) for module in modules]
    if layouts[0] is not None and layouts[0].fusion_key:
        raise CheckpointError(
            f"{modules[0].path} has its columns in an order of its own (desc_act or actorder); "
            "allowed: experts with columns in order, since those of a layer are one weight. "
            "Serve a checkpoint that was quantized without it."
        )
    (usual, _), *other_layouts = Counter(layouts).most_common()
    for layout, module in zip(layouts, modules, strict=True):
        if other_layouts and layout != usual:
            first = modules[layouts.index(usual)]
            raise CheckpointError(
                f"{module.path} is stored as {_describe_layout(layout, module)}, other experts of "
                f"its layer as {_describe_layout(usual, first)}; allowed: one format for all of "
                "them. Serve a checkpoint that has all experts in one format."
            )
    if build.quantizes_activations and usual is not None and usual.kind is Fp8Weight:
        raise ConfigError(
            f"activation_dtype='fp8' is not allowed with {modules[0].path}: experts multiply "
            "activations of the model's dtype; allowed: 'auto' with e4m3 experts. Leave the "
            "setting out."
        )
    return usual


def _describe_layout(layout: Layout | None, module: CheckpointLinear) -> str:
    """Return a storage format as text for an error message."""
    if layout is None:
        return "nothing: it has no tensors" if module.tensors == {} else "a plain weight"
    return str(layout)
