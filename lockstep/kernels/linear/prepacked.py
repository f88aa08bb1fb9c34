"""Weights prepacked for a CPU's matrix products, and the number of rows that gives equal bits.

TiledWeight and TiledQuantizedWeight (lockstep.kernels.linear.tiled) are for Numba kernels,
LibraryWeight for the libraries of torch, where Numba is not installed. The Numba kernels define one
set of bits, the libraries another one.

A BLAS product of few rows copies the whole weight into its own layout at every call. A prepacked
weight is copied once, when it is loaded: oneDNN for every dtype, FBGEMM for float16, whose weights
stay at 2 bytes. All products of one token of a 135 M model, weights not in the CPU's cache, on one
AVX2 thread: 102 ms by torch.mm in padded tiles, 50 ms by oneDNN in fp32, 28 ms by FBGEMM in fp16.

The bits of a library's product are those of tiles of BASE rows on one thread. A library may choose
another loop for another number of rows or threads, so other sizes serve only where a probe of the
same shape shows the same bits (oneDNN: all sizes; FBGEMM: not 1, 2 and 7 rows).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.threads import one_thread

OUTPUT_MULTIPLE = 32
"""N is padded with zeros to a multiple of this: the libraries have remainder loops in which an
output's bits depend on its index (oneDNN: N = 1; FBGEMM: N % 16 with AVX2, N % 32 with AVX-512)."""
BASE = 8
"""Rows of the tiles that define the bits."""
SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 384)
"""Numbers of rows that are probed. One request with drafts has 2 to 8 rows."""
ROWS_HINT = 8
"""Rows that oneDNN lays a weight out for. It changes no bit. One row of [960, 576] took 103 us for
a layout of 8 rows, 128 of 1, 134 of 64; 8 rows took 179, 1168 and 341."""

CODE_COLUMNS = 32
"""The columns of a quantized weight must be a multiple of this number, since four neighbouring
words have the 4-bit codes of 32 columns."""
GROUP_COLUMNS = 16
"""The columns of a group must be a multiple of this number, since a kernel dequantizes 16 columns
with the scales of one group."""

Product = Callable[[Tensor], Tensor]
"""x [M, K] fp32, contiguous -> x W^T [M, N] fp32."""


def has_onednn() -> bool:
    """Return whether this build of torch has oneDNN's linear with a prepacked weight."""
    return torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )


def uses_fbgemm(dtype: torch.dtype) -> bool:
    """Return whether weights of dtype are FBGEMM's: fp16, where this build of torch has it."""
    return dtype == torch.float16 and "fbgemm" in torch.backends.quantized.supported_engines


