"""Weights packed on the fly: round to nearest, ties to even, no calibration."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.formats.weights.weights import Fp8Weight, IntWeight

FP8_LARGEST = 448.0
"""Of e4m3fn."""


def quantize_int(weight: Tensor, bits: int = 4, group: int = 128) -> IntWeight:
    """weight [N, K] of a float dtype -> symmetric integers, with scales of that dtype.

    group: columns that share a scale, -1 for all: int8 per channel is bits 8, group -1. A group's
    largest magnitude is 2^(bits - 1) - 1 steps, and codes are made with the rounded scale.
    """
    n, k = weight.shape
    group = k if group == -1 else group
    padded = F.pad(weight.float(), (0, -k % group)).view(n, -1, group)
    middle = 2 ** (bits - 1)
    scales = (padded.abs().amax(-1) / (middle - 1)).to(weight.dtype)
    steps = (padded / _divisors(scales)[..., None]).round()
    codes = (steps.clamp(-middle, middle - 1) + middle).to(torch.uint8)
    return IntWeight.of(codes.view(n, -1)[:, :k], scales, group=group, bits=bits)


def quantize_fp8(weight: Tensor) -> Fp8Weight:
    """weight [N, K] of a float dtype -> e4m3fn with an fp32 scale per output."""
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True) / FP8_LARGEST
    codes = (wide / _divisors(scales)).clamp(-FP8_LARGEST, FP8_LARGEST)
    return Fp8Weight.of(codes.to(torch.float8_e4m3fn), scales, 1, weight.shape[1])


def _divisors(scales: Tensor) -> Tensor:
    """The scales in fp32, subnormal ones too, with 1 for those of nothing but zeros."""
    wide = scales.float()
    return wide.where(wide > 0, 1.0)
