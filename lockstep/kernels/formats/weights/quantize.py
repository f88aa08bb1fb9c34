"""Quantization on the fly: round to nearest, ties to even, without calibration."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.formats.weights.fp8 import Fp8Weight
from lockstep.kernels.formats.weights.integer import IntWeight

MAX_E4M3 = 448.0
"""Largest finite value of e4m3fn."""


def quantize_int(weight: Tensor, bits: int = 4, group: int = 128) -> IntWeight:
    """Quantize a float weight [N, K] to symmetric integers with scales of its dtype.

    group: columns per scale, -1 for all of K (int8 per channel is bits 8, group -1). The largest
    magnitude of a group becomes the code 2^(bits - 1) - 1; codes are computed from the rounded
    scale.
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
    """Quantize a float weight [N, K] to e4m3fn with an fp32 scale per output."""
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True) / MAX_E4M3
    codes = (wide / _divisors(scales)).clamp(-MAX_E4M3, MAX_E4M3)
    return Fp8Weight.of(codes.to(torch.float8_e4m3fn), scales, 1, weight.shape[1])


def _divisors(scales: Tensor) -> Tensor:
    """Return the scales in fp32, with 1 in place of 0 (a group of zeros)."""
    wide = scales.float()
    return wide.where(wide > 0, 1.0)
