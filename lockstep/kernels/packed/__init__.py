"""Packed weights: weights of 4 or 8 bits as they lie on the device, and their unpacking.

    op(packed) == op(unpack(packed)), bit for bit

Unpacking is elementwise, to the model's dtype; activations are never rounded. So a format adds no
numerics beyond its values.
"""

from torch import Tensor

from lockstep.kernels.packed._gguf import GGUF_TYPES, GgufType, GgufWeight
from lockstep.kernels.packed._order import BLOCK, codes_of, pack, words_per_row
from lockstep.kernels.packed._quantise import quantise_fp8, quantise_int
from lockstep.kernels.packed._weights import (
    FP4_FACTORS,
    Fp4Weight,
    Fp8Weight,
    IntWeight,
    PackedWeight,
    pieces,
)
from lockstep.kernels.registry import op

__all__ = [
    "BLOCK",
    "FP4_FACTORS",
    "Fp4Weight",
    "Fp8Weight",
    "GGUF_TYPES",
    "GgufType",
    "GgufWeight",
    "IntWeight",
    "PackedWeight",
    "codes_of",
    "pack",
    "pieces",
    "quantise_fp8",
    "quantise_int",
    "unpack_weight",
    "words_per_row",
]


@op(writes=("out",))
def unpack_weight(weight: PackedWeight, out: Tensor) -> None:
    """weight [N, K] -> out [N, K] of the model's dtype, in place; out's rows may be strided."""
    out.copy_(weight.unpack(out.dtype))
