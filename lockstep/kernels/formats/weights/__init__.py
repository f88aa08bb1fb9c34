"""Packed weights: weights of 4 or 8 bits as they lie on the device, and their unpacking.

    op(packed) == op(unpack(packed)), bit for bit

Unpacking is elementwise, to the model's dtype; activations are never rounded. So a format adds no
numerics beyond its values.
"""

from lockstep.kernels.formats.weights.contract import dequantize_weight
from lockstep.kernels.formats.weights.gguf import GGUF_TYPES, GgufType, GgufWeight
from lockstep.kernels.formats.weights.quantize import quantize_fp8, quantize_int
from lockstep.kernels.formats.weights.weights import (
    FP4_FACTORS,
    Fp4Weight,
    Fp8Weight,
    IntWeight,
    QuantizedWeight,
    row_chunks,
)
from lockstep.kernels.formats.weights.word_order import (
    BLOCK,
    pack_codes,
    unpack_codes,
    words_per_row,
)

__all__ = [
    "BLOCK",
    "FP4_FACTORS",
    "Fp4Weight",
    "Fp8Weight",
    "GGUF_TYPES",
    "GgufType",
    "GgufWeight",
    "IntWeight",
    "QuantizedWeight",
    "unpack_codes",
    "pack_codes",
    "row_chunks",
    "quantize_fp8",
    "quantize_int",
    "dequantize_weight",
    "words_per_row",
]
