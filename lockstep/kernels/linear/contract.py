"""linear: y = x W^T with one fixed reduction tree per weight, whatever the number of rows."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.formats.weights import PackedWeight
from lockstep.kernels.registry import op
from lockstep.kernels.row_tiles import tile_mm

NARROW = 8192
"""Below so many outputs a tile per multiprocessor leaves some idle, unless K is cut too."""
SEGMENT = 512
"""Columns. A plain weight is cut only where each segment is a multiple of this, so that no tile
straddles a cut; a packed one's segments are as long in the mean."""
PACKED_BLOCK = 128
"""Columns that a packed weight keeps together: its segments are whole blocks."""
PACKED_SEGMENTS = (4, 2)
"""Cuts of a packed weight, the first that it has columns for. One row on an H200 (us in 1, 2, 4 and
8 segments, int4): 5120 x 17408 44.1, 33.9, 21.8, 21.7; 5120 x 6144 16.9, 13.4, 9.8, 10.6."""
FLOAT_SEGMENT = 128
"""Columns. A weight in fp32 is cut only into segments of as many or more."""
FLOAT_SEGMENTS = (16, 8, 4, 2)
"""Cuts of a weight in fp32, the first that suits its columns. fp32 has no matrix units: routers of
256 x 7168 and 128 x 2688, one row, took 600 and 220 us in 2 and 1 segments on an H200."""


def segments(
    n: int, k: int, device: str, packed: bool = False, dtype: torch.dtype = torch.bfloat16
) -> int:
    """How many segments K is cut into for a weight [n, k]: part of the op's definition.

    It depends on the weight and the kind of device alone, never on the rows. Narrow weights are cut
    in two: 5120 outputs make 80 tiles of 64 for 132 multiprocessors. Packed ones, whose bytes are
    read sooner than a chain of products is done, in four. Ones in fp32 in 16: their products are a
    chain of additions. A CPU cuts nothing: its sums are its own numerics
    (lockstep.kernels.row_tiles), as its product of one tile already is.
    """
    if device.partition(":")[0] == "cpu" or n >= NARROW:
        return 1
    if packed:
        long = (s for s in PACKED_SEGMENTS if k % PACKED_BLOCK == 0 and k >= s * SEGMENT)
        return next(long, 1)
    if dtype == torch.float32:
        return next((s for s in FLOAT_SEGMENTS if k % s == 0 and k >= s * FLOAT_SEGMENT), 1)
    return 2 if k >= 4 * SEGMENT and k % (2 * SEGMENT) == 0 else 1


def run_length(k: int, segments: int) -> int:
    """Columns of each segment of K but the last, which has what is left: part of the op's
    definition. Segments of SEGMENT columns or more are whole blocks of PACKED_BLOCK.
    """
    length = -(-k // segments)
    if length >= SEGMENT:
        length = -(-length // PACKED_BLOCK) * PACKED_BLOCK
    return min(length, k)


def whole_runs(x: Tensor, weight: Tensor, segments: int) -> tuple[Tensor, Tensor]:
    """x [T, K] and weight [N, K], with columns of zeros behind where the last segment is shorter
    than the others. Zeros are added to a sum that begins with one: they change no bit."""
    k = x.shape[1]
    missing = segments * run_length(k, segments) - k
    if not missing:
        return x, weight
    return F.pad(x, (0, missing)), F.pad(weight, (0, missing))


def tree_sum(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """A power of two of tensors of one shape -> their sum, pairwise, as a binary tree."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def placed(y: Tensor, out: Tensor | None) -> Tensor:
    """y, or `out` filled with it."""
    return y if out is None else out.copy_(y)


def unpacked(weight: Tensor | PackedWeight, dtype: torch.dtype) -> Tensor:
    """The weight itself, or a packed one's values in dtype."""
    return weight.unpack(dtype) if isinstance(weight, PackedWeight) else weight


@op
def linear(
    x: Tensor,
    weight: Tensor | PackedWeight,
    segments: int = 1,
    partial: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x [T, K], weight [N, K] of x's dtype, or packed -> [T, N] of that dtype.

    A weight in fp32 takes an x of any dtype, which is widened first: the result is fp32.

    K is cut into `segments` (a power of two) runs of run_length columns, the last of what is left.
    A run is one fp32 accumulation in ascending order; runs are added pairwise, as a binary tree;
    the total is rounded once. On a CPU a run is taken by tiles of rows
    (lockstep.kernels.row_tiles), so that a row's bits do not depend on T.

    A packed weight is what it unpacks to: linear(x, packed) == linear(x, packed.unpack(x.dtype)).

    partial: the reader adds. A backend may return [P, T, N] fp32 instead, whose tree_sum over P,
    rounded once, is the result; the reference never does.

    out [T, N]: filled and returned where it is given, with `partial` too; its rows may be strided,
    so that it may be some columns of a wider result.
    """
    weight = unpacked(weight, x.dtype)
    run = run_length(x.shape[1], segments)
    parts = [
        tile_mm(x[:, begin : begin + run].float(), weight[:, begin : begin + run].float().t())
        for begin in range(0, x.shape[1], run)
    ]
    return placed(tree_sum(parts).to(weight.dtype), out)


def draft_linear(
    x: Tensor,
    weight: Tensor | PackedWeight,
    segments: int = 1,
    partial: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x [T, K], weight [N, K] -> [T, N] with whatever tree is fastest: drafters need no exactness.

    On a CPU at one row of 256 x 1024: 24 us, against 41 us for a tile of 4 rows.
    """
    weight = unpacked(weight, x.dtype)
    return placed(F.linear(x.to(weight.dtype), weight), out)
