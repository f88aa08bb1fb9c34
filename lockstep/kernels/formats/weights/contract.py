"""dequantize_weight: the op that writes a weight's values into memory."""

from torch import Tensor

from lockstep.kernels.formats.weights.weights import QuantizedWeight
from lockstep.kernels.registry import op


@op(writes=("out",))
def dequantize_weight(weight: QuantizedWeight, out: Tensor) -> None:
    """weight [N, K] -> out [N, K] of the model's dtype, in place; out's rows may be strided."""
    out.copy_(weight.dequantize(out.dtype))
