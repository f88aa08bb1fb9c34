"""Codes of 3 and 4 bits in bytes: value j of a head from bit b j on, lowest first."""

import torch
from torch import Tensor


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `count` codes take."""
    return -(-count * bits // 8)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """codes [..., N], 0 .. 2^bits - 1 -> uint8 [..., packed_bytes(N, bits)]."""
    shifts = torch.arange(bits, device=codes.device)
    stream = (codes.int()[..., None] >> shifts & 1).flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (stream << torch.arange(8, device=codes.device)).sum(-1).to(torch.uint8)


def unpack_bits(data: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of pack_bits -> int64 [..., count]."""
    stream = (data.int()[..., None] >> torch.arange(8, device=data.device) & 1).flatten(-2)
    codes = stream[..., : count * bits].unflatten(-1, (count, bits))
    return (codes << torch.arange(bits, device=data.device)).sum(-1)
