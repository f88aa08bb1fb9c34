"""linear: y = x W^T with one fixed reduction tree per weight, whatever the number of rows."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.linear.prepacked import LibraryWeight, PrepackedWeight
from lockstep.kernels.registry import op
from lockstep.kernels.row_tiles import tile_mm

NARROW = 8192
"""Outputs. A narrower weight has fewer output tiles than multiprocessors, so K is split too."""
MIN_PARTITION = 512
"""Columns of the shortest split-K partition. The partitions of a dense weight are multiples of it,
so that no tile straddles two of them; those of a quantized weight are as long on average. Fp32
weights and weights of few outputs have shorter ones."""
K_BLOCK = 128
"""Columns that a quantized weight interleaves: its partitions are whole blocks."""
FEW_OUTPUTS = 128
"""Maximum outputs of a 16-bit weight that has more than two partitions. With two, tiles of 16
outputs make at most 16 CTAs. A CTA streams its weights at about 0.1 MB per us: on an H200 two CTAs
took 6.8 us for 96 x 5120 and one token, and one CTA took 5.0 us for 64 x 2048."""
MIN_FEW_OUTPUTS_COLUMNS = 2048
"""Minimum columns of such a weight, so that its partitions have at least 256."""
FEW_OUTPUTS_SPLIT_K = (8, 4)
"""Split-K counts of such a weight; the first one that gives whole blocks of K_BLOCK is taken."""
QUANTIZED_SPLIT_K = (4, 2)
"""Split-K counts of a quantized weight; the first one that its columns allow is taken. One row on
an H200 (us with 1, 2, 4 and 8 partitions, int4): 5120 x 17408 44.1, 33.9, 21.8, 21.7; 5120 x 6144
16.9, 13.4, 9.8, 10.6."""
MIN_FP32_PARTITION = 128
"""Columns of the shortest split-K partition of an fp32 weight."""
FP32_SPLIT_K = (16, 8, 4, 2)
"""Split-K counts of an fp32 weight; the first one that its columns allow is taken. Tensor cores
have no fp32: routers of 256 x 7168 and 128 x 2688, one row, took 600 us with 2 partitions and 220
us with 1 on an H200."""


def choose_split_k(
    n: int,
    k: int,
    device: str,
    quantized: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    layer_outputs: int | None = None,
) -> int:
    """Return the number of split-K partitions of a weight [n, k]. It is part of the op's numerics.

    It depends on the weight and the kind of device alone, never on the rows. On a GPU narrow dense
    weights get two: 5120 outputs make 80 tiles of 64 for 132 multiprocessors. Those of few outputs
    get eight or four. Quantized weights get four, since their bytes arrive sooner than one
    accumulation chain ends. Weights in fp32 get 16, since their accumulation is a chain of FMAs. On
    a CPU there is one partition, taken in row tiles (lockstep.kernels.row_tiles).

    Args:
        n: outputs on all ranks.
        layer_outputs: outputs of all weights of the linear layer, which count instead of n unless
            the weight is dense and has few outputs. None: this weight is the layer's only one.
    """
    few_outputs = not quantized and n <= FEW_OUTPUTS
    if not few_outputs:
        n = layer_outputs or n
    if _is_whole(n, device):
        return 1
    if quantized:
        fitting = (s for s in QUANTIZED_SPLIT_K if k % K_BLOCK == 0 and k >= s * MIN_PARTITION)
        return next(fitting, 1)
    if dtype == torch.float32:
        return next((s for s in FP32_SPLIT_K if k % s == 0 and k >= s * MIN_FP32_PARTITION), 1)
    if few_outputs and k >= MIN_FEW_OUTPUTS_COLUMNS:
        return next((s for s in FEW_OUTPUTS_SPLIT_K if k % (s * K_BLOCK) == 0), 1)
    return choose_plain_split_k(n, k, device)


def choose_plain_split_k(n: int, k: int, device: str) -> int:
    """Return the number of split-K partitions of a 16-bit weight [n, k] of many outputs: 1 or 2."""
    if _is_whole(n, device):
        return 1
    return 2 if k >= 4 * MIN_PARTITION and k % (2 * MIN_PARTITION) == 0 else 1


def _is_whole(n: int, device: str) -> bool:
    """Return whether no weight of n outputs is split along K."""
    return device.partition(":")[0] == "cpu" or n >= NARROW


def partition_length(k: int, split_k: int) -> int:
    """Return the columns of every split-K partition but the last, which takes the remainder.

    It is part of the op's numerics. From MIN_PARTITION columns on, partitions are whole blocks of
    K_BLOCK columns.
    """
    length = -(-k // split_k)
    if length >= MIN_PARTITION:
        # A quantized tile is read in blocks of interleaved columns: no block may straddle a cut.
        length = -(-length // K_BLOCK) * K_BLOCK
    return min(length, k)


def pad_partitions(x: Tensor, weight: Tensor, split_k: int) -> tuple[Tensor, Tensor]:
    """Append zero columns to x [T, K] and weight [N, K] so that all partitions are equally long.

    Every accumulation begins with 0.0, so adding zero products changes no bit.
    """
    k = x.shape[1]
    missing = split_k * partition_length(k, split_k) - k
    if not missing:
        return x, weight
    return F.pad(x, (0, missing)), F.pad(weight, (0, missing))


def tree_sum(partials: Sequence[Tensor] | Tensor) -> Tensor:
    """Add a power of two of equally shaped tensors pairwise, as a binary tree."""
    while len(partials) > 1:
        pairs = zip(partials[::2], partials[1::2], strict=True)
        partials = [left + right for left, right in pairs]
    return partials[0]


def sum_partials(product: Tensor, dtype: torch.dtype, dims: int = 2) -> Tensor:
    """Reduce the partials [P, ...] of a linear to a tensor of `dims` dimensions in dtype.

    A product that has `dims` dimensions is returned as it is.
    """
    return tree_sum(product).to(dtype) if product.dim() > dims else product


def write_out(y: Tensor, out: Tensor | None) -> Tensor:
    """Copy y into `out` and return that; return y where `out` is None."""
    return y if out is None else out.copy_(y)


def dequantized(weight: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Return a dense weight as it is, or the values of a quantized one in dtype."""
    return weight.dequantize(dtype) if isinstance(weight, QuantizedWeight) else weight


