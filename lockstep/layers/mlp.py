"""The gated MLP: down(silu(gate x) * up x)."""

from torch import Tensor, nn

from lockstep.kernels.activations import silu
from lockstep.layers.build import Build
from lockstep.layers.linear import Linear


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer, 2020). x [T, H] -> [T, H]; gate and up are one fused weight."""

    def __init__(self, build: Build, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up = Linear(build, hidden, inner, inner)
        self.down = Linear(build, inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(silu(gate) * up)
