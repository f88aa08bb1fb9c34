"""lora: adds the low-rank product of each token's adapter to a linear layer's output.

LoRA (Hu et al., 2021) changes a weight W [N, K] by s B A, with A [R, K], B [N, R] and a scale s.
L adapters share one table, in which index 0 is the base model. A fused linear layer has P parts,
each with its own A: q, k and v, for example.
"""

import torch
from torch import Tensor

from lockstep.kernels.registry import op

RANK_BLOCK = 16
"""Rows of A that a GPU's kernel takes at once."""


def padded_rank(rank: int, device: str) -> int:
    """Return the rank of a table whose largest adapter has this rank: a GPU's has whole blocks."""
    return rank if device.startswith("cpu") else -(-rank // RANK_BLOCK) * RANK_BLOCK


def halving_sum(products: Tensor, dim: int) -> Tensor:
    """Add products along a dimension as a binary tree. It overwrites them.

    The second half of the entries is added to the first, until one entry is left; halves are powers
    of two. Zeros after the last entry change no bit of the sum. Other dimensions do not matter and
    every addition is rounded alone, so the bits are the same on every CPU.
    """
    while (width := products.shape[dim]) > 1:
        half = 1 << ((width - 1).bit_length() - 1)
        first = products.narrow(dim, 0, half)
        first.narrow(dim, 0, width - half).add_(products.narrow(dim, half, width - half))
        products = first
    # -0.0 becomes 0.0, as it does where a zero is appended.
    return products.squeeze(dim) + 0.0


@op(writes=("y",))
def lora(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    parts: Tensor,
    adapter_ids: Tensor,
) -> Tensor:
    """Add s B (A x) of each token's adapter to y in place, and return y.

    The base product is rounded to y's dtype before. h = A x and d = B h are sums of products in
    fp32, h is not rounded in between, and y = round(y + s d): one rounding. On a CPU both sums are
    halving_sum. A backend may add in another order, fixed by the shapes of a and b: a token's bits
    depend on its y, x and adapter alone. Adapter 0 changes no bit of y, nor does any adapter in a
    part whose scale is 0.

    Args:
        y: [T, N], contiguous.
        x: [T, K] of any dtype, its last stride 1.
        a: [L, P R, K]: R rows for each part; an adapter of a smaller rank has zeros after its rows.
        b: [L, R, N]: the transposed B of each column's part. a and b are contiguous; R is
            padded_rank.
        scales: [L, P] fp32: s of each adapter and part, 0 where it changes nothing.
        parts: [N] int32: part of each column, ascending.
        adapter_ids: [T] int32: adapter of each token.
    """
    for token, adapter in enumerate(adapter_ids.tolist()):
        hidden = halving_sum(x[token].float() * a[adapter].float(), 1)
        hidden = hidden.view(scales.shape[1], -1).t()[:, parts]
        delta = halving_sum(hidden * b[adapter].float(), 0)
        scale = scales[adapter][parts]
        changed = y[token].float() + scale * delta
        y[token] = torch.where(scale != 0, changed.to(y.dtype), y[token])
    return y