class PrepackedWeight(ABC):
    """A weight [N, K] in the layout of this CPU's products.

    shape: (N, K). dtype: of the plain weight and of its outputs. nbytes: of the prepacked N x K
    values, without padding.
    """

    device = torch.device("cpu")
    nbytes: int

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        n, k = shape
        self.shape = (n, k)
        self.dtype = dtype

    @abstractmethod
    def plain(self) -> Tensor:
        """Return the plain weight [N, K], bit for bit as it was."""

    @abstractmethod
    def define(self, x: Tensor) -> Tensor:
        """Multiply x [T, K] with the weight [N, K] by the definition of the bits: [T, N]."""

    @abstractmethod
    def multiply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply x [T, K] with the bits of `define`. out: [T, N], filled and returned if given.

        Its rows may be strided.
        """

    def rows(self, begin: int, end: int) -> Tensor:
        """Return rows of the plain weight."""
        return self.plain()[begin:end]


class LibraryWeight(PrepackedWeight):
    """A weight in the layout of oneDNN or FBGEMM."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.shape, weight.dtype)
        n, k = weight.shape
        filled = F.pad(weight, (0, 0, 0, -n % OUTPUT_MULTIPLE)).contiguous()
        self.nbytes = n * k * (2 if uses_fbgemm(weight.dtype) else 4)
        self.product, self._dense = self._prepack(filled)

    def _prepack(self, weight: Tensor) -> tuple[Product, Callable[[], Tensor]]:
        """Return the product with the prepacked weight, and a function that unpacks it to fp32."""
        wide = weight.float()
        if uses_fbgemm(weight.dtype):
            half = torch.ops.quantized.linear_prepack_fp16(wide, None)
            return (
                lambda x: torch.ops.quantized.linear_dynamic_fp16(x, half),
                lambda: torch.ops.quantized.linear_unpack_fp16(half)[0],
            )
        if has_onednn():
            blocked = torch.ops.mkldnn._reorder_linear_weight(wide, ROWS_HINT)
            linear = torch.ops.mkldnn._linear_pointwise
            return lambda x: linear(x, blocked, None, "none", [], ""), blocked.to_dense
        return lambda x: F.linear(x, wide), lambda: wide

    def plain(self) -> Tensor:
        """See PrepackedWeight."""
        return self._dense()[: self.shape[0]].to(self.dtype)

    def define(self, x: Tensor) -> Tensor:
        """See PrepackedWeight."""
        return self.tiles_of_base(x.float()).to(self.dtype)

    def multiply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See PrepackedWeight."""
        product = self.mm(x.float()).to(self.dtype)
        return product if out is None else out.copy_(product)

    def exact_sizes(self) -> tuple[int, ...]:
        """Return the numbers of rows, ascending, that give the bits of tiles of BASE rows on one
        thread; empty where no number does on torch's present number of threads."""
        return probed_sizes(*self.shape, self.dtype == torch.float16, torch.get_num_threads())

    def tiles_of_base(self, x: Tensor) -> Tensor:
        """Multiply x [M, K] fp32 in tiles of BASE rows, padded with zeros, on one thread: the
        definition of the product. Returns [M, N] fp32."""
        parts = []
        with one_thread():
            for rows in x.split(BASE):
                tile = F.pad(rows, (0, 0, 0, BASE - len(rows)))
                parts.append(self.product(tile)[: len(rows), : self.shape[0]])
        return torch.cat(parts)

    def mm(self, x: Tensor) -> Tensor:
        """Multiply x [M, K] fp32 with the bits of tiles_of_base, in tiles of exact sizes."""
        rows = len(x)
        if not rows:
            return x.new_empty(0, self.shape[0])
        sizes = self.exact_sizes()
        if not sizes:
            with one_thread():
                return self.mm(x)
        if rows > sizes[-1]:
            return torch.cat([self.mm(part) for part in x.split(sizes[-1])])
        size = next(size for size in sizes if size >= rows)
        tile = F.pad(x, (0, 0, 0, size - rows)) if rows < size else x.contiguous()
        return self.product(tile)[:rows, : self.shape[0]].contiguous()


@cache
def probed_sizes(n: int, k: int, half: bool, threads: int) -> tuple[int, ...]:
    """Probe exact_sizes of a weight [n, k]. half: whether it is float16. threads: torch's number.

    Activations span 41 powers of two, so that another order of additions shows.
    """
    generator = torch.Generator().manual_seed(n * 65537 + k)
    x = torch.randn(SIZES[-1], k, generator=generator)
    x = x * torch.exp2(torch.randint(-20, 21, x.shape, generator=generator).float())
    values = torch.randn(n, k, generator=generator)
    weight = LibraryWeight(values.half() if half else values)
    base = weight.tiles_of_base(x)
    exact = [size for size in SIZES if torch.equal(weight.product(x[:size])[:, :n], base[:size])]
    if BASE in exact:
        return tuple(exact)
    return (BASE,) if threads == 1 else ()


def dequantizes(backend: str, dtype: torch.dtype) -> bool:
    """Return whether a CPU backend of linear dequantizes weights where it multiplies.

    It does so for fp32 models only: rounding each value to 16 bits takes longer than reading it in
    16 bits.
    """
    return backend == "numba" and dtype == torch.float32


def fits_tiles(weight: QuantizedWeight) -> bool:
    """Return whether the kernels of TiledQuantizedWeight read this format and its sizes."""
    codes = weight.rows(0, 1).grouped()
    return codes is not None and weight.k % CODE_COLUMNS == 0 and codes.group % GROUP_COLUMNS == 0


def prepack(backend: str, weight: Tensor | QuantizedWeight) -> PrepackedWeight:
    """Prepack a weight for a backend of linear on a CPU. A quantized one fits_tiles()."""
    if backend == "numba":
        from lockstep.kernels.linear.tiled import TiledQuantizedWeight, TiledWeight

        if isinstance(weight, QuantizedWeight):
            return TiledQuantizedWeight(weight)
        return TiledWeight(weight)
    assert isinstance(weight, Tensor), "the libraries of torch take plain weights"
    return LibraryWeight(weight)
