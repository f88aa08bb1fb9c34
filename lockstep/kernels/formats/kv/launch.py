"""Kernel arguments of one side of a cache, and whether kernels can read it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.kernels.compile_target import NATIVE_FP8, CompileTarget
from lockstep.kernels.formats.kv import KVCache, KVDeviceFunctions, KVQuantizer


class KVOperand(NamedTuple):
    """Tensors and constants that a launch passes for one side of a cache.

    qdata: the quantized values, or the cache itself where it is of the model's dtype.
    num_scales: scales of a token and head. rotation_block: values that are rotated together, 0 for
    no rotation. store, load, dequantize: device functions, None where the cache is not quantized.
    scales, layer_constant, values_per_load: as in QuantizedKV, KVQuantizer and KVDeviceFunctions.
    """

    qdata: Tensor
    scales: Tensor | None = None
    layer_constant: float | int | None = None
    num_scales: int = 0
    rotation_block: int = 0
    store: Any = None
    values_per_load: int = 1
    load: Any = None
    dequantize: Any = None


def kv_operand(
    cache: KVCache, dtype: torch.dtype, target: CompileTarget | None = None
) -> KVOperand:
    """Return the launch arguments of a cache.

    Args:
        dtype: the model's.
        target: what the kernel is compiled for; None for a kernel that only stores.
    """
    if isinstance(cache, Tensor):
        return KVOperand(cache)
    quantizer = cache.quantizer
    device = quantizer.device_functions()
    return KVOperand(
        cache.qdata,
        cache.scales,
        quantizer.layer_constant,
        quantizer.num_scales(cache.dim),
        0 if quantizer.rotation is None else quantizer.rotation.block_size(cache.dim),
        device.store,
        device.values_per_load,
        device.load,
        _select_dequantize(device, dtype, target),
    )


def _select_dequantize(
    device: KVDeviceFunctions, dtype: torch.dtype, target: CompileTarget | None
) -> Any:
    """Return the fastest dequantization that the target supports."""
    if target is None or not target.inline_ptx or dtype != torch.bfloat16:
        return device.dequantize
    native = device.dequantize_native if target.arch >= NATIVE_FP8 else None
    return native or device.dequantize_bf16 or device.dequantize


def quantized_token_bytes(*caches: KVCache) -> int:
    """Return the bytes of one token and head over the quantized caches among these."""
    quantized = [
        tensor for cache in caches if not isinstance(cache, Tensor) for tensor in cache.tensors()
    ]
    return sum(tensor.shape[-1] * tensor.dtype.itemsize for tensor in quantized)


def unsupported_cache(
    dim: int, quantizers: tuple[KVQuantizer, ...] | None = None, **traits: Any
) -> str | None:
    """Return why kernels cannot read a layer's cache, or None.

    Reasons: a quantizer without device functions, or one that does not store heads of this dim.
    """
    for quantizer in quantizers or ():
        if quantizer.device_path is None:
            return f"{type(quantizer).__name__} has no device functions"
        reason = quantizer.unsupported_reason(dim)
        if reason is not None:
            return reason
    return None
