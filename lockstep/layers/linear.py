"""Linear layers: a weight, or several fused along their outputs, packed or not."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import cast

import torch
from torch import Tensor, nn

from lockstep.errors import CheckpointError
from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.linear import choose_split_k, linear
from lockstep.kernels.linear.prepacked import PrepackedWeight
from lockstep.layers.build_context import BuildContext
from lockstep.quantization import CheckpointLinear, Layout, WeightFormat, WeightSink

WALKED = 4
"""Layers of one shape whose weights a probe walks through: more than a GPU's cache holds."""
JOINED = 1 << 22
"""Numbers that are unpacked when they are loaded, at most, so that what is packed is one product
with the plain weights beside it: as many take 1.0 (8 bits) to 1.5 us (4 bits) longer to read from
an H200's memory, and a launch of its own takes 2.8."""
Target = Tensor | WeightSink
"""What a tensor of the checkpoint fills: a tensor as it is, or whatever takes it over."""


Run = tuple[Layout | None, int]
"""How some rows of a weight lie in a checkpoint (None: plain), and how many."""


class Weight(nn.Module):
    """A weight [N, K] of one storage, packed or not.

    runs: how its rows lie in the checkpoint, in order. One packed run stays packed on a GPU. What
    else is packed is unpacked once, when it is loaded: by the law of packed weights the bits are
    the same, and a step is faster. stands: a weight that is there already, instead of runs.
    packed, weight: one of them is None. unpacked: until then, by its first row, what is packed.
    """

    def __init__(
        self,
        build: BuildContext,
        k: int,
        runs: Sequence[Run],
        stands: nn.Parameter | QuantizedWeight | None = None,
    ) -> None:
        super().__init__()
        n = sum(rows for _, rows in runs)
        self.shape = (n, k)
        self.dtype = build.dtype
        self.weight = stands if isinstance(stands, nn.Parameter) else None
        self.packed = stands if isinstance(stands, QuantizedWeight) else None
        self.prepacked: PrepackedWeight | None = None
        self.unpacked: dict[int, QuantizedWeight] = {}
        if stands is not None:
            return
        begins = accumulate((rows for _, rows in runs), initial=0)
        for begin, (layout, rows) in zip(begins, runs, strict=False):
            if layout is not None:
                self.unpacked[begin] = build.packed(rows, k, layout)
        if len(runs) == 1 and build.device != "cpu":
            self.packed = self.unpacked.pop(0, None)
        if self.packed is None:
            self.weight = self._matrix(build)

    def _matrix(self, build: BuildContext) -> nn.Parameter:
        """Room for the weight, plain."""
        return build.matrix(*self.shape)

    @property
    def loaded(self) -> nn.Parameter | QuantizedWeight | PrepackedWeight:
        """Return the weight [N, K] in the storage that it has once it is loaded."""
        storages = (self.weight, self.packed, self.prepacked)
        return next(storage for storage in storages if storage is not None)

    @property
    def stored(self) -> Tensor | QuantizedWeight | PrepackedWeight:
        """The weight [N, K] as it lies; one packed run, until it is unpacked, as it is packed."""
        part = self.unpacked.get(0)
        if part is not None and part.shape[0] == self.shape[0]:
            return part
        return self.loaded

    @property
    def packed_parts(self) -> list[QuantizedWeight]:
        """All that is packed, also what is unpacked when it is loaded."""
        return [*self.unpacked.values(), *([] if self.packed is None else [self.packed])]

    def stored_rows(self, begin: int, end: int) -> Tensor | QuantizedWeight:
        """Rows of the weight as the checkpoint fills them, and once it has, as they lie."""
        for first, part in self.unpacked.items():
            if first <= begin and end <= first + part.shape[0]:
                return part.rows(begin - first, end - first)
        return self._lying(begin, end)

    def _lying(self, begin: int, end: int) -> Tensor | QuantizedWeight:
        """Rows of the weight as they lie once it is loaded."""
        found = self.loaded
        return found[begin:end] if isinstance(found, Tensor) else found.rows(begin, end)

    def gather(self, ids: Tensor, out: Tensor) -> None:
        """The rows of these ids into out [len(ids), K] of the model's dtype."""
        found = self.stored
        if isinstance(found, PrepackedWeight):
            found = found.plain()
        if isinstance(found, Tensor):
            torch.index_select(found, 0, ids.to(found.device), out=out)
        else:
            out.copy_(found.gather(ids).dequantize(self.dtype))

    def finish(self) -> None:
        """To be called once, when the weight is filled."""
        for begin, part in self.unpacked.items():
            assert self.weight is not None, "what is unpacked has a place"
            each = self.shape[0] // len(self.weight)
            end = begin + part.shape[0]
            place = self.weight.data[begin // each : end // each]
            place.copy_(part.dequantize(self.dtype).view(place.shape))
        self.unpacked = {}
        if self.packed is not None:
            self.packed.finalize()


class Product(Weight):
    """x [T, K] -> x W^T [T, N] over a weight of one storage.

    keeps_plain: whether the plain weight stays beside a CPU's prepacked copy, since an embedding or
    a drafter's head shares it.

    total: the outputs of its layer, this product's among them, which decide the number of split-K
    partitions (lockstep.kernels.linear.choose_split_k); None: its own. allow_partials: see
    lockstep.kernels.linear.linear.
    The others: see Weight.
    """

    keeps_plain = False

    def __init__(
        self,
        build: BuildContext,
        k: int,
        runs: Sequence[Run],
        *,
        stands: nn.Parameter | QuantizedWeight | None = None,
        total: int | None = None,
        allow_partials: bool = False,
    ) -> None:
        super().__init__(build, k, runs, stands)
        n = self.shape[0]
        packed = self.packed is not None
        self.split_k = choose_split_k(total or n, k, build.device, packed, build.dtype)
        self.allow_partials = allow_partials
        self.prepacks = build.device == "cpu" and build.exact
        kind = type(self.packed).__name__ if packed else ""
        self.linear = build.linear_op(linear, n=n, k=k, packed=kind)
        build.choices[-1].packing = _named(runs, unpacked=not packed)

    def finish(self) -> None:
        """Finish the weight and, on a CPU, prepack it; the plain copy goes unless another module
        reads it."""
        super().finish()
        if self.prepacks and self.weight is not None:
            self.prepacked = PrepackedWeight(self.weight.data)
            if not self.keeps_plain:
                self.weight = None

    def forward(self, x: Tensor, begin: int = 0, out: Tensor | None = None) -> Tensor:
        """The outputs from `begin` on, which alone are read; into `out` where that is given."""
        weight: Tensor | QuantizedWeight | PrepackedWeight
        if begin:
            weight = self.stored_rows(begin, self.shape[0])
        else:
            weight = self.prepacked or self.stored
        if out is None:
            return self.linear(x, weight, self.split_k, self.allow_partials)
        return self.linear(x, weight, self.split_k, out=out)


def _named(runs: Sequence[Run], unpacked: bool) -> str:
    """How runs are packed, for people; "" if none is."""
    found = [f"{layout}, {rows} rows" for layout, rows in runs if layout is not None]
    if len(runs) == 1:
        found = [str(layout) for layout, _ in runs if layout is not None]
    return "; ".join(found) + ", unpacked when loaded" * (unpacked and bool(found))


def runs_of(build: BuildContext, modules: Sequence[CheckpointLinear]) -> list[Run]:
    """How linear maps lie in the checkpoint, neighbours together that lie alike, or do so once each
    of their outputs has scales of its own."""
    parts = [(build.layout(module), module.outputs) for module in modules]
    found = groupby(parts, lambda part: part[0] and part[0].by_rows())
    return [_run(list(run), by_rows) for by_rows, run in found]


def _run(parts: Sequence[Run], by_rows: Layout | None) -> Run:
    """These parts as one: in their layout if it is one, else in that with scales by output."""
    layouts = {layout for layout, _ in parts}
    layout = parts[0][0] if len(layouts) == 1 else by_rows
    return layout, sum(rows for _, rows in parts)


def products_of(runs: Sequence[Run], k: int) -> list[list[Run]]:
    """The runs of each product: one of all, or, where large packed ones stand beside others, or
    none of them is plain, one of each."""
    packed = sum(rows * k for layout, rows in runs if layout is not None)
    plain = any(layout is None for layout, _ in runs)
    return [list(runs)] if plain and packed <= JOINED else [[run] for run in runs]


def filled(
    name: str,
    weight: Tensor | QuantizedWeight,
    packing: WeightFormat | None,
    read: CheckpointLinear,
) -> dict[str, Target]:
    """Names of a linear map's tensors in the checkpoint, called `name` there, -> what they fill:
    one weight where it is not packed, else what its format has."""
    if isinstance(weight, Tensor):
        return {f"{name}.weight": weight}
    assert packing is not None, "a format packed it"
    return {f"{name}.{suffix}": slot for suffix, slot in packing.slots(read, weight).items()}


class Linear(nn.Module):
    """x [T, K] -> [T, N]; N may be the sum of several checkpoint weights' rows.

    outputs: name of each weight in the checkpoint, within the module that is built -> its rows.
    Some of them may be packed and others not: products_of says which are one Product.
    orders: name -> makes, for each row of the layer, the row of the checkpoint's weight that it is,
    where they are not the same; called once the weights are known to fit.
    bias: y = round(round(x W^T) + b), both roundings to x's dtype: the op's result, then a sum in
    fp32 of two rounded numbers. It is elementwise, so it is the same for every backend of the
    product and every T. In fp32 the inner rounding is none.
    """

    allow_partials = False

    def __init__(
        self,
        build: BuildContext,
        inputs: int,
        outputs: Mapping[str, int],
        *,
        bias: bool = False,
        orders: Mapping[str, Callable[[], Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.dtype = build.dtype
        self.names = tuple(outputs)
        self.outputs = tuple(outputs.values())
        self.packing = build.packing
        self.reads = [build.module(name, n, inputs) for name, n in outputs.items()]
        found = products_of(runs_of(build, self.reads), inputs)
        total = sum(self.outputs)
        allow_partials = self.allow_partials and not bias and len(found) == 1
        products = [
            Product(build, inputs, runs, total=total, allow_partials=allow_partials)
            for runs in found
        ]
        self.products = nn.ModuleList(products)
        self.orders = {name: order() for name, order in (orders or {}).items()}
        self.firsts = tuple(accumulate((product.shape[0] for product in products), initial=0))
        self.bias = build.empty(total) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self._from(x, 0)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of each of the fused weights: views of one tensor, or where each is a product
        of its own, tensors of their own, which need not be copied side by side."""
        if len(self.products) == len(self.outputs) and self.bias is None:
            return tuple(product(x) for product in self.products)
        return self(x).split(self.outputs, dim=1)

    def from_part(self, index: int, x: Tensor) -> Tensor:
        """The outputs of the index-th of the fused weights and those behind it, which alone are
        read. For drafters: what serves a weight exactly need not serve a part of it so."""
        return self._from(x, sum(self.outputs[:index]))

    def _from(self, x: Tensor, begin: int) -> Tensor:
        """The outputs from `begin` on."""
        if len(self.products) == 1:
            y = self.products[0](x, begin)
        else:
            y = torch.empty(len(x), sum(self.outputs) - begin, dtype=self.dtype, device=x.device)
            for product, (first, last) in zip(self.products, pairwise(self.firsts), strict=True):
                if last > begin:
                    start = max(first, begin)
                    product(x, start - first, out=y[:, start - begin : last - begin])
        return y if self.bias is None else y + self.bias[begin:]

    def part(self, index: int) -> Tensor | QuantizedWeight:
        """The rows of the index-th of the fused weights, as they lie."""
        rows = self._rows(index)
        at = bisect_right(self.firsts, rows.start) - 1
        first = self.firsts[at]
        product = cast(Product, self.products[at])
        return product.stored_rows(rows.start - first, rows.stop - first)

    def weights(self) -> dict[str, Target]:
        """Name within the module that is built -> what this tensor of the checkpoint fills: of each
        fused weight its own tensors and, where there is one, its bias."""
        table: dict[str, Target] = {}
        for index, name in enumerate(self.names):
            part = self.part(index)
            table |= filled(name, part, self.packing, self.reads[index])
            if isinstance(part, Tensor):
                table[f"{name}.weight"] = self._ordered(name, part)
            if self.bias is not None:
                table[f"{name}.bias"] = self._ordered(name, self.bias[self._rows(index)])
        return table

    def finish(self) -> None:
        """To be called once, when the weights are filled and before the products are finished:
        brings packed rows into their order. Raises CheckpointError where a format's blocks of rows
        would be cut."""
        for name, order in self.orders.items():
            index = self.names.index(name)
            part = self.part(index)
            if isinstance(part, Tensor):
                continue
            try:
                part.reorder(order)
            except ValueError as error:
                raise CheckpointError(
                    f"{self.reads[index].path}: {error}, which no scale can follow. "
                    "Take a checkpoint with whole blocks, or one that does not pack this module."
                ) from None

    def _ordered(self, name: str, target: Tensor) -> Target:
        order = self.orders.get(name)
        return target if order is None else WeightSink.plain(target, lambda tensor: tensor[order])

    def _rows(self, index: int) -> slice:
        begin = sum(self.outputs[:index])
        return slice(begin, begin + self.outputs[index])


class PartialLinear(Linear):
    """x [T, K] -> [T, N], or partials [P, T, N] fp32 of it, which the reader adds.

    With a bias, or packed in part, it is never partials: what is added to is rounded.
    """

    allow_partials = True


class ResidualLinear(PartialLinear):
    """x [T, K] -> what AddRMSNorm adds to the residual: [T, N], or partials [P, T, N] of it."""


class Embedding(nn.Module):
    """ids [T] -> [T, H]. Out-of-range ids cannot occur: drafts of -1 are clamped by the table."""

    def __init__(self, build: BuildContext, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = build.matrix(vocab, hidden)

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class Head(Product):
    """x [T, H] -> logits [T, V] of x's dtype, over its own weight, or one that stands already: the
    embedding's (tied), or another head's."""

    keeps_plain = True

    def __init__(
        self,
        build: BuildContext,
        vocab: int,
        hidden: int,
        stands: nn.Parameter | QuantizedWeight | None = None,
    ) -> None:
        self.packing = build.packing
        self.read = build.module("lm_head", vocab, hidden)
        layout = None if stands is not None else build.layout(self.read)
        super().__init__(build, hidden, [(layout, vocab)], stands=stands)

    def weights(self) -> dict[str, Target]:
        """Checkpoint name -> what fills a weight of its own."""
        return filled("lm_head", self.stored_rows(0, self.shape[0]), self.packing, self.read)


def probe(build: BuildContext, model: nn.Module, rows: Sequence[int]) -> None:
    """Lets cuBLAS serve linears at these numbers of rows where it is exact and faster.

    The weights are loaded and nothing is captured yet. The build's choices say what was found.
    """
    products = [layer for layer in model.modules() if isinstance(layer, Product)]
    for (n, k, _), probed in build.probed.items():
        same = [product for product in products if product.linear is probed][:WALKED]
        if not same:
            continue
        weights = [product.weight for product in same if product.weight is not None]
        probed.probe(rows, weights, same[0].split_k, same[0].allow_partials)
        served = ", ".join(str(count) for count, why in probed.verdicts.items() if why is None)
        refused = [f"at {count} rows {why}" for count, why in probed.verdicts.items() if why]
        for choice in build.choices:
            if choice.size != f"{n}x{k}" or choice.backend != "triton":
                continue
            if served:
                choice.backend += f", cublas at {served} rows"
                choice.refused.pop("cublas", None)
            if refused:
                choice.refused["cublas"] = "; ".join(refused)
    if build.probed:
        torch.cuda.empty_cache()
