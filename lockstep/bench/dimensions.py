"""Real models' dimensions, and what an op needs to be measured at them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.bench.floor import Part
from lockstep.kernels.gated_delta_rule.cases import Dims
from lockstep.layers.build import Build

ROTATE = {"cuda": 128 << 20, "cpu": 8 << 20}
"""Bytes that a chain of calls walks through: on a GPU twice an H200's L2 cache."""
MOST_CALLS = {"cuda": 256, "cpu": 8}


@dataclass(frozen=True)
class Model:
    """The dimensions of a model that its ops see. delta: None without Gated DeltaNet layers;
    gate: attention has an output gate as wide as q; context: tokens of a row in the cache;
    prompt: tokens of a row's prompt chunk."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gate: bool = False
    delta: Dims | None = None
    context: int = 4096
    prompt: int = 512

    @property
    def weights(self) -> list[tuple[str, int, int]]:
        """(name, outputs, inputs) of each matrix of a layer, and of the head."""
        inner = self.heads * self.head_dim
        qkv = inner * (1 + self.gate) + 2 * self.kv_heads * self.head_dim
        found = [
            ("qkv", qkv, self.hidden),
            ("attention out", self.hidden, inner),
            ("gate_up", 2 * self.inner, self.hidden),
            ("down", self.hidden, self.inner),
            ("head", self.vocab, self.hidden),
        ]
        if self.delta:
            values = self.delta.hv * self.delta.v
            found.insert(0, ("delta out", self.hidden, values))
            into = self.delta.channels + values + 2 * self.delta.hv
            found.insert(0, ("delta in", into, self.hidden))
        return found


MODELS = {
    model.name: model
    for model in (
        Model("Qwen3-8B", 4096, 12288, 32, 8, 128, 151936),
        Model("Qwen3.6-27B", 5120, 17408, 24, 4, 256, 248320, True, Dims(16, 48, 128, 128)),
        Model("small", 256, 512, 4, 2, 64, 4096, True, Dims(2, 4, 32, 32), 300, 100),
    )
}


@dataclass(frozen=True)
class Subject:
    """An op at one size.

    rows: how many there are. call(begin, end, turn) binds the op to these rows; turn picks among
    distinct weights, `variants` of them. cost(rows): what a call must move and multiply.
    seen(begin, end, out): what a call leaves, each part [rows * anything, ...]. reset() brings back
    the state that calls change.
    """

    op: str
    size: str
    query_len: int
    backend: str
    rows: int
    call: Callable[[int, int, int], Callable[[], Tensor]]
    cost: Callable[[int], Part]
    variants: int = 1
    seen: Callable[[int, int, Tensor], list[Tensor]] = lambda begin, end, out: [out]
    reset: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Setting:
    """Where subjects are built, and the most rows that a call takes."""

    device: str
    dtype: torch.dtype
    most: int

    @property
    def rotate(self) -> int:
        """Bytes that a chain of calls walks through here."""
        return ROTATE[self.device]

    def build(self, window: int = 1) -> Build:
        """What a layer of this setting is built with."""
        return Build(self.device, self.dtype, window, 1)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal numbers, the same for the same shape."""
        generator = torch.Generator(self.device).manual_seed(sum(shape))
        chosen = dtype or self.dtype
        return torch.randn(shape, dtype=chosen, device=self.device, generator=generator)

    def enough(self, row_bytes: int) -> int:
        """Rows that a chain can walk through: groups of `most`, `rotate` bytes or MOST_CALLS."""
        groups = -(-self.rotate // (row_bytes * self.most))
        return self.most * min(max(groups, 1), MOST_CALLS[self.device])

    def ints(self, values: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
        """An index tensor on the device."""
        return values.to(self.device, dtype)
