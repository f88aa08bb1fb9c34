"""MLPs: gated, down(silu(gate x) * up x), and without a gate, down(max(up x, 0)^2)."""

from torch import Tensor, nn

from lockstep.kernels.activations import relu2, silu_mul
from lockstep.kernels.fp8_linear import QuantizedRows, quantize_silu_mul
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Linear, PartialLinear, Target
from lockstep.layers.sharding import Columns
from lockstep.step import ForwardContext


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer, 2020): x [T, H] -> delta [T, H], or its split-K partials.

    Gate and up are one weight. With several ranks the delta has this rank's columns.
    """

    def __init__(self, build: BuildContext, hidden: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        columns = Columns.of(inner)
        self.gate_up = Linear(
            build, hidden, dict.fromkeys(("gate_proj", "up_proj"), columns), bias=bias
        )
        self.down = PartialLinear(build, inner, {"down_proj": Columns.of(hidden)}, bias=bias)
        self.quantizes = build.rank.size == 1 and self.down.takes_codes
        if self.quantizes:
            self.quantize = build.op(quantize_silu_mul)
        else:
            self.act = build.activation(silu_mul, columns)

    @property
    def first_linear(self) -> Linear:
        """Linear layer that alone reads the input."""
        return self.gate_up

    def forward(self, x: Tensor | QuantizedRows, ctx: ForwardContext) -> Tensor:
        gate_up = self.gate_up(x, ctx)
        if self.quantizes:
            words, scales = self.quantize(gate_up)
            rows = QuantizedRows(words, scales, self.down.inputs, self.down.dtype)
            return self.down(rows, ctx)
        return self.down(self.act(gate_up), ctx)

    def weights(self) -> dict[str, Target]:
        """Map the checkpoint's tensors, by name within the module, to their destinations."""
        return self.gate_up.weights() | self.down.weights()


class ReluMLP(nn.Module):
    """Squared-ReLU MLP (So et al., Primer, 2021): x [T, H] -> delta [T, H], or its split-K
    partials.
    """

    def __init__(self, build: BuildContext, hidden: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        columns = Columns.of(inner)
        self.up = Linear(build, hidden, {"up_proj": columns}, bias=bias)
        self.act = build.activation(relu2, columns)
        self.down = PartialLinear(build, inner, {"down_proj": Columns.of(hidden)}, bias=bias)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        return self.down(self.act(self.up(x, ctx)), ctx)

    def weights(self) -> dict[str, Target]:
        """Map the checkpoint's tensors, by name within the module, to their destinations."""
        return self.up.weights() | self.down.weights()