@op
def linear(
    x: Tensor,
    weight: Tensor | QuantizedWeight | PrepackedWeight,
    split_k: int = 1,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute x W^T: [T, N] of the weight's dtype (of x's dtype where the weight is quantized).

    K is cut into `split_k` partitions of partition_length columns, the last one shorter. Each
    partition is one fp32 accumulation in ascending order of k. Partitions are added pairwise, as a
    binary tree, and the total is rounded once. On a CPU the order of a partition is that of the
    prepacked weight (lockstep.kernels.linear.prepacked). Layers prepack once, when they are loaded.
    A row's bits do not depend on T.

    A quantized weight is used by its values: linear(x, w) == linear(x, w.dequantize(x.dtype)).

    Args:
        x: [T, K]. An fp32 weight takes any dtype of x, which is widened first.
        weight: [N, K] of x's dtype or fp32, or quantized, or prepacked for a CPU.
        split_k: number of split-K partitions, a power of two. See choose_split_k.
        allow_partials: a backend may return the unreduced partials [P, T, N] fp32 instead, for a
            consumer that adds them itself. Their tree_sum over P, rounded once, is the result.
            The reference never does.
        out: [T, N], filled and returned if present, with allow_partials too. Its rows may be
            strided, so that it may be some columns of a wider result.
    """
    if isinstance(weight, PrepackedWeight):
        return write_out(weight.define(x), out)
    weight = dequantized(weight, x.dtype)
    length = partition_length(x.shape[1], split_k)
    pairs = zip(x.float().split(length, dim=1), weight.split(length, dim=1), strict=True)
    partials = [_multiply_partition(columns, part) for columns, part in pairs]
    return write_out(tree_sum(partials).to(weight.dtype), out)


def _multiply_partition(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [T, K] fp32 with weight [N, K] in one accumulation. Returns [T, N] fp32."""
    if weight.device.type == "cpu":
        return LibraryWeight(weight).tiles_of_base(x)
    return tile_mm(x, weight.float().t())


def draft_linear(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    split_k: int = 1,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute x W^T [T, N] with whatever reduction is fastest: drafters need no exactness.

    On a CPU one row of 256 x 1024 takes 24 us, a tile of 4 rows 41 us.
    """
    weight = dequantized(weight, x.dtype)
    return write_out(F.linear(x.to(weight.dtype), weight), out)
