"""What the bench.py of an op's folder is given, and what it makes: plain data.

`benchmarks(model, env, query_len)` of a bench.py yields (op, how to make one of its benchmarks). A
benchmark holds more rows than a call takes, so that calls can walk through distinct memory; all of
its rows bring the same number of tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import KVCache, KVFormat, KVQuantizer, QuantizedKV
from lockstep.kernels.recurrent.cases import Dims
from lockstep.kernels.registry import Op

WALK_BYTES = {"cuda": 128 << 20, "cpu": 8 << 20}
"""Bytes that a chain of calls walks through: on a GPU twice an H200's L2 cache."""
MOST_CALLS = {"cuda": 256, "cpu": 8}
REPEATED = 64
"""Pages of a packed cache that differ."""
EPS = 1e-6
"""Of the norms: no time depends on it."""


@dataclass(frozen=True)
class Moe:
    """A mixture of experts: how many there are, how many a token goes to, the width of each."""

    experts: int
    top_k: int
    inner: int


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: dims of the queries' latent, of the cached one, of the key that
    turns, of a head's query that does not, and of its output."""

    queries: int
    latent: int
    rope: int
    plain: int
    value: int


@dataclass(frozen=True)
class Model:
    """The dimensions of a model that its ops see. delta, mamba: None without Gated DeltaNet, or
    Mamba-2, layers; moe: None without experts, else `inner` is the shared expert's; gated: whether
    MLPs are (silu_mul), or not (relu2); latent: None without latent attention; kv_heads 0: without
    any other;
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
    moe: Moe | None = None
    latent: Latent | None = None
    mamba: Dims | None = None
    gated: bool = True

    @property
    def weights(self) -> list[tuple[str, int, int]]:
        """(name, outputs, inputs) of each matrix of a layer, and of the head."""
        inner = self.heads * self.head_dim
        qkv = inner * (1 + self.gate) + 2 * self.kv_heads * self.head_dim
        attention = [("qkv", qkv, self.hidden), ("attention out", self.hidden, inner)]
        if self.latent and not self.kv_heads:
            own = self.latent
            attention = [
                ("queries", inner, own.queries),
                ("latents", own.queries + own.latent + own.rope, self.hidden),
                ("attention out", self.hidden, self.heads * own.value),
            ]
        found = [
            *attention,
            ("gate_up" if self.gated else "up", self.inner * (1 + self.gated), self.hidden),
            ("down", self.hidden, self.inner),
            ("head", self.vocab, self.hidden),
        ]
        if self.delta:
            values = self.delta.hv * self.delta.v
            found.insert(0, ("delta out", self.hidden, values))
            into = self.delta.channels + values + 2 * self.delta.hv
            found.insert(0, ("delta in", into, self.hidden))
        if self.mamba:
            inner = self.mamba.hv * self.mamba.v
            found.insert(0, ("mamba out", self.hidden, inner))
            found.insert(0, ("mamba in", inner + self.mamba.channels + self.mamba.hv, self.hidden))
        return found


@dataclass(frozen=True)
class Cost:
    """What a call must move and multiply at least."""

    bytes: int
    flops: int = 0


@dataclass(frozen=True)
class OpBenchmark:
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
    call: Callable[[int, int, int], Callable[[], Any]]
    cost: Callable[[int], Cost]
    variants: int = 1
    seen: Callable[[int, int, Any], list[Tensor]] = lambda begin, end, out: [out]
    reset: Callable[[], None] = lambda: None


Made = tuple[Op, Callable[[], OpBenchmark]]
"""An op, and how to make a benchmark of it: one at a time, so that only one is in memory."""
Linears = Callable[[int, int, int, int], tuple[str, list[Callable[[Tensor], Tensor]]]]
"""(outputs, inputs, how many, tokens of the largest call) -> (backend, as many linear layers)."""


@dataclass(frozen=True)
class BenchEnv:
    """Where benchmarks are made, and the most rows that a call takes. linears: makes layers of
    random weights, as a model has them, since a probe picks their backend. format: of keys and
    values, or latents; None: of the dtype."""

    device: str
    dtype: torch.dtype
    most: int
    linears: Linears
    format: KVFormat | None = None

    @property
    def walk_bytes(self) -> int:
        """Bytes that a chain of calls walks through here."""
        return WALK_BYTES[self.device]

    def choose(self, op: Op, **traits: Any) -> tuple[str, Callable[..., Any]]:
        """The best backend of an op for such a layer here: its name and its function."""
        name = op.choose(device=self.device, dtype=self.dtype, **traits)
        return name, op.backends[name].run

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal numbers, the same for the same shape."""
        generator = torch.Generator(self.device).manual_seed(sum(shape))
        chosen = dtype or self.dtype
        return torch.randn(shape, dtype=chosen, device=self.device, generator=generator)

    def cache(self, quantizer: KVQuantizer | None, *shape: int) -> KVCache:
        """One side of a cache [pages, page_size, .., D] of random numbers. Where it is packed,
        REPEATED pages over and over: encoding takes long, and reading does not see it."""
        if quantizer is None:
            return self.random(*shape)
        made = quantizer.quantize(self.random(min(REPEATED, shape[0]), *shape[1:]))
        pages = self.ints(torch.arange(shape[0]) % len(made[0]), torch.int64)
        return QuantizedKV(quantizer, shape[-1], *(part[pages] for part in made))

    def ones(self, *shape: int) -> Tensor:
        """Ones in the dtype of the model."""
        return torch.ones(shape, dtype=self.dtype, device=self.device)

    def enough(self, row_bytes: int) -> int:
        """Rows that a chain can walk through: groups of `most`, `walk_bytes` or MOST_CALLS."""
        groups = -(-self.walk_bytes // (row_bytes * self.most))
        return self.most * min(max(groups, 1), MOST_CALLS[self.device])

    def ints(self, values: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
        """An index tensor on the device."""
        return values.to(self.device, dtype)


def kept_bytes(*caches: KVCache) -> int:
    """Bytes of one token in sides of a cache, over all heads."""
    tensors = [x for c in caches for x in ([c] if isinstance(c, Tensor) else c.tensors())]
    return sum(x[0, 0].nbytes for x in tensors)


def all_results(begin: int, end: int, out: Any) -> list[Tensor]:
    """What a call returns, one tensor or several."""
    return [out] if isinstance(out, Tensor) else list(out)


def cut_by_tokens(
    op: Op,
    size: str,
    query_len: int,
    backend: str,
    run: Callable[..., Any],
    given: Sequence[Tensor],
    quantized_token_bytes: int,
    seen: Callable[[int, int, Any], list[Tensor]] = all_results,
) -> OpBenchmark:
    """The benchmark of an op whose arguments `given` have a row per token."""

    def call(begin: int, end: int, turn: int) -> Callable[[], Any]:
        rows = [x[begin * query_len : end * query_len] for x in given]
        return lambda: run(*rows)

    return OpBenchmark(
        op=op.name,
        size=size,
        query_len=query_len,
        backend=backend,
        rows=given[0].shape[0] // query_len,
        call=call,
        cost=lambda rows: Cost(rows * query_len * quantized_token_bytes),
        seen=seen,
    )
