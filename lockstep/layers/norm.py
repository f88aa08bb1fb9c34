"""RMS norms: plain, fused with a residual add, and the gated norms of recurrent mixers."""

from torch import Tensor, nn

from lockstep.kernels.fp8_linear import QuantizedRows, quantize_add_rms_norm
from lockstep.kernels.norm import gated_group_norm, gated_rms_norm, rms_norm
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Linear


class Norm(nn.Module):
    """Weight [D] of an RMS norm: x / rms(x) * (offset + weight).

    offset: 1 if the checkpoint stores the weight around 0, else 0. Mixers whose op applies the norm
    use this class itself.
    """

    def __init__(self, build: BuildContext, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = build.empty(width)
        self.eps = eps
        self.offset = offset


class RMSNorm(Norm):
    """RMS norm over the last dimension of x [..., D]."""

    def __init__(self, build: BuildContext, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__(build, width, eps, offset)
        self.norm = build.op(rms_norm, width=width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight, self.eps, self.offset)


class AddRMSNorm(Norm):
    """Residual add and norm: x [T, D], delta -> (x + delta, its norm), each [T, D].

    delta: this rank's columns of what is added, as a sublayer's body returns them, or their split-K
    partials; None adds nothing.

    Args:
        reader: the linear layer that alone reads the norm, if any. If it multiplies quantized rows,
            the norm writes them (lockstep.kernels.fp8_linear.quantize_add_rms_norm).
    """

    def __init__(
        self,
        build: BuildContext,
        width: int,
        eps: float,
        offset: float = 0.0,
        reader: Linear | None = None,
    ) -> None:
        super().__init__(build, width, eps, offset)
        self.norm = build.op(rms_norm, width=width)
        self.quantizes = reader is not None and reader.takes_codes and build.rank.size == 1
        self.keeps_norm = reader is not None and reader.reads_plain
        if self.quantizes:
            self.quantize = build.op(quantize_add_rms_norm, width=width)
        else:
            self.add_norm = build.add_rms_norm(width)

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | QuantizedRows]:
        if delta is None:  # before the first layer
            return x, self.norm(x, self.weight, self.eps, self.offset)
        options = (self.weight, self.eps, self.offset)
        if not self.quantizes:
            return self.add_norm(x, delta, *options)
        total, norm, words, scales = self.quantize(x, delta, *options, self.keeps_norm)
        return total, QuantizedRows(words, scales, x.shape[1], x.dtype, norm)


class GatedRMSNorm(nn.Module):
    """Gated norm: x [..., D] fp32, gate [..., D] -> x / rms(x) * weight * silu(gate)."""

    offset = 0.0  # the loader reads it, to center dummy weights

    def __init__(self, build: BuildContext, width: int, eps: float) -> None:
        super().__init__()
        self.weight = build.empty(width)
        self.eps = eps
        self.norm = build.op(gated_rms_norm, width=width)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.norm(x, gate, self.weight, self.eps)


class GatedGroupNorm(nn.Module):
    """Gated norm of groups: x [..., G * D] fp32, gate [..., G * D] -> y / rms(y) * weight.

    y = x * silu(gate); each of the G groups of D has its rms.
    """

    offset = 0.0  # see GatedRMSNorm

    def __init__(self, build: BuildContext, groups: int, width: int, eps: float) -> None:
        super().__init__()
        self.sizes = (groups, width)
        self.weight = build.empty(groups * width)
        self.eps = eps
        self.norm = build.op(gated_group_norm, width=width)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x, gate = (y.unflatten(-1, self.sizes) for y in (x, gate))
        return self.norm(x, gate, self.weight.view(self.sizes), self.eps).flatten(-2)
