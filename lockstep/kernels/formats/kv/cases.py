"""Caches in every format, for the test cases of the ops that read and write them."""

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import (
    KVCache,
    KVFormat,
    KVQuantizer,
    QuantizedKV,
    dequantize,
    rotation_of,
)
from lockstep.kernels.formats.kv.fp8 import Fp8
from lockstep.kernels.formats.kv.table import KV_FORMATS
from lockstep.kernels.formats.kv.unquantized import Unquantized

STATIC_SCALES = KVFormat("fp8_e4m3 scaled", Fp8("e4m3", 0.03), Fp8("e4m3", 0.7))
"""fp8 with static scales, as a checkpoint may have them."""
KERNEL_FORMATS = {f.name: f.for_layer("layers.3") for f in KV_FORMATS.values() if f.k.device_path}
KERNEL_FORMATS |= {STATIC_SCALES.name: STATIC_SCALES}
"""Formats that kernels read, each once, as a layer has them."""
LATENT_QUANTIZERS = {
    name: f.latent for name, f in KERNEL_FORMATS.items() if f.latent and f.latent.device_path
}
"""Quantizers of latents that kernels read, as a layer has them."""
UNWRITTEN_BYTE = 0x7F
"""Fill of integer unwritten values: a NaN in both fp8 types."""


def fits(format: KVFormat | None, dim: int) -> bool:
    """Return whether the format can store heads of this dim."""
    return format is None or not (
        format.k.unsupported_reason(dim) or format.v.unsupported_reason(dim)
    )


def empty_cache(
    shape: tuple[int, ...], dtype: torch.dtype, format: KVFormat | None
) -> tuple[KVCache, KVCache]:
    """Return keys and values [pages, page_size, Hkv, D] without any written token: all NaN."""
    if format is None:
        return empty_side(shape, dtype, None), empty_side(shape, dtype, None)
    return empty_side(shape, dtype, format.k), empty_side(shape, dtype, format.v)


def empty_side(
    shape: tuple[int, ...], dtype: torch.dtype, quantizer: KVQuantizer | None
) -> KVCache:
    """Return one side [pages, page_size, .., D] of a cache without any written token: all NaN."""
    if quantizer is None:
        return torch.full(shape, torch.nan, dtype=dtype)
    return _empty_quantized(shape, quantizer)


def dequantized_copy(cache: KVCache, dtype: torch.dtype) -> KVCache:
    """Dequantize a cache to a tensor or, where its values are rotated, to an Unquantized cache."""
    rotation = rotation_of(cache)
    numbers = dequantize(cache, dtype)
    if rotation is None:
        return numbers
    return QuantizedKV(Unquantized(dtype, rotation), numbers.shape[-1], numbers)


def _empty_quantized(shape: tuple[int, ...], quantizer: KVQuantizer) -> QuantizedKV:
    """Return a quantized side [pages, page_size, .., D] without any written token."""
    (*lead, dim) = shape
    fill = torch.nan if quantizer.dtype.is_floating_point else UNWRITTEN_BYTE
    qdata = torch.full((*lead, quantizer.row_width(dim)), fill, dtype=quantizer.dtype)
    scales: Tensor | None = None
    if quantizer.num_scales(dim):
        scales_shape = (*lead, quantizer.num_scales(dim))
        scales = torch.full(scales_shape, torch.nan, dtype=quantizer.scale_dtype)
    return QuantizedKV(quantizer, dim, qdata, scales)
