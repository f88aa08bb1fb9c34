"""RMS norms: alone, after a residual add, applied by another op; gated norms of mixers."""

from torch import Tensor, nn

from lockstep.kernels.norm import add_rms_norm, gated_group_norm, gated_rms_norm, rms_norm
from lockstep.layers.build_context import BuildContext


class Norm(nn.Module):
    """The numbers of an RMS norm: x / rms(x) * (offset + weight). offset 1: stored around zero.

    By itself it is for mixers whose op norms on the way.
    """

    def __init__(self, build: BuildContext, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = build.empty(width)
        self.eps = eps
        self.offset = offset


class RMSNorm(Norm):
    """x [..., D] -> its norm."""

    def __init__(self, build: BuildContext, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__(build, width, eps, offset)
        self.norm = build.op(rms_norm, width=width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight, self.eps, self.offset)


class AddRMSNorm(Norm):
    """x [T, D] and a delta -> x + delta and its norm, each [T, D].

    The delta is what a ResidualLinear returned; None adds nothing.
    """

    def __init__(self, build: BuildContext, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__(build, width, eps, offset)
        self.norm = build.op(rms_norm, width=width)
        self.add_norm = build.op(add_rms_norm, width=width)

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        if delta is None:
            return x, self.norm(x, self.weight, self.eps, self.offset)
        return self.add_norm(x, delta, self.weight, self.eps, self.offset)


class GatedRMSNorm(nn.Module):
    """x [..., D] fp32, gate [..., D] -> x / rms(x) * weight * silu(gate)."""

    offset = 0.0

    def __init__(self, build: BuildContext, width: int, eps: float) -> None:
        super().__init__()
        self.weight = build.empty(width)
        self.eps = eps
        self.norm = build.op(gated_rms_norm, width=width)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.norm(x, gate, self.weight, self.eps)


class GatedGroupNorm(nn.Module):
    """x [..., G * D] fp32, gate [..., G * D]: y = x * silu(gate) -> y / rms(y) * weight, each of
    the G groups of D by itself."""

    offset = 0.0

    def __init__(self, build: BuildContext, groups: int, width: int, eps: float) -> None:
        super().__init__()
        self.sizes = (groups, width)
        self.weight = build.empty(groups * width)
        self.eps = eps
        self.norm = build.op(gated_group_norm, width=width)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x, gate = (y.unflatten(-1, self.sizes) for y in (x, gate))
        return self.norm(x, gate, self.weight.view(self.sizes), self.eps).flatten(-2)
