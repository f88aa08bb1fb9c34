"""Functions and small modules that all families share: norms, linear maps, rotary positions,
losses.

Everything per token runs on [N, ...] tensors, N = B * T, so that each compiled function sees one
shape whatever the length of the rows.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64
"""Tokens in a chunk of a recurrent mixer. Rows consist of whole chunks."""


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """Return the RMS norm over the last dim. weight: the full factor."""
    y = x.float()
    y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6)
    return (y * weight.float()).to(x.dtype)


def centered_rms(x: Tensor, weight: Tensor) -> Tensor:
    """Return the RMS norm with a weight that is stored as its difference from 1."""
    return rms(x, 1 + weight)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T in x's dtype."""
    return F.linear(x, weight.to(x.dtype))


def matrix(k: int, n: int) -> nn.Linear:
    """Return a linear layer without bias."""
    return nn.Linear(k, n, bias=False)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply NeoX rotary positions to the first R dims.

    x [N, H, D], cos and sin [N, R / 2].
    """
    half = cos.shape[-1]
    cos = cos[:, None]
    sin = sin[:, None]
    a = x[..., :half].float()
    b = x[..., half : 2 * half].float()
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
    return torch.cat([rotated, x[..., 2 * half :]], -1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply interleaved rotary positions: each pair of adjacent dims is rotated.

    x [N, H, R], cos and sin [N, R / 2].
    """
    pairs = x.float().unflatten(-1, (-1, 2))
    cos = cos[:, None]
    sin = sin[:, None]
    a = pairs[..., 0]
    b = pairs[..., 1]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)


def convolve(raw: Tensor, taps: Tensor, positions: Tensor) -> Tensor:
    """Return the causal convolution [N, C] within rows.

    raw [N, C], taps [C, 1, 4], positions [N].
    """
    count = raw.shape[0]
    factors = taps[:, 0].to(raw.dtype)
    mixed = raw * factors[:, 3]
    for j in (1, 2, 3):
        past = F.pad(raw, (0, 0, j, 0))[:count]
        mixed = mixed + torch.where(positions[:, None] >= j, past, 0.0) * factors[:, 3 - j]
    return mixed


def to_chunks(x: Tensor, width: int) -> Tensor:
    """Return x [N, H * width] by chunks [N / 64, H, 64, width]."""
    return x.view(x.shape[0] // CHUNK, CHUNK, -1, width).transpose(1, 2)


def decay_matrix(g: Tensor) -> Tensor:
    """Return the decay from position j to position i of a chunk, 0 for j > i.

    g [..., 64]: cumulative log decays within the chunk -> [..., 64, 64].
    """
    causal = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).tril()
    return torch.exp((g[..., :, None] - g[..., None, :]).masked_fill(~causal, -torch.inf))


def cross_entropy(hidden: Tensor, head: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean loss. hidden [N, hidden], ids [N], weights [N]."""
    losses = F.cross_entropy(linear(hidden, head).float(), ids, reduction="none")
    return (losses * weights).sum() / weights.sum()


class Fused:
    """Caller of functions that compiles them while `on`."""

    def __init__(self) -> None:
        self.on = False
        self._compiled: dict[str, Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if not self.on:
            return function(*arguments)
        name = function.__name__
        if name not in self._compiled:
            self._compiled[name] = torch.compile(function, dynamic=False)
        return self._compiled[name](*arguments)


class Positions:
    """Positions of rows [B, T], flattened, with rotary tables for `width` dims."""

    def __init__(
        self, rows: int, length: int, width: int, theta: float, device: torch.device
    ) -> None:
        steps = torch.arange(0, width, 2, device=device, dtype=torch.float32)
        self.rows = rows
        self.length = length
        self.flat = torch.arange(length, device=device).repeat(rows)
        angle = self.flat[:, None] * theta ** (-steps / max(width, 1))
        self.cos = angle.cos()
        self.sin = angle.sin()

    def by_rows(self, *heads: Tensor) -> list[Tensor]:
        """Return each [N, H, D] as [B, H, T, D]."""
        return [x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in heads]


class Norm(nn.Module):
    """Weight of a norm."""

    def __init__(self, width: int, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), start))


def attend(positions: Positions, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention within rows. q [N, H, D], k, v [N, KV, D] -> [N, H, D]."""
    o = F.scaled_dot_product_attention(*positions.by_rows(q, k, v), is_causal=True, enable_gqa=True)
    return o.transpose(1, 2).flatten(0, 1)
