"""Interleaved order of a quantized weight's codes in 32-bit words, along K, for tensor cores.

A lane of the left operand of mma.sync m16n8k16 (and of wgmma k16) has, of each row and each group
of 16 columns, columns 2q, 2q + 1, 2q + 8 and 2q + 9, with q the lane modulo 4. A word contains the
codes of one lane: of two groups of 16 columns with 4-bit codes, of one with 8-bit codes. The words
of a lane in K_BLOCK columns are adjacent, 16 bytes with 4 bits and 32 with 8, so one or two vector
loads bring them and no value has to be shuffled between lanes.

    column  k = 128 B + span w' + 16 h + 8 e + 2 q + j        span: 32 columns (4 bits), 16 (8 bits)
    word    W = (words per block) * B + (words per block / 4) * q + w'        of its row
    bit     16 j + bits * (2 h + e)                           h: 0 or 1 with 4 bits, 0 with 8

The halves of a word are neighbouring columns, so that one AND extracts two codes. K is padded with
codes of 0 to a multiple of K_BLOCK.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

K_BLOCK = 128
"""Columns that are interleaved. A weight is cut along K at multiples of it only."""


def words_per_row(k: int, bits: int) -> int:
    """Return the number of int32 words that k codes take."""
    return -(-k // K_BLOCK) * K_BLOCK * bits // 32


def _block_dims(bits: int) -> tuple[int, int, int, int, int]:
    """Return the sizes of a block's columns as dimensions (w', h, e, q, j), slowest first."""
    if bits not in (4, 8):
        raise ValueError(f"codes of {bits} bits have no word order, only those of 4 and 8 bits")
    halves = 8 // bits
    return K_BLOCK // (16 * halves), halves, 2, 4, 2


def _shifts(bits: int, device: torch.device) -> Tensor:
    """Return the first bit of each code of a word: [h, e, j]."""
    halves = 8 // bits
    pairs = torch.arange(2 * halves, device=device).view(halves, 2, 1)
    return 16 * torch.arange(2, device=device) + bits * pairs


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [N, K] uint8, each below 2^bits, into words [N, words_per_row(K, bits)] int32."""
    _block_dims(bits)  # refuses other numbers of bits
    return _pack(codes, bits)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into words. pack_codes and pack_plane use the same order."""
    padded = F.pad(codes, (0, -codes.shape[1] % K_BLOCK)).contiguous()
    # Neighbouring columns are two bytes of a 16-bit number, and 16 bits apart in a word.
    pairs = padded.view(torch.int16).unflatten(1, (-1, bits, 16 // bits, 4)).int()
    pairs = (pairs & 0xFF) | (pairs & 0xFF00) << 8
    words = pairs[..., 0, :]
    for index in range(1, 16 // bits):
        words = words | pairs[..., index, :] << bits * index
    return words.transpose(2, 3).flatten(1)


def unpack_codes(words: Tensor, bits: int, k: int) -> Tensor:
    """Return the codes [N, k] uint8 of words [N, W] int32: the inverse of pack_codes."""
    spans, halves, pairs, lanes, two = _block_dims(bits)
    parts = words.unflatten(1, (-1, lanes, spans, 1, 1, 1)) >> _shifts(bits, words.device)
    codes = (parts & (2**bits - 1)).to(torch.uint8)
    return codes.permute(0, 1, 3, 4, 5, 2, 6).flatten(1)[:, :k]


def _plane_shifts(bits: int, device: torch.device) -> Tensor:
    """Return the first bit of each code in a word of a bit plane: [c, h, e, j]."""
    pairs = torch.arange(4, device=device).view(2, 2, 1)
    parts = 4 * torch.arange(4 // bits, device=device).view(-1, 1, 1, 1)
    return 16 * torch.arange(2, device=device) + bits * (parts + pairs)


def pack_plane(codes: Tensor, bits: int) -> Tensor:
    """Pack one bit plane of codes: their lowest four bits, or one or two bits of them.

    A word of the plane covers the columns of 4 / bits words of 4-bit codes; each of those has 4 *
    bits bits in either half. Neighbouring columns are 16 bits apart, as in pack_codes, which this
    equals with four bits.

        column  k = 128 B + 32 w' + 16 h + 8 e + 2 q + j        w' = (4 / bits) v + c
        word    W = 4 bits * B + bits * q + v                   of its row
        bit     16 j + 4 bits * c + bits * (2 h + e)

    Args:
        codes: [N, K] uint8, each below 2^bits.
        bits: 1, 2 or 4.

    Returns: [N, words_per_row(K, bits)] int32.
    """
    return _pack(codes, bits)


def unpack_plane(words: Tensor, bits: int, k: int) -> Tensor:
    """Return the codes [N, k] uint8 of a bit plane: the inverse of pack_plane."""
    n = words.shape[0]
    parts = words.reshape(n, -1, 4, bits, 1, 1, 1, 1) >> _plane_shifts(bits, words.device)
    codes = (parts & (2**bits - 1)).to(torch.uint8)
    return codes.permute(0, 1, 3, 4, 5, 6, 2, 7).reshape(n, -1)[:, :k]
