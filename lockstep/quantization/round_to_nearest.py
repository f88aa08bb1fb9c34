"""Round to nearest: a plain checkpoint is quantized while it is loaded.

    fp8     e4m3, a scale per output
    int8    symmetric, a scale per output
    int4    symmetric, a scale per 128 columns

Rounding uses no calibration. Linear layers that checkpoints usually keep unquantized stay plain
(lockstep.quantization.weight_format.is_usually_unquantized), and so do embeddings.
"""

from torch import Tensor

from lockstep.kernels.formats.weights import (
    Fp8Weight,
    IntWeight,
    QuantizedWeight,
    quantize_fp8,
    quantize_int,
    row_chunks,
)
from lockstep.quantization.integers import SCALES, Scheme
from lockstep.quantization.weight_format import (
    CheckpointLinear,
    Layout,
    WeightFormat,
    damaged_error,
    is_usually_unquantized,
)
from lockstep.quantization.weight_sink import FLOAT_DTYPES, WeightSink

FP8 = "fp8"
SCHEMES = {
    "int8": Scheme(bits=8, group=-1, symmetric=True),
    "int4": Scheme(bits=4, group=128, symmetric=True),
}
METHODS = (FP8, *SCHEMES)
"""Supported values of EngineConfig.quantization."""


class RoundToNearest(WeightFormat):
    """Weight format that quantizes a plain checkpoint while loading. method: one of METHODS."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.name = "fp8-channel" if method == FP8 else SCHEMES[method].name

    def activation_refusal(self) -> str | None:
        return None if self.method == FP8 else super().activation_refusal()

    def layout(self, module: CheckpointLinear) -> Layout | None:
        if is_usually_unquantized(module):
            return None
        if self.method == FP8:
            return Layout.of(Fp8Weight, block_n=1, block_k=module.inputs)
        info = (module.tensors or {}).get("weight")
        scale_dtype = SCALES.get(info.dtype if info else "BF16", SCALES["BF16"])
        scheme = SCHEMES[self.method]
        return Layout.of(IntWeight, bits=scheme.bits, group=scheme.group, scale_dtype=scale_dtype)

    def sinks(self, module: CheckpointLinear, weight: QuantizedWeight) -> dict[str, WeightSink]:
        def fill(tensor: Tensor) -> None:
            # By chunks of rows: rounding needs fp32 copies, which are larger than the weight.
            for begin, end in row_chunks(*weight.shape):
                part = tensor[begin:end]
                if not bool(part.isfinite().all()):
                    raise damaged_error(module, "weight", "has infinities or NaN")
                weight.rows(begin, end).copy_(self._rounded(part))

        return {
            "weight": WeightSink(
                (module.whole_outputs, module.inputs), FLOAT_DTYPES, weight.device, fill
            )
        }

    def _rounded(self, tensor: Tensor) -> QuantizedWeight:
        """Quantize rows of a float weight [N, K]."""
        if self.method == FP8:
            return quantize_fp8(tensor)
        scheme = SCHEMES[self.method]
        return quantize_int(tensor, scheme.bits, scheme.group)
