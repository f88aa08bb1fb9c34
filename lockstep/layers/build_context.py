"""Context in which a model is built: device, dtype and checkpoint."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from lockstep.kernels import Op
from lockstep.kernels.activations import Act
from lockstep.kernels.exchange import (
    ALONE,
    Activation,
    AddNorm,
    Gather,
    RankGroup,
    all_columns,
    exchange,
    exchange_add_rms_norm,
)
from lockstep.kernels.formats.weights import Fp8Weight, QuantizedWeight
from lockstep.kernels.fp8_linear import fp8_linear
from lockstep.kernels.linear import draft_linear, linear
from lockstep.kernels.linear.prepacked import dequantizes, fits_tiles
from lockstep.kernels.linear.probe import Probed
from lockstep.kernels.norm import add_rms_norm
from lockstep.kernels.sampling import LogitShard
from lockstep.kernels.selection import DEFAULT, KernelSelection, Replacement
from lockstep.layers.adapters import NO_ADAPTERS, AdapterTable
from lockstep.layers.exchange import Exchange
from lockstep.layers.kv_format import LayerKVFormats
from lockstep.layers.memory_budget import MemoryBudget
from lockstep.layers.sharding import Columns, QuantizedShard, Rank, Shard, count_columns
from lockstep.quantization import CheckpointLinear, Layout, Ranges, TensorInfo, WeightFormat


@dataclass
class BackendChoice:
    """Backend that serves one op of one layer, and why the others do not.

    size: shape of a linear layer's weight, "34816x5120", else empty.
    storage_format: of a quantized weight, else empty.
    """

    layer: str
    op: str
    backend: str
    refused: dict[str, str]
    size: str = ""
    storage_format: str = ""


@dataclass(frozen=True)
class KernelNeed:
    """Kernel that a layer needs: an op and the traits by which its backend is chosen.

    layout: storage of a quantized weight, None for a plain one. split_k: split-K partitions of a
    linear layer's weight.
    """

    op: str
    traits: dict[str, Any]
    layout: Layout | None = None
    split_k: int = 1


@dataclass
class BuildContext:
    """Device, dtype and checkpoint of a model under construction.

    exact: False for drafters only, whose linear layers may use any kernel. window: maximum tokens
    of a generated step (K + 1), which sizes a recurrent mixer's window. max_positions: positions
    that a row may reach, steps in flight included. max_model_len: longest sequence that is served
    (0: max_positions). layer: name of the layer under construction, for messages; name_prefix:
    prefix of such names. path: its module in the checkpoint, less the architecture's prefix.
    tensors: tensors of the checkpoint by module and suffix, None for dummy weights. prefixes: that
    names in the checkpoint may have. weight_format: None for plain weights. arch: architecture of a
    GPU that is not present, such as 86; None for the device's. kv: KV cache format of each layer.
    state_dtype: dtype of recurrent state between steps. group: the tensor-parallel ranks. adapters:
    those that linear layers make room for. shards, quantized_shards: of the parameters and
    quantized weights that are cut across ranks, by their id(). choices: backend of each op of each
    layer. probed: cuBLAS probes by N, K and dtype, shared by layers of one size. kernels: rules by
    which backends are chosen. needs: kernels of the layers. replacements: of sick backends.
    redefined: "op=backend" of backends with other bits than those that serve by default.
    memory_budget: counts the bytes of weights before they are allocated.
    """

    device: str
    dtype: torch.dtype
    window: int
    max_positions: int
    exact: bool = True
    layer: str = ""
    name_prefix: str = ""
    path: str = ""
    max_model_len: int = 0
    tensors: Mapping[str, Mapping[str, TensorInfo]] | None = None
    prefixes: tuple[str, ...] = ()
    weight_format: WeightFormat | None = None
    arch: int | None = None
    kv: LayerKVFormats = LayerKVFormats()
    state_dtype: torch.dtype = torch.float32
    group: RankGroup = ALONE
    adapters: AdapterTable = NO_ADAPTERS
    shards: dict[int, Shard] = field(default_factory=dict)
    quantized_shards: dict[int, QuantizedShard] = field(default_factory=dict)
    choices: list[BackendChoice] = field(default_factory=list)
    probed: dict[tuple[int, int, torch.dtype], Probed] = field(default_factory=dict)
    kernels: KernelSelection = DEFAULT
    needs: list[KernelNeed] = field(default_factory=list)
    replacements: list[Replacement] = field(default_factory=list)
    redefined: set[str] = field(default_factory=set)
    memory_budget: MemoryBudget = field(init=False)

    def __post_init__(self) -> None:
        self.memory_budget = MemoryBudget(self.device)
        self.max_model_len = self.max_model_len or self.max_positions

    @property
    def rank(self) -> Rank:
        """This process in the tensor-parallel group."""
        return Rank(self.group.index, self.group.size)

    def for_layer(self, layer: str, path: str | None = None) -> "BuildContext":
        """Return a copy for another layer, whose module in the checkpoint is `path` (None: the
        layer's name).
        """
        copied = copy(self)
        copied.layer = layer if layer == self.layer else self.name_prefix + layer
        copied.path = layer if path is None else path
        return copied

    def for_submodule(self, name: str) -> "BuildContext":
        """Return a copy for a submodule of the current module."""
        return self.for_layer(self.layer, f"{self.path}.{name}")

    def for_checkpoint(
        self,
        tensors: Mapping[str, Mapping[str, TensorInfo]] | None,
        prefixes: tuple[str, ...],
        weight_format: WeightFormat | None,
    ) -> "BuildContext":
        """Return a copy that describes a module of another checkpoint."""
        copied = copy(self)
        copied.tensors = tensors
        copied.prefixes = prefixes
        copied.weight_format = weight_format
        return copied

    def module(self, name: str, outputs: int | Columns, inputs: int) -> CheckpointLinear:
        """Describe a linear layer of the current module as the checkpoint stores it.

        Args:
            outputs: columns that are whole on every rank, or Columns that are cut across ranks.
        """
        path = f"{self.path}.{name}" if self.path else name
        names = (*(prefix + path for prefix in self.prefixes), path)
        tensors = None if self.tensors is None else self.tensors.get(path, {})
        ranges = () if isinstance(outputs, int) else outputs.ranges(self.rank)
        total = outputs if isinstance(outputs, int) else outputs.total
        count = count_columns(outputs, self.rank)
        return CheckpointLinear(path, names, count, inputs, tensors, total, ranges)

    def submodule_tensors(self, name: str) -> Mapping[str, TensorInfo]:
        """Return the checkpoint's tensors of a submodule by suffix; {} for dummy weights."""
        return {} if self.tensors is None else self.tensors.get(f"{self.path}.{name}", {})

    def module_tensors(self, *names: str) -> Mapping[str, Mapping[str, TensorInfo]]:
        """Return the checkpoint's tensors of the current module ("") and of these submodules, by
        suffix.
        """
        if self.tensors is None:
            return {}
        tensors = {"": self.tensors.get(self.path, {})}
        return tensors | {name: self.submodule_tensors(name) for name in names}

    def layout(self, module: CheckpointLinear, by_linear: bool = False) -> Layout | None:
        """Return the layout of a quantized linear layer's weight; None if it is not quantized.

        On a CPU a checkpoint's reader dequantizes what no kernel would dequantize, if it can.
        by_linear: whether the op linear multiplies by the weight.
        """
        weight_format = self.weight_format
        keeps = self.device != "cpu" or (by_linear and self.linear_dequantizes)
        if weight_format is None or (weight_format.reader_dequantizes and not keeps):
            return None
        return weight_format.layout(module)

    @property
    def linear_dequantizes(self) -> bool:
        """Return whether the CPU backend of linear dequantizes weights where it multiplies."""
        name, _, _ = self.kernels.choose(linear, device=self.device, dtype=self.dtype)
        return self.exact and dequantizes(name, self.dtype)

    @property
    def quantizes_activations(self) -> bool:
        """Return whether linear layers quantize the activations of e4m3 weights.

        Drafters do not: their products need no exactness.
        """
        chosen = self.weight_format is not None and self.weight_format.quantizes_activations
        return chosen and self.exact

    def product_of(self, weight: QuantizedWeight | None) -> Op:
        """Return the op that multiplies by a weight; None: a plain one."""
        quantizes = self.quantizes_activations and isinstance(weight, Fp8Weight)
        return fp8_linear if quantizes else linear

    def keeps_quantized(self, weight: QuantizedWeight, by_linear: bool) -> bool:
        """Return whether a weight stays quantized once it is loaded. by_linear: see layout()."""
        if self.device != "cpu":
            return True
        dequantizes = self.linear_dequantizes and fits_tiles(weight)
        return by_linear and (dequantizes or self.product_of(weight) is fp8_linear)

    @property
    def head_loads_embedding(self) -> bool:
        """Return whether a tied head loads the tensor of an embedding that may be quantized."""
        may_be_quantized = self.weight_format is not None and self.weight_format.reader_dequantizes
        return self.device == "cpu" and may_be_quantized

    def op(self, op: Op, **traits: Any) -> Callable[..., Any]:
        """Choose the backend of an op for these traits and return its function."""
        traits = {"device": self.device, "dtype": self.dtype, **traits}
        if self.arch is not None:
            traits["arch"] = self.arch
        name, refused, replacement = self.kernels.choose(op, **traits)
        self.choices.append(BackendChoice(self.layer, op.name, name, refused))
        self.needs.append(KernelNeed(op.name, traits))
        if replacement is not None and replacement not in self.replacements:
            self.replacements.append(replacement)
        if self.kernels.redefined(op, name, **traits):
            self.redefined.add(f"{op.name}={name}")
        run = op.backends[name].run
        return self.kernels.wrapped(run, op.name, name, self.layer, self.device)

    def exchange(self, columns: Columns, rows: int = 1, act: Activation | None = None) -> Gather:
        """Return the function that gathers these columns: [T, this rank's] -> [T, all].

        It takes split-K partials [P, T, this rank's] fp32 too.

        Args:
            rows: that each token of a step has, such as one for each of its experts.
            act: makes the columns from the argument.
        """
        if self.rank.size == 1:
            return all_columns
        return self._exchange(exchange, columns, rows, dtype=self.dtype, act=act)

    def activation(self, op: Op, columns: Columns) -> Gather:
        """Return the function that applies an activation op and gathers its columns [T, all]."""
        run = self.op(op)
        if self.rank.size == 1:
            return run
        return self.exchange(columns, act=Activation(cast(Act, op.name), run))

    def add_rms_norm(self, width: int) -> AddNorm:
        """Return add_rms_norm for a delta that has this rank's columns of `width`."""
        run: AddNorm = self.op(add_rms_norm, width=width)
        if self.rank.size == 1:
            return run
        return self._exchange(exchange_add_rms_norm, Columns.of(width), add_norm=run)

    def logit_shard(self, columns: Columns) -> LogitShard:
        """Return this rank's share of the logits of a head with these columns."""
        if not columns.ranges(self.rank):
            return LogitShard((columns.total,))
        run = partial(self._exchange_op(exchange), group=self.group)
        return LogitShard(self._widths(columns), self.rank.index, run)

    def _exchange(self, op: Op, columns: Columns, rows: int = 1, **options: Any) -> Exchange:
        """Return the exchange of these columns by an op, bound to these options."""
        widths = self._widths(columns)
        received = (sum(widths) - widths[self.rank.index]) * self.dtype.itemsize
        bound = partial(self._exchange_op(op), widths=widths, group=self.group, **options)
        return Exchange(bound, self.layer, rows * received)

    def _exchange_op(self, op: Op) -> Callable[..., Any]:
        """Return the backend of an op that exchanges columns."""
        return self.op(op, ranks=self.rank.size, peer_access=self.group.peers is not None)

    def _widths(self, columns: Columns) -> tuple[int, ...]:
        """Return the number of columns of each rank."""
        ranks = (Rank(index, self.rank.size) for index in range(self.rank.size))
        return tuple(count_columns(columns, rank) for rank in ranks)

    def cut(
        self,
        parameter: Tensor | None,
        ranges: Ranges,
        total: int,
        axis: int = 0,
        order: Tensor | None = None,
    ) -> None:
        """Record which slice of the whole parameter this one is: see Shard."""
        if parameter is not None and (ranges or order is not None):
            self.shards[id(parameter)] = Shard(axis, ranges, total, order)

    def cut_quantized(
        self, weight: QuantizedWeight, layout: Layout | None, ranges: Ranges, total: int
    ) -> None:
        """Record which columns of the whole quantized weight this one has: see QuantizedShard."""
        if layout is not None and ranges:
            self.quantized_shards[id(weight)] = QuantizedShard(layout, ranges, total)

    def linear_op(self, op: Op, n: int, k: int, quantized: str = "") -> Callable[..., Any]:
        """Return the kernel of a weight [n, k]: canonical, or the fastest for a drafter.

        On a GPU cuBLAS may serve where lockstep.kernels.linear.probe finds the canonical bits.
        quantized: class name of a quantized weight, "" for a plain one.
        """
        if not self.exact and not quantized:
            self.choices.append(BackendChoice(self.layer, op.name, "draft", {}, f"{n}x{k}"))
            return draft_linear
        exact = self.op(op, n=n, k=k, quantized=quantized)
        self.choices[-1].size = f"{n}x{k}"
        can_probe = self.choices[-1].backend == "triton" and "cublas" in op.backends
        if not can_probe or not self.kernels.probes_cublas(op):
            return exact
        fast = op.backends["cublas"].run
        return self.probed.setdefault((n, k, self.dtype), Probed(exact, fast))

    def matrix(self, n: int, k: int) -> torch.nn.Parameter:
        """Return an unfilled weight [n, k] in the storage order of its op: [k, n] on a CPU."""
        if self.device == "cpu":
            self._count((n, k), self.dtype)
            stored = torch.empty(k, n, dtype=self.dtype).t()
            return torch.nn.Parameter(stored, requires_grad=False)
        return self.empty(n, k)

    def matrices(self, count: int, n: int, k: int) -> torch.nn.Parameter:
        """Return unfilled weights [count, n, k], each stored like matrix()."""
        if self.device != "cpu":
            return self.empty(count, n, k)
        stored = self.empty(count, k, n).data.transpose(1, 2)
        return torch.nn.Parameter(stored, requires_grad=False)

    def quantized_weight(self, n: int, k: int, layout: Layout) -> QuantizedWeight:
        """Return an unfilled quantized weight [n, k]."""
        self.reserve(layout.empty(n, k, "meta").nbytes, (n, k))
        return layout.empty(n, k, self.device)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """Return an unfilled parameter."""
        self._count(shape, dtype or self.dtype)
        tensor = torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)
        return torch.nn.Parameter(tensor, requires_grad=False)

    def _count(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.reserve(prod(shape) * dtype.itemsize, shape)

    def reserve(self, size: int, shape: tuple[int, ...]) -> None:
        """Count the bytes of a weight before they are allocated. Raises CapacityError."""
        remedy = "Correct the sizes in config.json, or choose a smaller model or dtype."
        name = f"a weight {list(shape)} of {self.layer or 'the model'}"
        self.memory_budget.take(size, name, remedy)
