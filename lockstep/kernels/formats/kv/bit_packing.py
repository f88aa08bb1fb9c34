"""Packing of 3- and 4-bit codes into 32-bit words, in an order that kernels unpack cheaply.

The octets of a head, 8 consecutive codes each, are stored in the order 0, L, 2 L, 3 L, 1, L + 1, ..
with L = D / 32 (16 codes: in order). A lane that loads the codes of 32 values then
writes octets that are far apart, next to those of its neighbours, and no two lanes write the same
bank of shared memory.

4 bits, 8 codes per word: bits 4 j .. 4 j + 2 hold the lower three bits of code j; bit 8 j + 7 - 4 h
is the upper bit, the sign, of code 4 h + j.
3 bits, 32 codes per three words: bits 4 j .. 4 j + 2 of word w are code 8 w + j; bit 4 j + 3 is bit
w of code 24 + j. 16 codes take the first two words. Words are stored by w: word 0 of every 32
codes, then word 1 of every 32 codes, then word 2.

One mask then gives eight 3-bit selectors, four bits apart, as the PTX instruction prmt takes them,
and the signs of four codes are 8 bits apart, as in a word of four upper bytes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def num_words(count: int, bits: int) -> int:
    """Return the words that `count` codes take. count: a multiple of 32, or 16."""
    return 2 if count == 16 else count * bits // 32


def num_codes(words: int, bits: int) -> int:
    """Return the codes that `words` words hold."""
    return 16 if words == 2 else words * 32 // bits


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., N] of 0 .. 2^bits - 1 into int32 [..., num_words(N, bits)]."""
    count = codes.shape[-1]
    codes = _transpose_octets(codes, 4)
    shifts = 4 * torch.arange(8, device=codes.device)
    if bits == 4:
        codes = codes.long().unflatten(-1, (-1, 8))
        signs = (codes >> 3) << _sign_shifts(codes.device)
        return ((codes & 7) << shifts).add_(signs).sum(-1).to(torch.int32)
    codes = F.pad(codes.long(), (0, -count % 32)).unflatten(-1, (-1, 4, 8))
    # The fourth octet has no words: bit w of its codes fills the spare bits of word w.
    fourth = codes[..., 3:, :] >> torch.arange(3, device=codes.device)[:, None] & 1
    words = (codes[..., :3, :] << shifts) + (fourth << shifts + 3)
    words = words.sum(-1).transpose(-1, -2).flatten(-2).to(torch.int32)
    return words[..., : num_words(count, bits)]


def unpack_bits(words: Tensor, bits: int) -> Tensor:
    """Invert pack_bits -> int64 [..., num_codes(words, bits)]."""
    count = num_codes(words.shape[-1], bits)
    shifts = 4 * torch.arange(8, device=words.device)
    if bits == 4:
        wide = words.long()[..., None]
        signs = wide >> _sign_shifts(words.device) & 1
        return _transpose_octets(((wide >> shifts & 7) + (signs << 3)).flatten(-2), count // 32)
    wide = F.pad(words.long(), (0, -words.shape[-1] % 3)).unflatten(-1, (3, -1))
    wide = wide.transpose(-1, -2)[..., None]
    fourth = (wide >> shifts + 3 & 1) << torch.arange(3, device=words.device)[:, None]
    codes = torch.cat([wide >> shifts & 7, fourth.sum(-2, keepdim=True)], -2)
    return _transpose_octets(codes.flatten(-3)[..., :count], count // 32)


def _transpose_octets(codes: Tensor, rows: int) -> Tensor:
    """Transpose octets of codes [..., N], a matrix [rows, N / 8 / rows] stored by rows."""
    if codes.shape[-1] < 32:
        return codes
    return codes.unflatten(-1, (rows, -1, 8)).transpose(-3, -2).flatten(-3)


def _sign_shifts(device: torch.device) -> Tensor:
    """Return the bit that contains the sign of each of a word's eight 4-bit codes."""
    code = torch.arange(8, device=device)
    return 8 * (code % 4) + 7 - 4 * (code // 4)
