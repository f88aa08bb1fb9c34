"""Linear layers: a weight, or several fused along their outputs."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.kernels.linear import linear, segments
from lockstep.layers.build import Build

WALKED = 4
"""Layers of one shape whose weights a probe walks through: more than a GPU's cache holds."""


class Linear(nn.Module):
    """x [T, K] -> [T, N]; N may be the sum of several checkpoint weights' rows.

    bias: y = round(round(x W^T) + b), both roundings to x's dtype: the op's result, then a sum in
    fp32 of two rounded numbers. It is elementwise, so it is the same for every backend of the
    product and every T. In fp32 the inner rounding is none.
    """

    partial = False

    def __init__(self, build: Build, inputs: int, *outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = build.matrix(sum(outputs), inputs)
        self.bias = build.empty(sum(outputs)) if bias else None
        self.linear = build.linear_op(linear, n=sum(outputs), k=inputs)
        self.segments = segments(sum(outputs), inputs, build.device)
        self.partial = self.partial and not bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x, self.weight, self.segments, self.partial)
        return y if self.bias is None else y + self.bias

    def from_part(self, index: int, x: Tensor) -> Tensor:
        """The outputs of the index-th of the fused weights and those behind it, which alone are
        read. For drafters: what serves a weight exactly need not serve a part of it so."""
        begin = sum(self.outputs[:index])
        y = self.linear(x, self.weight[begin:], self.segments, self.partial)
        return y if self.bias is None else y + self.bias[begin:]

    def part(self, index: int) -> Tensor:
        """The rows of the index-th of the fused weights."""
        return self.weight[self._rows(index)]

    def weights(self, *names: str) -> dict[str, Tensor]:
        """The fused weights, in order, by the checkpoint's names for them -> the tensors that
        `name.weight` and, where there is a bias, `name.bias` fill."""
        table = {f"{name}.weight": self.part(i) for i, name in enumerate(names)}
        if self.bias is not None:
            table |= {f"{name}.bias": self.bias[self._rows(i)] for i, name in enumerate(names)}
        return table

    def _rows(self, index: int) -> slice:
        begin = sum(self.outputs[:index])
        return slice(begin, begin + self.outputs[index])


class ResidualLinear(Linear):
    """x [T, K] -> what AddRMSNorm adds to the residual: [T, N], or partials [P, T, N] of it.

    With a bias it is never partials: the bias is added to the rounded sum.
    """

    partial = True


class Embedding(nn.Module):
    """ids [T] -> [T, H]. Out-of-range ids cannot occur: drafts of -1 are clamped by the table."""

    def __init__(self, build: Build, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = build.matrix(vocab, hidden)

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class Head(nn.Module):
    """x [T, H] -> logits [T, V] of x's dtype, over its own weight or the embedding's (tied)."""

    partial = False

    def __init__(self, build: Build, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        n, k = weight.shape
        self.linear = build.linear_op(linear, n=n, k=k)
        self.segments = segments(n, k, build.device)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight, self.segments)


def probe(build: Build, model: nn.Module, rows: Sequence[int]) -> None:
    """Lets cuBLAS serve linears at these numbers of rows where it is exact and faster.

    The weights are loaded and nothing is captured yet. The build's choices say what was found.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, Linear | Head)]
    for (n, k), probed in build.probed.items():
        same = [layer for layer in layers if layer.linear is probed][:WALKED]
        if not same:
            continue
        weights = [layer.weight for layer in same]
        probed.probe(rows, weights, same[0].segments, same[0].partial)
        served = ", ".join(str(count) for count, why in probed.found.items() if why is None)
        refused = [f"at {count} rows {why}" for count, why in probed.found.items() if why]
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
