"""Linear layers: one weight, or several fused along their output columns, quantized or not."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from lockstep.errors import CheckpointError
from lockstep.kernels.exchange import Gather, all_columns
from lockstep.kernels.formats.weights import K_BLOCK, Fp8Weight, QuantizedWeight
from lockstep.kernels.fp8_linear import QuantizedRows, choose_fp8_split_k, fp8_linear
from lockstep.kernels.fp8_linear.cpu import PrepackedFp8Weight
from lockstep.kernels.linear import choose_split_k, linear
from lockstep.kernels.linear.prepacked import PrepackedWeight, dequantizes, fits_tiles, prepack
from lockstep.layers.build_context import BuildContext
from lockstep.layers.exchange import Exchange
from lockstep.layers.lora import AddAdapters, LoRA, no_adapters
from lockstep.layers.sharding import Columns, Rank, column_sink, row_sink
from lockstep.quantization import CheckpointLinear, Layout, Ranges, WeightFormat, WeightSink
from lockstep.step import ForwardContext

PROBED_LAYERS = 4
"""Layers of one shape whose weights a cuBLAS probe cycles through, to exceed a GPU's cache."""
MAX_DEQUANTIZED = 1 << 22
"""Maximum elements that are dequantized at load time, so that they share a GEMM with plain weights.

Reading that many elements in 16 bits takes an H200 1.0 us (8-bit codes) to 1.5 us (4-bit codes)
longer than reading the codes; a separate launch takes 2.8 us.
"""
ROWS_AT_ONCE = 4096
"""Rows of a head that are copied at once: bounds the memory of every rank's candidates."""
Target = Tensor | WeightSink
"""Destination of a checkpoint tensor: a parameter of the same shape, or a sink."""
RowGroup = tuple[Layout | None, int]
"""Consecutive rows of a weight with one storage format (None: plain): (format, rows)."""


