"""Benchmarks of quantized weights: linear at each matrix of a model in each format, on a GPU; and
dequantization of the largest matrix.

lockstep bench kernels --model Qwen3.6-27B --op linear
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lockstep.kernels.bench_types import BenchEnv, Cost, LazyBenchmark, ModelShape, OpBenchmark
from lockstep.kernels.formats.weights import (
    Fp4Weight,
    Fp8Weight,
    GgufWeight,
    IntWeight,
    QuantizedWeight,
    dequantize_weight,
)
from lockstep.kernels.linear import choose_split_k, linear

MAX_WEIGHTS = 64
"""Maximum distinct weights that a measurement walks through."""
Empty = Callable[[int, int, str], QuantizedWeight]
LAYOUTS: dict[str, Empty] = {
    "int4": lambda n, k, device: IntWeight.empty(n, k, device=device),
    "int4 asymmetric, fp16 scales": lambda n, k, device: IntWeight.empty(
        n, k, scale_dtype=torch.float16, zeros=True, device=device
    ),
    "int8": lambda n, k, device: IntWeight.empty(n, k, bits=8, group=-1, device=device),
    "fp8 by blocks": lambda n, k, device: Fp8Weight.empty(n, k, 128, 128, device=device),
    "nvfp4": lambda n, k, device: Fp4Weight.empty(n, k, device=device),
    "Q8_0": lambda n, k, device: IntWeight.empty(
        n, k, bits=8, group=32, scale_dtype=torch.float16, device=device
    ),
    "Q4_K": lambda n, k, device: GgufWeight.empty(n, k, "Q4_K", device=device),
    "Q6_K": lambda n, k, device: GgufWeight.empty(n, k, "Q6_K", device=device),
}


def benchmarks(model: ModelShape, env: BenchEnv, query_len: int) -> Iterator[LazyBenchmark]:
    """Yield dequantize_weight of the largest matrix and, on a GPU, linear at all but the head."""
    (_, n, k) = max(model.weights[:-1], key=lambda weight: weight[1] * weight[2])
    if query_len == 1:
        yield dequantize_weight, partial(_dequantize, n, k, env)
    if env.device != "cuda":
        return
    for layout in LAYOUTS:
        for name, n, k in model.weights[:-1]:
            yield linear, partial(_linear, layout, name, n, k, env, query_len)


def _weights(layout: str, n: int, k: int, env: BenchEnv) -> list[QuantizedWeight]:
    """Return enough weights that successive calls read memory and not the L2 cache."""
    generator = torch.Generator(env.device).manual_seed(0)
    first = LAYOUTS[layout](n, k, env.device)
    count = min(-(-env.chain_bytes // first.nbytes) + 1, MAX_WEIGHTS)
    weights = [first, *(LAYOUTS[layout](n, k, env.device) for _ in range(count - 1))]
    for weight in weights:
        weight.fill_dummy(generator)
    return weights


def _linear(layout: str, name: str, n: int, k: int, env: BenchEnv, query_len: int) -> OpBenchmark:
    """Measure linear at one matrix in one format."""
    weights = _weights(layout, n, k, env)
    x = env.random(env.max_rows * query_len, k)
    backend, run = env.choose(linear, n=n, k=k, quantized=type(weights[0]).__name__)
    split_k = choose_split_k(n, k, env.device, quantized=True)

    def call(begin: int, end: int, variant: int) -> Callable[[], Tensor]:
        weight = weights[variant % len(weights)]
        rows = x[begin * query_len : end * query_len]
        return lambda: run(rows, weight, split_k)

    def cost(rows: int) -> Cost:
        tokens = rows * query_len
        size = x.element_size()
        return Cost(weights[0].nbytes + size * tokens * (n + k), 2 * n * k * tokens)

    return OpBenchmark(
        op=linear.name,
        size=f"{layout} {name} {n}x{k}",
        query_len=query_len,
        backend=backend,
        rows=env.max_rows,
        call=call,
        cost=cost,
        variants=len(weights),
    )


def _dequantize(n: int, k: int, env: BenchEnv) -> OpBenchmark:
    """Measure dequantize_weight of an int4 weight."""
    weights = _weights("int4", n, k, env)
    out = torch.empty(n, k, dtype=env.dtype, device=env.device)
    backend, run = env.choose(dequantize_weight)

    def call(begin: int, end: int, variant: int) -> Callable[[], None]:
        return lambda: run(weights[variant % len(weights)], out)

    return OpBenchmark(
        op=dequantize_weight.name,
        size=f"int4 {n}x{k}",
        query_len=1,
        backend=backend,
        rows=env.max_rows,
        call=call,
        cost=lambda rows: Cost(weights[0].nbytes + out.nbytes),
        variants=len(weights),
        outputs=lambda begin, end, out: [],
    )
