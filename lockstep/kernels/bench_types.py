"""Types shared by the kernel benchmarks (bench.py of each op's folder).

`benchmarks(model, env, query_len)` of a bench.py yields an op and a factory of one benchmark. A
benchmark has more rows than one call takes, so that successive calls read distinct memory and miss
the L2 cache. All of its rows have the same query length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import KVCache, KVFormat, KVQuantizer, QuantizedKV
from lockstep.kernels.recurrent.cases import Dims
from lockstep.kernels.registry import Op

CHAIN_BYTES = {"cuda": 128 << 20, "cpu": 8 << 20}
"""Bytes that a chain of calls reads, by device type: on a GPU twice an H200's L2 cache."""
MAX_CALLS = {"cuda": 256, "cpu": 8}
"""Maximum calls of a chain, by device type."""
DISTINCT_PAGES = 64
"""Distinct pages of a quantized KV cache; the other pages repeat them."""
EPS = 1e-6
"""Epsilon of the norms. No time depends on it."""


@dataclass(frozen=True)
class MoeShape:
    """Shape of a mixture of experts. inner: the intermediate size of one expert."""

    experts: int
    top_k: int
    inner: int


@dataclass(frozen=True)
class LatentShape:
    """Dimensions of multi-head latent attention (MLA).

    queries: rank of the query latent (q_lora_rank). latent: rank of the cached latent
    (kv_lora_rank). rope, nope: dims of a head with and without rotary embedding. value: dims
    of a head's output.
    """

    queries: int
    latent: int
    rope: int
    nope: int
    value: int


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a model, as its ops see them.

    inner: intermediate size of the MLP, or of the shared expert if moe is not None. kv_heads: 0
    without paged attention. gate: attention has an output gate as wide as q. delta, mamba: Gated
    DeltaNet and Mamba-2 layers, None without them. context: tokens per row in the KV cache. prompt:
    tokens per row of a prompt chunk. latent: MLA, None without it. gated: MLPs use silu_mul, else
    relu2.
    """

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
    moe: MoeShape | None = None
    latent: LatentShape | None = None
    mamba: Dims | None = None
    gated: bool = True

    @property
    def weights(self) -> list[tuple[str, int, int]]:
        """Weight matrices of one layer and of the LM head: (name, outputs, inputs)."""
        inner = self.heads * self.head_dim
        qkv = inner * (1 + self.gate) + 2 * self.kv_heads * self.head_dim
        attention = [("qkv", qkv, self.hidden), ("attention out", self.hidden, inner)]
        if self.latent and not self.kv_heads:
            mla = self.latent
            attention = [
                ("queries", inner, mla.queries),
                ("latents", mla.queries + mla.latent + mla.rope, self.hidden),
                ("attention out", self.hidden, self.heads * mla.value),
            ]
        matrices = [
            *attention,
            ("gate_up" if self.gated else "up", self.inner * (1 + self.gated), self.hidden),
            ("down", self.hidden, self.inner),
            ("head", self.vocab, self.hidden),
        ]
        if self.delta:
            values = self.delta.hv * self.delta.v
            matrices.insert(0, ("delta out", self.hidden, values))
            projections = self.delta.channels + values + 2 * self.delta.hv
            matrices.insert(0, ("delta in", projections, self.hidden))
        if self.mamba:
            inner = self.mamba.hv * self.mamba.v
            matrices.insert(0, ("mamba out", self.hidden, inner))
            matrices.insert(
                0, ("mamba in", inner + self.mamba.channels + self.mamba.hv, self.hidden)
            )
        return matrices


@dataclass(frozen=True)
class Cost:
    """Lower bound of a call: bytes moved and floating-point operations."""

    bytes: int
    flops: int = 0


@dataclass(frozen=True)
class OpBenchmark:
    """Benchmark of an op at one size.

    rows: number of rows in memory. call(begin, end, variant) binds the op to rows begin..end-1;
    `variant` selects one of `variants` distinct weights. cost(rows): lower bound of a call.
    outputs(begin, end, out): tensors that a call returned or wrote, each [rows * n, ...]. reset()
    restores state that calls change.
    """

    op: str
    size: str
    query_len: int
    backend: str
    rows: int
    call: Callable[[int, int, int], Callable[[], Any]]
    cost: Callable[[int], Cost]
    variants: int = 1
    outputs: Callable[[int, int, Any], list[Tensor]] = lambda begin, end, out: [out]
    reset: Callable[[], None] = lambda: None


LazyBenchmark = tuple[Op, Callable[[], OpBenchmark]]
"""An op and a factory of one benchmark of it. Benchmarks are built one at a time to save memory."""
LinearFactory = Callable[[int, int, int, int], tuple[str, list[Callable[[Tensor], Tensor]]]]
"""(outputs, inputs, number of layers, max tokens of a call) -> (backend, linear layers)."""


@dataclass(frozen=True)
class BenchEnv:
    """Environment of a benchmark.

    max_rows: maximum rows of one call. linears: builds linear layers of random weights the way a
    model does, because a probe selects their backend. format: KV-cache format; None stores the
    model's dtype.
    """

    device: str
    dtype: torch.dtype
    max_rows: int
    linears: LinearFactory
    format: KVFormat | None = None

    @property
    def chain_bytes(self) -> int:
        """Bytes that a chain of calls reads on this device."""
        return CHAIN_BYTES[self.device]

    def choose(self, op: Op, **traits: Any) -> tuple[str, Callable[..., Any]]:
        """Return the name and the function of the best backend of an op for these traits."""
        name = op.choose(device=self.device, dtype=self.dtype, **traits)
        return name, op.backends[name].run

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return standard normal numbers, equal for equal shapes."""
        generator = torch.Generator(self.device).manual_seed(sum(shape))
        dtype = dtype or self.dtype
        return torch.randn(shape, dtype=dtype, device=self.device, generator=generator)

    def cache(self, quantizer: KVQuantizer | None, *shape: int) -> KVCache:
        """Return random keys or values [pages, page_size, ..., D] in the cache's storage.

        A quantized cache repeats DISTINCT_PAGES pages, because quantizing takes long.
        """
        if quantizer is None:
            return self.random(*shape)
        parts = quantizer.quantize(self.random(min(DISTINCT_PAGES, shape[0]), *shape[1:]))
        pages = self.ints(torch.arange(shape[0]) % len(parts[0]), torch.int64)
        return QuantizedKV(quantizer, shape[-1], *(part[pages] for part in parts))

    def ones(self, *shape: int) -> Tensor:
        """Return a tensor of ones in the model's dtype."""
        return torch.ones(shape, dtype=self.dtype, device=self.device)

    def rows_per_chain(self, row_bytes: int) -> int:
        """Return the rows of a chain: calls of max_rows, up to chain_bytes or MAX_CALLS."""
        groups = -(-self.chain_bytes // (row_bytes * self.max_rows))
        return self.max_rows * min(max(groups, 1), MAX_CALLS[self.device])

    def ints(self, values: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return an index tensor on the device."""
        return values.to(self.device, dtype)


def cache_bytes_per_token(*caches: KVCache) -> int:
    """Return the bytes per token of KV caches, over all heads."""
    tensors = [x for c in caches for x in ([c] if isinstance(c, Tensor) else c.tensors())]
    return sum(x[0, 0].nbytes for x in tensors)


def flatten_results(begin: int, end: int, out: Any) -> list[Tensor]:
    """Return a call's result as a list of tensors."""
    return [out] if isinstance(out, Tensor) else list(out)


def benchmark_per_token(
    op: Op,
    size: str,
    query_len: int,
    backend: str,
    run: Callable[..., Any],
    arguments: Sequence[Tensor],
    token_bytes: int,
    outputs: Callable[[int, int, Any], list[Tensor]] = flatten_results,
) -> OpBenchmark:
    """Build the benchmark of an op whose `arguments` have one row per token.

    token_bytes: bytes that a call moves per token.
    """

    def call(begin: int, end: int, variant: int) -> Callable[[], Any]:
        rows = [x[begin * query_len : end * query_len] for x in arguments]
        return lambda: run(*rows)

    return OpBenchmark(
        op=op.name,
        size=size,
        query_len=query_len,
        backend=backend,
        rows=arguments[0].shape[0] // query_len,
        call=call,
        cost=lambda rows: Cost(rows * query_len * token_bytes),
        outputs=outputs,
    )
