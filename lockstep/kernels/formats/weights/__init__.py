"""Quantized weights: how they are stored on the device, and their dequantization.

    op(quantized) == op(dequantize(quantized)), bit for bit

Dequantization is elementwise, to the model's dtype. So a format adds no numerics beyond its values.
Activations are rounded by the op fp8_linear alone.
"""

from lockstep.kernels.formats.weights.contract import dequantize_weight
from lockstep.kernels.formats.weights.fp4 import MAX_FP4_FACTOR, Fp4Weight
from lockstep.kernels.formats.weights.fp8 import Fp8Weight
from lockstep.kernels.formats.weights.gguf import GGUF_TYPES, GgufType, GgufWeight
from lockstep.kernels.formats.weights.integer import FMA_SCALE_BOUND, IntWeight
from lockstep.kernels.formats.weights.quantize import quantize_fp8, quantize_int
from lockstep.kernels.formats.weights.quantized_weight import (
    GroupedCodes,
    QuantizedWeight,
    row_chunks,
)
from lockstep.kernels.formats.weights.word_order import (
    K_BLOCK,
    pack_codes,
    unpack_codes,
    words_per_row,
)

__all__ = [
    "FMA_SCALE_BOUND",
    "Fp4Weight",
    "Fp8Weight",
    "GGUF_TYPES",
    "GgufType",
    "GgufWeight",
    "GroupedCodes",
    "IntWeight",
    "K_BLOCK",
    "MAX_FP4_FACTOR",
    "QuantizedWeight",
    "dequantize_weight",
    "pack_codes",
    "quantize_fp8",
    "quantize_int",
    "row_chunks",
    "unpack_codes",
    "words_per_row",
]
