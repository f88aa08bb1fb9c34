"""Codes of 3 and 4 bits in words of 32, in an order that a kernel unpacks by few instructions.

A head's octets, 8 numbers side by side, are stored in the order 0, L, 2 L, 3 L, 1, L + 1, .. with
L = D / 32 (16 numbers: in their own). So a lane that loads the codes of 32 numbers writes octets
that are far apart, beside those of its neighbours: no two meet in a bank of shared memory.

4 bits, 8 codes in a word: bits 4 j .. 4 j + 2 hold the lower three of code j; the upper one, a
sign, of code 4 h + j stands in bit 8 j + 7 - 4 h.
3 bits, 32 codes in three words: bits 4 j .. 4 j + 2 of word w hold code 8 w + j; bit 4 j + 3 holds
bit w of code 24 + j. 16 codes are the first two words. First come all words 0, then all words 1.

So a word and a mask gives eight selectors of three bits, four bits apart, as prmt takes them; and
the signs of four codes stand 8 bits apart, as in a word of four upper bytes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_words(count: int, bits: int) -> int:
    """Words that `count` codes take: multiples of 32, or 16."""
    return 2 if count == 16 else count * bits // 32


def codes_in(words: int, bits: int) -> int:
    """How many codes so many words hold."""
    return 16 if words == 2 else words * 32 // bits


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """codes [..., N], 0 .. 2^bits - 1 -> int32 [..., packed_words(N, bits)]."""
    count = codes.shape[-1]
    codes = _turned(codes, 4)
    place = 4 * torch.arange(8, device=codes.device)
    if bits == 4:
        codes = codes.long().unflatten(-1, (-1, 8))
        signs = (codes >> 3) << _sign_places(codes.device)
        return ((codes & 7) << place).add_(signs).sum(-1).to(torch.int32)
    codes = F.pad(codes.long(), (0, -count % 32)).unflatten(-1, (-1, 4, 8))
    fourth = codes[..., 3:, :] >> torch.arange(3, device=codes.device)[:, None] & 1
    words = (codes[..., :3, :] << place) + (fourth << place + 3)
    words = words.sum(-1).transpose(-1, -2).flatten(-2).to(torch.int32)
    return words[..., : packed_words(count, bits)]


def unpack_bits(words: Tensor, bits: int) -> Tensor:
    """The inverse of pack_bits -> int64 [..., codes_in(words, bits)]."""
    count = codes_in(words.shape[-1], bits)
    place = 4 * torch.arange(8, device=words.device)
    if bits == 4:
        wide = words.long()[..., None]
        signs = wide >> _sign_places(words.device) & 1
        return _turned(((wide >> place & 7) + (signs << 3)).flatten(-2), count // 32)
    wide = F.pad(words.long(), (0, -words.shape[-1] % 3)).unflatten(-1, (3, -1))
    wide = wide.transpose(-1, -2)[..., None]
    fourth = (wide >> place + 3 & 1) << torch.arange(3, device=words.device)[:, None]
    codes = torch.cat([wide >> place & 7, fourth.sum(-2, keepdim=True)], -2)
    return _turned(codes.flatten(-3)[..., :count], count // 32)


def _turned(codes: Tensor, rows: int) -> Tensor:
    """Octets [rows, others], stored row by row -> column by column."""
    if codes.shape[-1] < 32:
        return codes
    return codes.unflatten(-1, (rows, -1, 8)).transpose(-3, -2).flatten(-3)


def _sign_places(device: torch.device) -> Tensor:
    """The bit of a word in which the sign of each of its eight codes stands."""
    code = torch.arange(8, device=device)
    return 8 * (code % 4) + 7 - 4 * (code // 4)
