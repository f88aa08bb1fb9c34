"""The gated MLP: down(silu(gate x) * up x)."""

from torch import Tensor, nn

from lockstep.kernels.activations import silu_mul
from lockstep.layers.build import Build
from lockstep.layers.linear import Linear, ResidualLinear


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer, 2020). x [T, H] -> a delta of [T, H]; gate and up are one weight."""

    def __init__(self, build: Build, hidden: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Linear(build, hidden, inner, inner, bias=bias)
        self.down = ResidualLinear(build, inner, hidden, bias=bias)
        self.act = build.op(silu_mul)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate_up(x)))

    def weights(self) -> dict[str, Tensor]:
        """Checkpoint name within the MLP -> the tensor that it fills."""
        return self.gate_up.weights("gate_proj", "up_proj") | self.down.weights("down_proj")
