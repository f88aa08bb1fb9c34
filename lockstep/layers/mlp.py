"""The gated MLP: down(silu(gate x) * up x)."""

from torch import Tensor, nn

from lockstep.kernels.activations import silu_mul
from lockstep.layers.build import Build
from lockstep.layers.linear import Linear, ResidualLinear, Target


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer, 2020). x [T, H] -> a delta of [T, H]; gate and up are one weight.

    partial: the delta may be partials, as ResidualLinear's are.
    """

    def __init__(
        self, build: Build, hidden: int, inner: int, *, bias: bool = False, partial: bool = True
    ) -> None:
        super().__init__()
        last = ResidualLinear if partial else Linear
        self.gate_up = Linear(build, hidden, {"gate_proj": inner, "up_proj": inner}, bias=bias)
        self.down = last(build, inner, {"down_proj": hidden}, bias=bias)
        self.act = build.op(silu_mul)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate_up(x)))

    def weights(self) -> dict[str, Target]:
        """Checkpoint name within the MLP -> what it fills."""
        return self.gate_up.weights() | self.down.weights()
