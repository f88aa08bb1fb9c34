# mypy: ignore-errors
"""linear with a packed weight, in Triton: unpacked in registers on its way into the matrix units.

Weights are the left operand, so that there is one tree whatever the number of tokens: with tokens
on the left, 16 of them would be mma.sync's with another order of columns, 64 wgmma's. The tree is
the op's, as in triton.py. From UNPACK_FROM tokens on, and where a layout does not suit the kernel,
the weight is unpacked first, into memory, and the dense backend multiplies. The bits are the same:
linear(x, packed) == linear(x, packed.unpack(x.dtype)).
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from lockstep.kernels.architecture import HOPPER
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.linear import linear
from lockstep.kernels.linear._packed_kernel import packed_kernel
from lockstep.kernels.linear.triton import fold, linear_triton
from lockstep.kernels.packed import PackedWeight
from lockstep.kernels.packed._device import BLOCK
from lockstep.kernels.packed._form import TYPES, Target, fits, irregular, operand_of, target_of
from lockstep.kernels.packed.triton import unpack_weight_triton

UNPACK_FROM = 257
"""Tokens. Fewer read the packed weight; estimated, to be measured."""
GROUP = 8
"""Row tiles that share a column tile's weights in L2."""


@dataclass(frozen=True)
class PackedTile:
    """How a launch is cut. m, n, k: tokens, outputs and columns per block, powers of two, k 128 or
    more; split: programs along K. It decides the speed and nothing else."""

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3
    split: int = 1


def tile_of(tokens: int, segments: int, arch: int) -> PackedTile:
    """A tile by rule: few tokens stream the weights, more share what was unpacked once."""
    m = min(max(16, triton.next_power_of_2(tokens)), 128)
    if arch != HOPPER:
        return PackedTile(m, 64, 128, stages=3 if m <= 64 else 2)
    if m <= 32:
        return PackedTile(m, 64, 256, stages=5, split=segments)
    return PackedTile(m, 128, 128, warps=8, stages=4, split=segments)


def launch(
    x: Tensor,
    weight: PackedWeight,
    segments: int,
    tile: PackedTile,
    target: Target,
    partial: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """linear by a given tile. The tile decides the speed and nothing else."""
    (tokens, k) = x.shape
    n = weight.shape[0]
    split = min(tile.split, segments)
    length = k // segments
    found = x.new_empty(tokens, n) if out is None else out
    if split > 1:
        found = torch.empty(split, tokens, n, dtype=torch.float32, device=x.device)
    if tokens:
        columns = tile.k if fits(weight, tile.k) and length % tile.k == 0 else int(BLOCK)
        operand, form = operand_of(weight, x.dtype, columns, target)
        grid = (triton.cdiv(tokens, tile.m) * triton.cdiv(n, tile.n) * split,)
        packed_kernel[grid](
            x, operand, found, tokens, n, length, x.stride(0), found.stride(-2),
            segments // split, GROUP, tuple(form), length % columns == 0,
            tile.m, tile.n, columns, TYPES[x.dtype],
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    if split == 1 or (partial and out is None):
        return found
    total = fold(found, x.dtype) if tokens else x.new_empty(0, n)
    return total if out is None else out.copy_(total)


def suits(x: Tensor, weight: PackedWeight, segments: int) -> bool:
    """Whether the kernel serves, and not the dense backend with an unpacked weight."""
    whole = segments == 1 or x.shape[1] // segments % int(BLOCK) == 0
    few = x.shape[0] < UNPACK_FROM and x.dtype != torch.float32
    return few and whole and not irregular(weight)


def _supports(**traits: Any) -> str | None:
    if not traits.get("packed"):
        return "the weight is not packed"
    return gpu_trait(**traits)


@linear.backend("packed", supports=_supports)
def linear_packed(
    x: Tensor,
    weight: PackedWeight,
    segments: int = 1,
    partial: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.linear.linear. Last strides must be 1."""
    if not suits(x, weight, segments):
        dense = torch.empty(weight.shape, dtype=x.dtype, device=x.device)
        unpack_weight_triton(weight, dense)
        return linear_triton(x, dense, segments, partial, out)
    target = target_of(x.device)
    tile = tile_of(x.shape[0], segments, target.arch)
    return launch(x, weight, segments, tile, target, partial, out)