class Weight(nn.Module):
    """Weight [N, K] in one storage format.

    A single quantized row group stays quantized where its op dequantizes. Any other quantized
    group is dequantized once, after loading: op(quantized) == op(dequantize(quantized)), so the
    bits are the same.

    Args:
        row_groups: consecutive row ranges of the checkpoint with one storage format.
        existing: share this parameter, or the storage of a weight that is finished earlier, instead
            of allocating one.

    Attributes:
        weight, quantized, prepacked: the storage; exactly one is set once weights are loaded.
        shared: the weight whose storage this one has, if any. In a tuple, so that nn.Module does
            not register it as a submodule.
        load_buffers: quantized groups until they are dequantized, by their first row.
        by_linear: whether the op linear multiplies by the weight.
    """

    by_linear = False

    def __init__(
        self,
        build: BuildContext,
        k: int,
        row_groups: Sequence[RowGroup],
        existing: "nn.Parameter | Weight | None" = None,
    ) -> None:
        super().__init__()
        n = sum(rows for _, rows in row_groups)
        self.shape = (n, k)
        self.dtype = build.dtype
        self.shared: tuple[Weight, ...] = ()
        self.weight: nn.Parameter | None = None
        self.quantized: QuantizedWeight | None = None
        self.prepacked: PrepackedWeight | None = None
        if isinstance(existing, Weight):
            self.shared = (existing,)
            self.weight = existing.weight
            self.quantized = existing.quantized
        else:
            self.weight = existing
        self.load_buffers: dict[int, QuantizedWeight] = {}
        if existing is not None:
            return
        begins = accumulate((rows for _, rows in row_groups), initial=0)
        for begin, (layout, rows) in zip(begins, row_groups, strict=False):
            if layout is not None:
                self.load_buffers[begin] = build.quantized_weight(rows, k, layout)
        single = self.load_buffers.get(0) if len(row_groups) == 1 else None
        if single is not None and build.keeps_quantized(single, self.by_linear):
            self.quantized = self.load_buffers.pop(0)
        if self.quantized is None:
            self.weight = self._allocate(build)

    def _allocate(self, build: BuildContext) -> nn.Parameter:
        """Return an unfilled plain weight."""
        return build.matrix(*self.shape)

    @property
    def loaded(self) -> nn.Parameter | QuantizedWeight | PrepackedWeight:
        """Weight [N, K] in the storage that it has once it is loaded."""
        storages = (self.weight, self.quantized, self.prepacked)
        return next(storage for storage in storages if storage is not None)

    @property
    def stored(self) -> Tensor | QuantizedWeight | PrepackedWeight:
        """Weight [N, K] in its present storage: quantized until a single group is dequantized."""
        part = self.load_buffers.get(0)
        if part is not None and part.shape[0] == self.shape[0]:
            return part
        return self.loaded

    @property
    def quantized_parts(self) -> list[QuantizedWeight]:
        """Return all quantized storage, including what is dequantized after loading."""
        return [*self.load_buffers.values(), *([] if self.quantized is None else [self.quantized])]

    def stored_rows(self, begin: int, end: int) -> Tensor | QuantizedWeight:
        """Return rows in their present storage: the checkpoint's until finish(), then loaded."""
        for first, part in self.load_buffers.items():
            if first <= begin and end <= first + part.shape[0]:
                return part.rows(begin - first, end - first)
        return self._loaded_rows(begin, end)

    def _loaded_rows(self, begin: int, end: int) -> Tensor | QuantizedWeight:
        """Return rows in the storage that they have once they are loaded."""
        weight = self.loaded
        return weight[begin:end] if isinstance(weight, Tensor) else weight.rows(begin, end)

    def gather(self, ids: Tensor, out: Tensor) -> None:
        """Copy the rows of these ids into out [len(ids), K], which has the model's dtype."""
        weight = self.stored
        if isinstance(weight, PrepackedWeight):
            weight = weight.plain()
        if isinstance(weight, Tensor):
            torch.index_select(weight, 0, ids.to(weight.device), out=out)
        else:
            out.copy_(weight.gather(ids).dequantize(self.dtype))

    def finish(self) -> None:
        """Dequantize what does not stay quantized. Call once, after the checkpoint is loaded."""
        for begin, part in self.load_buffers.items():
            assert self.weight is not None, "groups are dequantized into the plain weight"
            # A weight of experts is [E, N, K], with N rows for each index of its first dimension.
            rows = self.shape[0] // len(self.weight)
            end = begin + part.shape[0]
            target = self.weight.data[begin // rows : end // rows]
            target.copy_(part.dequantize(self.dtype).view(target.shape))
        self.load_buffers = {}
        if self.quantized is not None and not self.shared:
            self.quantized.finalize()


def quantized_weights(*roots: nn.Module | None) -> list[QuantizedWeight]:
    """Return the quantized weights of models, each once; None: no model."""
    modules = [module for root in roots if root is not None for module in root.modules()]
    parts = [part for m in modules if isinstance(m, Weight) for part in m.quantized_parts]
    return list({id(part): part for part in parts}.values())


class Gemm(Weight):
    """Matrix product: x [T, K] -> x W^T [T, N] over a weight of one storage format.

    keeps_plain: whether the plain weight stays next to a CPU's prepacked copy, since an embedding
    or a drafter's head shares it.

    Args:
        total: output columns of the whole layer on all ranks; None: the columns of this weight.
        weight_columns: output columns of this weight on all ranks; None: total. Both decide the
            number of split-K partitions (lockstep.kernels.linear.choose_split_k).
        allow_partials: see lockstep.kernels.linear.linear.

    Attributes:
        product: op that multiplies by the weight: linear, or fp8_linear where activations are
            quantized.
    """

    by_linear = True
    keeps_plain = False

    def __init__(
        self,
        build: BuildContext,
        k: int,
        row_groups: Sequence[RowGroup],
        *,
        existing: nn.Parameter | Weight | None = None,
        total: int | None = None,
        weight_columns: int | None = None,
        allow_partials: bool = False,
    ) -> None:
        super().__init__(build, k, row_groups, existing)
        n = self.shape[0]
        quantized = self.quantized is not None
        self.product = build.product_of(self.quantized)
        columns = total or n
        if self.product is fp8_linear:
            self.split_k = choose_fp8_split_k(columns, k, build.device)
        else:
            traits = (build.device, quantized, build.dtype)
            self.split_k = choose_split_k(
                weight_columns or columns, k, *traits, layer_outputs=columns
            )
        self.allow_partials = allow_partials
        kind = type(self.quantized).__name__ if quantized else ""
        self.linear = build.linear_op(self.product, n=n, k=k, quantized=kind)
        choice = build.choices[-1]
        prepacks = build.device == "cpu" and build.exact
        if build.device == "cpu" and self.quantized is not None:
            # A drafter's head may share a quantized weight of the target.
            prepacks = dequantizes(choice.backend, self.dtype) and fits_tiles(self.quantized)
        self.prepack: Callable[[Any], PrepackedWeight] | None = None
        if build.device == "cpu" and self.product is fp8_linear:
            self.prepack = partial(PrepackedFp8Weight, dtype=self.dtype)
            if not self.shared:
                assert isinstance(self.quantized, Fp8Weight), "product_of() chose by this class"
                size = PrepackedFp8Weight.bytes_of(self.quantized) - self.quantized.nbytes
                build.reserve(size, self.shape)
        elif prepacks:
            self.prepack = partial(prepack, choice.backend)
        choice.storage_format = _describe(row_groups, dequantized=not quantized)
        if quantized or build.exact:  # other products are no canonical op
            layout = row_groups[0][0] if quantized else None
            build.needs[-1] = replace(build.needs[-1], layout=layout, split_k=self.split_k)

    def finish(self) -> None:
        """Finish the weight and prepack it on a CPU.

        The plain copy is dropped unless another module reads it.
        """
        super().finish()
        if self.quantized is not None and self.shared:
            # The layer that has loaded the weight is finished, and may have prepacked it.
            (owner,) = self.shared
            self.prepacked = owner.prepacked
            self.quantized = owner.quantized
        elif self.prepack is None:
            return
        elif self.quantized is not None:
            self.prepacked = self.prepack(self.quantized)
            self.quantized = None
        elif self.weight is not None:
            self.prepacked = self.prepack(self.weight.data)
            if not self.keeps_plain:
                self.weight = None

    @property
    def takes_codes(self) -> bool:
        """Return whether the product reads rows that their producer has quantized, on a GPU."""
        weight = self.quantized
        by_block = isinstance(weight, Fp8Weight) and weight.block_k == K_BLOCK < weight.k
        return self.product is fp8_linear and by_block and self.prepack is None

    def forward(
        self, x: Tensor | QuantizedRows, begin: int = 0, out: Tensor | None = None
    ) -> Tensor:
        """Return the output columns from `begin` on, written into `out` if it is given.

        Only these columns' weights are read.
        """
        if isinstance(x, QuantizedRows) and not self.takes_codes:
            assert x.plain is not None, "Linear.reads_plain told the producer"
            x = x.plain
        weight: Tensor | QuantizedWeight | PrepackedWeight
        if begin:
            weight = self.stored_rows(begin, self.shape[0])
        else:
            weight = self.prepacked or self.stored
        if out is None:
            return self.linear(x, weight, self.split_k, self.allow_partials)
        return self.linear(x, weight, self.split_k, out=out)


def _describe(row_groups: Sequence[RowGroup], dequantized: bool) -> str:
    """Return the storage formats of row groups as text; "" if none is quantized."""
    formats = [f"{layout}, {rows} rows" for layout, rows in row_groups if layout is not None]
    if len(row_groups) == 1:
        formats = [str(layout) for layout, _ in row_groups if layout is not None]
    return "; ".join(formats) + ", dequantized when loaded" * (dequantized and bool(formats))


def row_groups_of(build: BuildContext, modules: Sequence[CheckpointLinear]) -> list[RowGroup]:
    """Return the row groups of fused linear layers.

    Neighbours share a group if their formats are equal, or become equal with a scale per output
    column.
    """
    parts = [(build.layout(module, by_linear=True), module.outputs) for module in modules]
    groups = groupby(parts, lambda part: part[0] and part[0].by_rows())
    return [_merge_groups(list(group), by_rows) for by_rows, group in groups]


def _merge_groups(parts: Sequence[RowGroup], by_rows: Layout | None) -> RowGroup:
    """Return neighbours as one group: in their format if it is one, else with scales by row."""
    layouts = {layout for layout, _ in parts}
    layout = parts[0][0] if len(layouts) == 1 else by_rows
    return layout, sum(rows for _, rows in parts)


def group_into_gemms(
    build: BuildContext, modules: Sequence[CheckpointLinear], k: int
) -> list[list[RowGroup]]:
    """Return the row groups of each GEMM of fused linear layers.

    All groups share one GEMM if one of them is plain and the others are small enough to be
    dequantized (MAX_DEQUANTIZED); otherwise each group has its own. The whole weights decide, since
    a GEMM's split-K partitions follow from its storage: every number of ranks has the same ones.
    Weights whose activations are quantized are not dequantized.
    """
    row_groups = row_groups_of(build, modules)
    whole_groups = row_groups_of(build, [module.whole for module in modules])
    quantized = sum(rows * k for layout, rows in whole_groups if layout is not None)
    plain = any(layout is None for layout, _ in whole_groups)
    if plain and quantized <= MAX_DEQUANTIZED and not build.quantizes_activations:
        return [row_groups]
    return [[group] for group in row_groups]


def cut_weight(
    build: BuildContext,
    weight: Weight,
    modules: Sequence[CheckpointLinear],
    order: Tensor | None = None,
) -> None:
    """Record which rows of the whole fused weight this rank stores, quantized or not.

    order: see lockstep.layers.sharding.Shard.
    """
    build.cut(weight.weight, *joined_ranges(modules), order=order)
    begins = list(accumulate((module.outputs for module in modules), initial=0))
    quantized = dict(weight.load_buffers)
    if weight.quantized is not None:
        quantized[0] = weight.quantized
    for first, part in quantized.items():
        end = first + part.shape[0]
        sources = [m for begin, m in zip(begins, modules, strict=False) if first <= begin < end]
        ((layout, _),) = row_groups_of(build, [module.whole for module in sources])
        build.cut_quantized(part, layout, *joined_ranges(sources))


def weight_sinks(
    name: str,
    weight: Tensor | QuantizedWeight,
    weight_format: WeightFormat | None,
    module: CheckpointLinear,
) -> dict[str, Target]:
    """Map the checkpoint tensors of the linear layer `name` to their destinations.

    A plain weight has one tensor, a quantized one those of its format. weight: this rank's rows.
    """
    if isinstance(weight, Tensor):
        return {f"{name}.weight": column_sink(weight, module)}
    assert weight_format is not None, "only a weight format quantizes"
    sinks = weight_format.sinks(module, weight)
    return {f"{name}.{suffix}": replace(s, ranges=module.ranges) for suffix, s in sinks.items()}


class Linear(nn.Module):
    """Linear layer x [T, K] -> [T, N]; N may be the sum of several checkpoint weights' columns.

    With several ranks, N counts the columns of this rank. The adapter of a token is added last
    (lockstep.kernels.lora).

    y = round(round(x W^T) + b), both roundings to x's dtype: the bias is added in fp32 to the op's
    rounded result. It is elementwise, so it is the same for every backend and every T.

    Args:
        inputs: K; Columns if each rank has its columns of x, which are gathered first.
        outputs: name of each weight in the checkpoint, within the module -> its output columns.
            A plain number is whole on every rank, Columns are cut across ranks.
        orders: name -> function that returns the row of the checkpoint's weight for each row of the
            layer; called once.
        partials_from: index of a weight; if the weights from it on have a GEMM of their own, the
            consumer of split_partials() adds that GEMM's split-K partials.

    Attributes:
        sources: the linear layers of the checkpoint whose weights are fused.
    """

    allow_partials = False
    gathers = False
    """True if every rank returns the columns of all ranks."""

    def __init__(
        self,
        build: BuildContext,
        inputs: int | Columns,
        outputs: Mapping[str, int | Columns],
        *,
        bias: bool = False,
        orders: Mapping[str, Callable[[], Tensor]] | None = None,
        partials_from: int | None = None,
    ) -> None:
        super().__init__()
        self.dtype = build.dtype
        self.names = tuple(outputs)
        self.weight_format = build.weight_format
        self.gather_inputs: Gather = all_columns
        self.gather_outputs: Gather = all_columns
        if isinstance(inputs, Columns):
            self.gather_inputs = build.exchange(inputs)
            inputs = inputs.total
        self.inputs = inputs
        cut = [columns for columns in outputs.values() if isinstance(columns, Columns)]
        if self.gathers and cut:
            (columns,) = cut
            self.gather_outputs = build.exchange(columns)
        self.sources = [build.module(name, n, inputs) for name, n in outputs.items()]
        self.outputs = tuple(module.outputs for module in self.sources)
        row_groups = group_into_gemms(build, self.sources, inputs)
        # Split-K partitions follow from the whole weight, so that every number of ranks has them.
        total = sum(module.whole_outputs for module in self.sources)
        # An output that gets an adapter is rounded first. An exchange adds partials itself.
        adapted = any(build.adapters.changes_module(module.names) for module in self.sources)
        consumer_adds = self.allow_partials or (self.gathers and build.rank.size > 1)
        sizes = (sum(rows for _, rows in groups) for groups in row_groups)
        self.gemm_begins = tuple(accumulate(sizes, initial=0))
        fused = self._indices_by_gemm()
        self.partials_from = partials_from
        if len(fused) > 1:
            consumer_adds = partials_from == fused[-1][0]
        last_allows = consumer_adds and not (bias or adapted)
        make_gemm = partial(Gemm, build, inputs, total=total)
        gemms = []
        for groups, indices in zip(row_groups, fused, strict=True):
            weight_columns = sum(self.sources[index].whole_outputs for index in indices)
            allows = last_allows and indices is fused[-1]
            gemm = make_gemm(groups, weight_columns=weight_columns, allow_partials=allows)
            gemms.append(gemm)
        self.gemms = nn.ModuleList(gemms)
        self.orders = {name: order() for name, order in (orders or {}).items()}
        self.bias = build.empty(sum(self.outputs)) if bias else None
        build.cut(self.bias, *joined_ranges(self.sources), order=self._joined_order(self.names))
        self.add_adapters: AddAdapters = no_adapters
        if adapted:
            reordered = {self.names.index(name): order for name, order in self.orders.items()}
            self.add_adapters = LoRA(build, self.sources, inputs, reordered)
        for gemm, indices in zip(gemms, fused, strict=True):
            order = self._joined_order([self.names[i] for i in indices])
            cut_weight(build, gemm, [self.sources[i] for i in indices], order)

    def _indices_by_gemm(self) -> list[list[int]]:
        """Return the indices of the fused weights that each GEMM has."""
        begins = list(accumulate(self.outputs, initial=0))
        return [
            [index for index, begin in enumerate(begins) if first <= begin < last]
            for first, last in pairwise(self.gemm_begins)
        ]

    @property
    def takes_codes(self) -> bool:
        """Return whether the producer of x should quantize it: some weight reads its codes.

        False if another rank's columns of x, or an adapter, need the rows themselves.
        """
        alone = self.gather_inputs is all_columns and self.add_adapters is no_adapters
        return alone and any(cast(Gemm, gemm).takes_codes for gemm in self.gemms)

    @property
    def reads_plain(self) -> bool:
        """Return whether some weight reads the rows of x themselves."""
        return not all(cast(Gemm, gemm).takes_codes for gemm in self.gemms)

    def forward(self, x: Tensor | QuantizedRows, ctx: ForwardContext | None) -> Tensor:
        """Return the outputs with the adapter of each token.

        x: quantized by its producer only if takes_codes. ctx: of the tokens; None in a
        drafter, which drafts without adapters.
        """
        if isinstance(x, QuantizedRows):
            return self.gather_outputs(self._columns_from(x, 0))
        x = self.gather_inputs(x)
        return self.gather_outputs(self.add_adapters(self._columns_from(x, 0), x, ctx))

    def parts(self, x: Tensor, ctx: ForwardContext | None) -> tuple[Tensor, ...]:
        """Return the outputs of each fused weight. ctx: see forward().

        They are views of one tensor, or separate tensors if each weight has its own GEMM.
        """
        separate = len(self.gemms) == len(self.outputs) and self.bias is None
        if separate and self.add_adapters is no_adapters:
            return tuple(gemm(x) for gemm in self.gemms)
        return self(x, ctx).split(self.outputs, dim=1)

    def split_partials(
        self, x: Tensor | QuantizedRows, ctx: ForwardContext | None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of the weights before `partials_from`, and those of the others.

        The latter are [T, N], or split-K partials [P, T, N] fp32 that the consumer adds. ctx: see
        forward().
        """
        assert self.partials_from is not None, "the layer names the weights that may leave partials"
        begin = sum(self.outputs[: self.partials_from])
        *first_gemms, last_gemm = self.gemms
        alone = self.gather_inputs is all_columns and self.add_adapters is no_adapters
        if alone and self.bias is None and first_gemms and begin == self.gemm_begins[-2]:
            return self._join(x, first_gemms, 0, begin), last_gemm(x)
        y = self(x, ctx)
        return y[:, :begin], y[:, begin:]

    def from_part(self, index: int, x: Tensor) -> Tensor:
        """Return the outputs of the fused weights from this index on, reading no other weights.

        For drafters only: a backend that is exact for a weight need not be for some of its rows.
        """
        return self._columns_from(x, sum(self.outputs[:index]))

    def _columns_from(self, x: Tensor | QuantizedRows, begin: int) -> Tensor:
        """Return the output columns from `begin` on."""
        y = self._join(x, list(self.gemms), begin, self.gemm_begins[-1])
        return y if self.bias is None else y + self.bias[begin:]

    def _join(
        self, x: Tensor | QuantizedRows, gemms: list[nn.Module], begin: int, end: int
    ) -> Tensor:
        """Return output columns begin .. end, which these GEMMs have: the layer's first ones."""
        # Unpacking iterates over the modules: an index and a length take 3 us more.
        first_gemm, *other_gemms = gemms
        if not other_gemms:
            y: Tensor = first_gemm(x, begin)
            return y
        y = torch.empty(len(x), end - begin, dtype=self.dtype, device=x.device)
        for gemm, (first, last) in zip(gemms, pairwise(self.gemm_begins), strict=False):
            if last > begin:
                start = max(first, begin)
                gemm(x, start - first, out=y[:, start - begin : last - begin])
        return y

    def part(self, index: int) -> Tensor | QuantizedWeight:
        """Return the rows of one fused weight in their present storage."""
        rows = self._rows(index)
        at = bisect_right(self.gemm_begins, rows.start) - 1
        first = self.gemm_begins[at]
        gemm = cast(Gemm, self.gemms[at])
        return gemm.stored_rows(rows.start - first, rows.stop - first)

    def weights(self) -> dict[str, Target]:
        """Map the checkpoint's tensors, by name within the module, to their destinations."""
        table: dict[str, Target] = {}
        for index, name in enumerate(self.names):
            part = self.part(index)
            module = self.sources[index]
            order = self.orders.get(name)
            table |= weight_sinks(name, part, self.weight_format, module)
            if isinstance(part, Tensor):
                table[f"{name}.weight"] = column_sink(part, module, order)
            if self.bias is not None:
                table[f"{name}.bias"] = column_sink(self.bias[self._rows(index)], module, order)
        return table

    def finish(self) -> None:
        """Reorder quantized rows. Call once after loading, before the GEMMs are finished.

        Raises:
            CheckpointError: the order would cut a block of rows that share a scale.
        """
        for name, order in self.orders.items():
            index = self.names.index(name)
            part = self.part(index)
            if isinstance(part, Tensor):
                continue
            try:
                part.reorder(order)
            except ValueError as error:
                raise CheckpointError(
                    f"{self.sources[index].path}: {error}, which no scale can follow. "
                    "Use a checkpoint with whole blocks, or one that does not quantize this module."
                ) from None

    def _joined_order(self, names: Sequence[str]) -> Tensor | None:
        """Return `orders` of consecutive fused weights as one; None if all are in order."""
        if not any(name in self.orders for name in names):
            return None
        order: list[Tensor] = []
        for name in names:
            count = self.outputs[self.names.index(name)]
            rows = self.orders.get(name)
            order.append((torch.arange(count) if rows is None else rows) + sum(map(len, order)))
        return torch.cat(order)

    def _rows(self, index: int) -> slice:
        """Return the rows of one fused weight within the layer."""
        begin = sum(self.outputs[:index])
        return slice(begin, begin + self.outputs[index])


def joined_ranges(modules: Sequence[CheckpointLinear]) -> tuple[Ranges, int]:
    """Return (this rank's ranges, columns) of fused linear layers; no ranges if none is cut."""
    ranges: list[tuple[int, int]] = []
    offset = 0
    for module in modules:
        stored = module.ranges or ((0, module.whole_outputs),)
        ranges += [(offset + begin, offset + end) for begin, end in stored]
        offset += module.whole_outputs
    return (tuple(ranges) if any(module.ranges for module in modules) else (), offset)


class PartialLinear(Linear):
    """Linear layer x [T, K] -> [T, N] or split-K partials [P, T, N] fp32 that the consumer adds.

    With a bias, adapters or several GEMMs, the output is never partials: the sum must be rounded
    first.
    """

    allow_partials = True


class GatheredLinear(Linear):
    """Linear layer x [T, K] -> [T, N] whose output is whole on every rank."""

    gathers = True


class VocabularyShard:
    """Range of the vocabulary whose rows [*, H] of a weight a rank stores.

    tokens: the range. gather: exchange of a row of each rank, [T, H] -> [T, ranks * H].
    """

    def __init__(self, build: BuildContext, vocab: int, hidden: int) -> None:
        self.tokens = build.rank.tokens(vocab)
        # A vocabulary of few tiles is whole on every rank.
        self.size = build.rank.size if len(self.tokens) < vocab else 1
        self.gather: Gather = all_columns
        if self.size > 1:
            self.gather = build.exchange(Columns.heads(self.size, hidden))
        ranks = (Rank(index, build.rank.size) for index in range(build.rank.size - 1))
        ends = [rank.tokens(vocab).stop for rank in ranks]
        self.ends = torch.tensor(ends, device=build.device)

    def lookup(self, ids: Tensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the rows [T, H] of ids [T]; each comes from the rank that stores it.

        rows: returns the rows of this rank by their index in `tokens`.
        """
        if self.size == 1:
            return rows(ids)
        local = rows((ids - self.tokens.start).clamp(0, len(self.tokens) - 1))
        owners = torch.bucketize(ids, self.ends, right=True)
        at = torch.arange(len(ids), device=ids.device) * self.size + owners
        return self.gather(local).view(len(ids) * self.size, -1)[at]


class Embedding(nn.Module):
    """Embedding: ids [T] -> [T, H]. The row table clamps draft ids of -1, so all ids are in range.

    A rank stores a range of the vocabulary; the rows of other ranks come by the exchange. name: of
    the module in the checkpoint.
    """

    def __init__(
        self, build: BuildContext, vocab: int, hidden: int, name: str = "embed_tokens"
    ) -> None:
        super().__init__()
        self.name = name
        self.columns = Columns.vocabulary(vocab)
        self.rank = build.rank
        self.shard = VocabularyShard(build, vocab, hidden)
        self.gather = self.shard.gather  # a submodule, so that a walk over the model finds it
        self.weight = build.matrix(len(self.shard.tokens), hidden)
        build.cut(self.weight, self.columns.ranges(build.rank), vocab)

    def forward(self, ids: Tensor) -> Tensor:
        return self.shard.lookup(ids, lambda local: self.weight[local])

    def weights(self) -> dict[str, Target]:
        """Map the checkpoint's tensor to its destination."""
        return {f"{self.name}.weight": row_sink(self.weight, self.columns, self.rank)}


class Head(Gemm):
    """Language model head: x [T, H] -> logits [T, V] of x's dtype.

    The columns are cut across ranks, and `logit_shard` says which logits this rank returns.

    Args:
        existing: another head, or rows of one, whose weight this one has.
        embedding: the embedding whose weight this one has (tied). On a CPU that dequantizes where
            it multiplies, the head loads the quantized tensor, and fills the embedding with its
            values.
    """

    keeps_plain = True

    def __init__(
        self,
        build: BuildContext,
        vocab: int,
        hidden: int,
        existing: "nn.Parameter | Head | None" = None,
        embedding: Embedding | None = None,
    ) -> None:
        columns = Columns.vocabulary(vocab)
        self.weight_format = build.weight_format
        self.name = "lm_head" if embedding is None else embedding.name
        self.module = build.module(self.name, columns, hidden)
        layout = None
        if existing is None and (embedding is None or build.head_loads_embedding):
            layout = build.layout(self.module, by_linear=True)
        if embedding is not None and layout is None:
            existing = embedding.weight
        groups = [(layout, self.module.outputs)]
        super().__init__(build, hidden, groups, existing=existing, total=vocab)
        self.loads = existing is None
        if self.loads:
            cut_weight(build, self, [self.module])
        # In a tuple, so that nn.Module does not register the embedding as a submodule.
        self.fills = (embedding,) if embedding is not None and self.loads else ()
        self.shard = VocabularyShard(build, vocab, hidden)
        self.logit_shard = shard = build.logit_shard(columns)
        if shard.ranks > 1:
            # The sampler calls them. As submodules they are found by a walk over the model.
            received = (shard.ranks - 1) * shard.record_bytes(build.dtype.itemsize)
            self.exchange_records = Exchange(shard.exchange, build.layer, received)
            self.exchange_undecided_rows = Exchange(shard.exchange, build.layer, 0)

    def copy_rows(self, ids: Tensor, out: Tensor, begin: int = 0) -> None:
        """Copy the weight's rows of the tokens ids[begin : begin + len(out)] into out [n, H].

        ids: equal on all ranks, which exchange the rows of all of them.
        """
        for first in range(0, len(ids), ROWS_AT_ONCE):
            chunk = ids[first : first + ROWS_AT_ONCE].to(out.device)
            rows = self.shard.lookup(chunk, partial(self._rows, out))
            start = max(first, begin)
            stop = max(min(first + len(chunk), begin + len(out)), start)
            out[start - begin : stop - begin].copy_(rows[start - first : stop - first])

    def _rows(self, like: Tensor, ids: Tensor) -> Tensor:
        rows = like.new_empty(len(ids), like.shape[1])
        self.gather(ids, rows)
        return rows

    def weights(self) -> dict[str, Target]:
        """Map the checkpoint's tensors to their destinations; none if the head shares a weight."""
        if not self.loads:
            return {}
        rows = self.stored_rows(0, self.shape[0])
        return weight_sinks(self.name, rows, self.weight_format, self.module)

    def finish(self) -> None:
        """Fill the embedding where the head has loaded its tensor, and finish the weight."""
        for embedding in self.fills:
            quantized = self.stored
            assert isinstance(quantized, QuantizedWeight), "an embedding loads a plain tensor"
            embedding.weight.data.copy_(quantized.dequantize(self.dtype))
        super().finish()


def probe(
    build: BuildContext, model: nn.Module, rows: Sequence[int], prompt_tokens: int = 0
) -> None:
    """Let cuBLAS serve linear layers at these numbers of rows where it is exact and faster.

    Call after loading and before any capture. The result is written into the build's choices.

    Args:
        rows: of decode steps.
        prompt_tokens: of a full prompt step, which heads do not compute; 0: none.
    """
    gemms = [layer for layer in model.modules() if isinstance(layer, Gemm)]
    for (n, k, _), probed in build.probed.items():
        same = [gemm for gemm in gemms if gemm.linear is probed][:PROBED_LAYERS]
        if not same:
            continue
        weights = [gemm.weight for gemm in same if gemm.weight is not None]
        probed.probe(rows, weights, same[0].split_k, same[0].allow_partials)
        if not isinstance(same[0], Head):
            # A separate call: if memory is too small for it, the other counts stay probed.
            probed.probe((prompt_tokens,), weights, same[0].split_k, same[0].allow_partials)
        served = ", ".join(str(count) for count, why in probed.verdicts.items() if why is None)
        refused = [f"at {count} rows {why}" for count, why in probed.verdicts.items() if why]
        for choice in build.choices:
            if (choice.op, choice.size, choice.backend) != (linear.name, f"{n}x{k}", "triton"):
                continue
            if served:
                choice.backend += f", cublas at {served} rows"
                choice.refused.pop("cublas", None)
            if refused:
                choice.refused["cublas"] = "; ".join(refused)
    if build.probed:
        # Probing allocated outputs and workspaces that the memory plan does not count.
        torch.cuda.empty_cache()
