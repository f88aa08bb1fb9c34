"""Contract of a KV format: quantizers, their device functions, and quantized caches."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from lockstep.kernels.formats.kv.hadamard import HadamardRotation


class KVDeviceFunctions(NamedTuple):
    """Triton device functions of a quantizer. Kernels take them as constexpr arguments.

    store(x, qdata, scales, layer_constant, live, columns, D): quantize heads and store them.
        x: [HEADS, BLOCK] fp32, 0 from column D on. live: mask [HEADS, 1] of the heads that exist.
        qdata, scales: pointers to each head's first element, [HEADS, 1]. columns: column indices,
        [1 or HEADS, BLOCK].
    load(qdata, scales, columns, live, D): return a tuple of the raw words and scales of a tile,
        0 where not live [TILE, 1]. qdata, scales: pointers to each token's first element,
        [TILE, 1]. columns: [1, N], from 0 to D / values_per_load, at least one.
    dequantize(loaded, columns, layer_constant, D): return [TILE, N * values_per_load] fp32.
        loaded: what load returned.
    dequantize_bf16: the same in bf16 by inline assembly, with the same bits; None: there is none.
    dequantize_native: the same by conversion instructions of sm_89 and later; None: there is none.
    values_per_load: values that one column of load yields, e.g. 4 for a word of four bytes.

    scales is None for a quantizer without scales, layer_constant for one without a constant.
    load and dequantize also run in Gluon kernels, so they create no ranges and join only tensors of
    one layout.
    """

    store: Any
    values_per_load: int
    load: Any
    dequantize: Any
    dequantize_bf16: Any = None
    dequantize_native: Any = None


class KVMmaFunctions(NamedTuple):
    """Gluon device functions that dequantize into the register operands of one warp's mma.sync.

    The result is bf16. A tile of 64 tokens has in shared memory the layout of a page: qdata
    [num_planes, 64, W] int32 with W = D / values_per_word; where a quantizer has 16-bit scales,
    scales [N, 64] int32, the words that hold those of KV head kv.

    load_k(qdata, scales, i, kv, HKV, D): return tokens 16 i .. 16 i + 15 [16, D], each group of 16
        columns in the order of mma_layouts.column_of.
    load_v(qdata, scales, i, kv, HKV, D): return the columns [D, 16] of these tokens in any order.
    v_column(i, D): return the column that row i of load_v contains.
    max_rows: largest number of (token, query head) rows for which this path is the fastest.
    """

    num_planes: int
    values_per_word: int
    load_k: Any
    load_v: Any
    v_column: Any
    max_rows: int


@dataclass(frozen=True)
class KVQuantizer(ABC):
    """Storage of the D numbers of one token and head in a page. It depends on its fields alone."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of the quantized values."""

    @property
    def layer_constant(self) -> float | int | None:
        """Constant of the layer that its device functions take: the static scale of every value,
        or the seed of a rotation; None for neither."""
        return None

    @property
    def rotation(self) -> HadamardRotation | None:
        """Rotation in which dequantized values stay; None for none."""
        return None

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the scales."""
        return torch.float32

    def num_scales(self, dim: int) -> int:
        """Return the number of scales of one token and head."""
        return 0

    def row_width(self, dim: int) -> int:
        """Return the elements of `dtype` that one token and head takes."""
        return dim

    def unsupported_reason(self, dim: int) -> str | None:
        """Return why heads of this dim cannot be stored, or None."""
        return None

    def for_layer(self, layer: str) -> Self:
        """Return the quantizer of the layer of this name, "layers.3". Rotations differ by layer."""
        return self

    @abstractmethod
    def quantize(self, x: Tensor) -> tuple[Tensor, ...]:
        """Quantize x [..., D] of the model's dtype.

        Values that are not finite must become NaN when they are dequantized.

        Returns: values [..., row_width] and, if the quantizer has any, scales [..., num_scales].
        """

    @abstractmethod
    def dequantize(self, qdata: Tensor, scales: Tensor | None) -> Tensor:
        """Dequantize values [..., row_width] with scales [..., num_scales].

        Returns: [..., D] fp32, which the caller rounds once, in `rotation` if there is one.
        """

    @property
    def device_path(self) -> str | None:
        """Path of its KVDeviceFunctions, "module:name"; None where no kernel reads the format."""
        return None

    @property
    def mma_path(self) -> str | None:
        """Path of its KVMmaFunctions, "module:name"; None where it has none."""
        return None

    def device_functions(self) -> KVDeviceFunctions:
        """Import the device functions at device_path, which is not None. Needs Triton."""
        functions: KVDeviceFunctions = _import_attribute(self.device_path)
        return functions

    def mma_functions(self) -> KVMmaFunctions:
        """Import the device functions at mma_path, which is not None. Needs Triton."""
        functions: KVMmaFunctions = _import_attribute(self.mma_path)
        return functions


def _import_attribute(path: str | None) -> Any:
    """Import the attribute at a path "module:name"."""
    assert path is not None, "the quantizer has device functions"
    (module, name) = path.split(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class KVFormat:
    """Storage format of a layer's cache.

    name: the format's name in the numerics. k, v: quantizers of keys and of values.
    has_static_scales: whether a checkpoint's k_scale and v_scale set the quantizers' field `scale`.
    latent: quantizer of a latent, key and value at once; None: the format stores no latents.
    """

    name: str
    k: KVQuantizer
    v: KVQuantizer
    has_static_scales: bool = False
    latent: KVQuantizer | None = None

    def unsupported_reason(self, dim: int) -> str | None:
        """Return why heads of this dim cannot be stored, or None."""
        return self.v.unsupported_reason(dim) or self.k.unsupported_reason(dim)

    def for_layer(self, layer: str) -> "KVFormat":
        """Return the format of the layer of this name, "layers.3"."""
        latent = None if self.latent is None else self.latent.for_layer(layer)
        return replace(self, k=self.k.for_layer(layer), v=self.v.for_layer(layer), latent=latent)


@dataclass(frozen=True)
class QuantizedKV:
    """Quantized keys, or values, of one layer.

    qdata: values [pages, page_size, Hkv, row_width], contiguous. scales: [pages, page_size, Hkv,
    num_scales], contiguous, if the quantizer has any. dim: D. Latents have no Hkv dimension.
    """

    quantizer: KVQuantizer
    dim: int
    qdata: Tensor
    scales: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the cache when it is dequantized: [pages, page_size, Hkv, D]."""
        return torch.Size((*self.qdata.shape[:-1], self.dim))

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the cache, each indexed by page first."""
        return [self.qdata] if self.scales is None else [self.qdata, self.scales]


KVCache = Tensor | QuantizedKV
"""Keys or values of a layer, [pages, page_size, Hkv, D], or its latents, [pages, page_size, C]: in
the model's dtype, or quantized."""
