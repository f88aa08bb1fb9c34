"""dequantize_weight: the op that writes the values of a quantized weight into memory."""

from torch import Tensor

from lockstep.kernels.formats.weights.quantized_weight import QuantizedWeight
from lockstep.kernels.registry import op


@op(writes=("out",), callers=("linear", "experts"))
def dequantize_weight(weight: QuantizedWeight, out: Tensor) -> None:
    """Write the values of weight [N, K] to out [N, K] of the model's dtype. Rows may be strided."""
    out.copy_(weight.dequantize(out.dtype))
