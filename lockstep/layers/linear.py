"""Linear layers: a weight, or several fused along their outputs."""

from torch import Tensor, nn

from lockstep.kernels.linear import linear, segments
from lockstep.layers.build import Build


class Linear(nn.Module):
    """x [T, K] -> [T, N]; N may be the sum of several checkpoint weights' rows."""

    def __init__(self, build: Build, inputs: int, *outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = build.matrix(sum(outputs), inputs)
        self.linear = build.linear_op(linear, n=sum(outputs), k=inputs)
        self.segments = segments(sum(outputs), inputs, build.device)

    def part(self, index: int) -> Tensor:
        """The rows of the index-th of the fused weights."""
        begin = sum(self.outputs[:index])
        return self.weight[begin : begin + self.outputs[index]]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight, self.segments)


class Embedding(nn.Module):
    """ids [T] -> [T, H]. Out-of-range ids cannot occur: drafts of -1 are clamped by the table."""

    def __init__(self, build: Build, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = build.matrix(vocab, hidden)

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class Head(nn.Module):
    """x [T, H] -> logits [T, V] of x's dtype, over its own weight or the embedding's (tied)."""

    def __init__(self, build: Build, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        n, k = weight.shape
        self.linear = build.linear_op(linear, n=n, k=k)
        self.segments = segments(n, k, build.device)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight, self.segments)
