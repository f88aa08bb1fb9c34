"""In which order packed weights keep their codes: words of 32 bits along K, made for matrix units.

A lane of a tensor core's left operand (mma.sync m16n8k16 and wgmma k16 alike) holds of each row, in
every 16 columns, those at 2q, 2q + 1, 2q + 8 and 2q + 9, q being the lane modulo 4. A word holds
what one lane needs: of two groups of 16 columns with 4 bits, of one with 8. The words of a lane in
BLOCK columns stand side by side, 16 bytes with 4 bits, 32 with 8. So a lane's codes are its own
words, in one or two loads.

    column  k = 128 B + span w' + 16 h + 8 e + 2 q + j        span: 32 columns (4 bits), 16 (8 bits)
    word    W = BLOCK words * B + (words / 4) * q + w'        of its row
    bit     16 j + bits * (2 h + e)                           h: 0 or 1 with 4 bits, 0 with 8

Halves of a word hold neighbouring columns, so that one mask takes two codes out of it. K is filled
up to a multiple of BLOCK with codes of 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Columns that are ordered among themselves. A weight is cut along K at multiples of it only."""


def words_per_row(k: int, bits: int) -> int:
    """int32 words that k codes take."""
    return -(-k // BLOCK) * BLOCK * bits // 32


def _sizes(bits: int) -> tuple[int, int, int, int, int]:
    """Of a block's columns in their own order: (w', h, e, q, j), slowest first."""
    if bits not in (4, 8):
        raise ValueError(f"weights of {bits} bits have no order; 4 and 8 have one")
    halves = 8 // bits
    return BLOCK // (16 * halves), halves, 2, 4, 2


def _shifts(bits: int, device: torch.device) -> Tensor:
    """The first bit of each code of a word: [h, e, j]."""
    halves = 8 // bits
    pairs = torch.arange(2 * halves, device=device).view(halves, 2, 1)
    return 16 * torch.arange(2, device=device) + bits * pairs


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """codes [N, K] uint8, each below 2^bits -> words [N, words_per_row(K, bits)] int32."""
    n, k = codes.shape
    padded = F.pad(codes, (0, -k % BLOCK))
    parts = padded.view(n, -1, *_sizes(bits)).permute(0, 1, 5, 2, 3, 4, 6)
    words = parts.int() << _shifts(bits, codes.device).int()
    return words.sum((-3, -2, -1), dtype=torch.int32).view(n, -1)


def unpack_codes(words: Tensor, bits: int, k: int) -> Tensor:
    """words [N, W] int32 -> their codes [N, k] uint8: what `pack` was given."""
    n = words.shape[0]
    spans, halves, pairs, lanes, two = _sizes(bits)
    parts = words.reshape(n, -1, lanes, spans, 1, 1, 1) >> _shifts(bits, words.device)
    codes = (parts & (2**bits - 1)).to(torch.uint8)
    return codes.permute(0, 1, 3, 4, 5, 2, 6).reshape(n, -1)[:, :k]


def _plane_shifts(bits: int, device: torch.device) -> Tensor:
    """Return the first bit of each code in a word of a plane: [c, h, e, j]."""
    pairs = torch.arange(4, device=device).view(2, 2, 1)
    runs = 4 * torch.arange(4 // bits, device=device).view(-1, 1, 1, 1)
    return 16 * torch.arange(2, device=device) + bits * (runs + pairs)


def pack_plane(codes: Tensor, bits: int) -> Tensor:
    """Pack one bit plane of codes: their lowest four bits, or one or two bits of them.

    A word has the columns of 4 / bits words of four bits; each of those has 4 * bits bits in either
    half. Neighbouring columns lie 16 bits apart, as in the order of `pack`, which this is with four
    bits.

        column  k = 128 B + 32 w' + 16 h + 8 e + 2 q + j        w' = (4 / bits) v + c
        word    W = 4 bits * B + bits * q + v                   of its row
        bit     16 j + 4 bits * c + bits * (2 h + e)

    Args:
        codes: [N, K] uint8, each below 2^bits.
        bits: 1, 2 or 4.

    Returns: [N, words_per_row(K, bits)] int32.
    """
    n, k = codes.shape
    padded = F.pad(codes, (0, -k % BLOCK))
    parts = padded.view(n, -1, bits, 4 // bits, 2, 2, 4, 2).permute(0, 1, 6, 2, 3, 4, 5, 7)
    words = parts.int() << _plane_shifts(bits, codes.device).int()
    return words.sum((-4, -3, -2, -1), dtype=torch.int32).view(n, -1)


def unpack_plane(words: Tensor, bits: int, k: int) -> Tensor:
    """Return the codes [N, k] uint8 that pack_plane was given."""
    n = words.shape[0]
    parts = words.reshape(n, -1, 4, bits, 1, 1, 1, 1) >> _plane_shifts(bits, words.device)
    codes = (parts & (2**bits - 1)).to(torch.uint8)
    return codes.permute(0, 1, 3, 4, 5, 6, 2, 7).reshape(n, -1)[:, :k]
