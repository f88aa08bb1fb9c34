"""Compile what ops launch for the GPUs of other architectures, without such a GPU.

Every launch must be accepted by ptxas and fit the architecture's shared memory. Launches are
recorded, not executed, with the tiles that each architecture chooses: of the shared cases and, at
the sizes of Qwen3-8B, Qwen3.6-27B, Qwen3.6-35B-A3B and DeepSeek-V3, in bf16 and in fp32.

    python -m tests.kernels.architectures [--quick] [sm_86 ...]

Prints a line per launch: architecture, op, kernel, bytes of shared memory, bytes of stack per
thread (its spills). --quick: each op once, on one architecture below Hopper and one above, up to
the bytes of shared memory, without machine code.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from lockstep.cache.kv import kv_caches, kv_spec, latent_caches, latent_spec
from lockstep.kernels import architecture
from lockstep.kernels.attention.triton import paged_attention_triton
from lockstep.kernels.backends import all_ops, layer_traits, load, load_cases
from lockstep.kernels.experts.triton import experts_triton
from lockstep.kernels.formats.kv import KVFormat, KVQuantizer
from lockstep.kernels.formats.kv.cases import LATENT_QUANTIZERS
from lockstep.kernels.formats.kv.table import KV_FORMATS
from lockstep.kernels.formats.weights import Fp8Weight
from lockstep.kernels.formats.weights.bench import LAYOUTS
from lockstep.kernels.formats.weights.cases import layouts
from lockstep.kernels.fp8_linear.triton import fp8_linear_triton
from lockstep.kernels.gated_delta_rule.cases import (
    gated_delta_chunk_cases,
    gated_delta_step_cases,
)
from lockstep.kernels.head_linear.triton import head_linear_triton
from lockstep.kernels.latent_attention.dequantize import dequantized_groups
from lockstep.kernels.latent_attention.triton import latent_attention_triton
from lockstep.kernels.linear.quantized import linear_quantized
from lockstep.kernels.linear.triton import linear_triton
from lockstep.kernels.mamba2.cases import mamba2_chunk_cases, mamba2_step_cases
from lockstep.kernels.recurrent.cases import Dims
from tests.kernels.compile_launches import COMPILED, argument_kinds, empty
from tests.kernels.compile_quantized import source_of
from tests.kernels.layouts import compile_checked, stop_after

QUICK = (86, 120)
"""The architectures with the least shared memory: one below Hopper and one above."""
HALF = torch.bfloat16
Call = Callable[[], object]


class Launches:
    """Replacement of JITFunction.run that records each distinct launch."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, ...]] = set()
        self.recorded: list[tuple[Any, ASTSource, dict[str, Any]]] = []

    def record(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Record a launch of the kernel with these arguments."""
        source, options = source_of(kernel, args, kwargs)
        parts = (source.signature, source.constants, source.attrs, options)
        key = (kernel.__name__, *map(str, parts))
        if key not in self.seen:
            self.seen.add(key)
            self.recorded.append((kernel, source, options))


def meta(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def attention(
    heads: int,
    kv_heads: int,
    dim: int,
    rows: int,
    query_len: int,
    dtype: torch.dtype,
    format: KVFormat | None = None,
) -> Call:
    """Return a call of paged_attention over 32 K tokens per row, with output gates if dim is
    256."""
    tokens = rows * query_len
    ints = dict(dtype=torch.int32)
    spec = kv_spec(kv_heads, dim, dtype, format)
    k, v = kv_caches(spec.allocate(9, 64, "meta"), dim, format)
    gates = meta(tokens, 2 * heads * dim, dtype=dtype) if dim == 256 else None
    return lambda: paged_attention_triton(
        meta(tokens, heads, dim, dtype=dtype), k, v, meta(rows, 512, **ints),
        meta(rows + 1, **ints), meta(rows, **ints), query_len, dim**-0.5, gates,
    )  # fmt: skip


def latent_call(
    heads: int, rows: int, query_len: int, dtype: torch.dtype, quantizer: KVQuantizer | None = None
) -> Call:
    """Return a call of latent_attention over 32 K tokens per row, with DeepSeek-V3's latents."""
    tokens = rows * query_len
    ints = dict(dtype=torch.int32)
    spec = latent_spec(512, 64, dtype, quantizer)
    kept, ropes = latent_caches(spec.allocate(9, 64, "meta"), 512, quantizer)
    return lambda: latent_attention_triton(
        meta(tokens, heads, 512, dtype=dtype), meta(tokens, heads, 64, dtype=dtype),
        kept, ropes, meta(rows, 512, **ints), meta(rows + 1, **ints), meta(rows, **ints),
        query_len, 192**-0.5,
    )  # fmt: skip


def dequantize_call(dtype: torch.dtype, quantizer: KVQuantizer) -> Call:
    """Return a call that dequantizes DeepSeek-V3's latents of 8 rows."""
    ints = dict(dtype=torch.int32)
    kept, ropes = latent_caches(
        latent_spec(512, 64, dtype, quantizer).allocate(9, 64, "meta"), 512, quantizer
    )
    rest = (meta(8, 512, **ints), meta(9, **ints), meta(8, **ints))
    return lambda: list(dequantized_groups(kept, ropes, *rest))


def head_linear_calls(tokens: int, dtype: torch.dtype) -> Iterator[Call]:
    """Yield calls of head_linear at DeepSeek-V3's sizes: absorption of queries, and values."""
    for inputs, outputs in ((128, 512), (512, 128)):
        x = meta(tokens, 128, inputs, dtype=dtype)
        weight = meta(128, outputs, inputs, dtype=dtype)
        yield lambda x=x, weight=weight: head_linear_triton(x, weight)


def latent_calls(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Yield latent attention at the sizes of DeepSeek-V3 and Kimi-K2."""
    for heads in (128, 64):
        for rows, query_len in ((1, 1), (1, 4), (8, 4), (64, 1), (64, 4), (1, 2048)):
            yield "latent_attention", latent_call(heads, rows, query_len, dtype)
    for quantizer in LATENT_QUANTIZERS.values():
        for rows, query_len in ((1, 1), (64, 4)):
            yield "latent_attention", latent_call(128, rows, query_len, dtype, quantizer)
        yield "latent_attention", dequantize_call(dtype, quantizer)
    for tokens in (1, 17, 65, 257):
        yield from (("head_linear", call) for call in head_linear_calls(tokens, dtype))


def expert_weights(dtype: torch.dtype) -> Iterator[tuple[Any, Any]]:
    """Yield (up, down) of experts at Qwen3.6-35B-A3B's sizes: dense, then quantized in each
    layout."""
    yield meta(256, 1024, 2048, dtype=dtype), meta(256, 2048, 512, dtype=dtype)
    for empty_of in LAYOUTS.values():
        yield empty_of(256 * 1024, 2048, "meta"), empty_of(256 * 2048, 512, "meta")


def experts_call(tokens: int, dtype: torch.dtype, up: Any, down: Any) -> Call:
    """Return a call of experts at Qwen3.6-35B-A3B's sizes."""
    ids = meta(tokens, 8, dtype=torch.int32)
    x = meta(tokens, 2048, dtype=dtype)
    return lambda: experts_triton(x, up, down, ids, meta(tokens, 8), x)


def quantized_linear_calls(tokens: int, dtype: torch.dtype, split_k: int) -> Iterator[Call]:
    """Yield calls of linear with each layout of a quantized weight."""
    for _, weight in layouts(512, 2048):
        x = meta(tokens, 2048, dtype=dtype)
        yield lambda weight=weight, x=x: linear_quantized(x, weight, split_k)


def fp8_linear_calls(tokens: int, dtype: torch.dtype) -> Iterator[Call]:
    """Yield calls of fp8_linear at Qwen3.6-27B's sizes, with each kind of scales."""
    for n, k, split_k in ((34816, 5120, 1), (5120, 17408, 4)):
        x = meta(tokens, k, dtype=dtype)
        for block_k in (128, k):
            weight = Fp8Weight.empty(n, k, 128, block_k, device="meta")
            yield lambda x=x, weight=weight, split_k=split_k: fp8_linear_triton(x, weight, split_k)


def attention_calls(dtype: torch.dtype) -> Iterator[Call]:
    """Yield attention over KV caches: at real sizes over unquantized caches, and over each format.

    The first and the last format of TurboQuant are called with all head dims.
    """
    for heads, kv_heads, dim in ((32, 8, 128), (24, 4, 256), (16, 2, 256)):
        for rows, query_len in ((1, 1), (1, 4), (8, 4), (64, 1), (64, 4), (1, 2048), (4, 512)):
            yield attention(heads, kv_heads, dim, rows, query_len, dtype)
    for format in {one.name: one for one in KV_FORMATS.values()}.values():
        yield attention(24, 4, 256, 64, 4, dtype, format)
    for name, dim in product(("turboquant_k8v4", "turboquant_3bit_nc"), (64, 128, 256)):
        for rows, query_len in ((1, 1), (64, 4), (1, 2048)):
            yield attention(24, 4, dim, rows, query_len, dtype, KV_FORMATS[name])


def real_calls() -> Iterator[tuple[str, Call]]:
    """Yield (op, a call of its Triton backend) at the sizes of real models, for every choice of a
    tile.

    It covers each class of the number of tokens, each model dtype, and K with and without splits.
    """
    for dtype in (HALF, torch.float32):
        yield from (("paged_attention", call) for call in attention_calls(dtype))
        yield from latent_calls(dtype)
        for tokens in (1, 4, 16, 64, 256, 640, 1536, 2048):
            for weights in expert_weights(dtype):
                yield "experts", experts_call(tokens, dtype, *weights)
        for tokens in (1, 17, 65, 257):
            x = meta(tokens, 4096, dtype=dtype)
            for n, cuts in ((6144, 1), (48, 8), (4096, 2), (34816, 1)):
                w = meta(n, 4096, dtype=dtype)
                yield "linear", lambda x=x, w=w, cuts=cuts: linear_triton(x, w, cuts)
            yield from (("fp8_linear", call) for call in fp8_linear_calls(tokens, dtype))
            for cuts in (1, 2):
                yield from (
                    ("linear", call) for call in quantized_linear_calls(tokens, dtype, cuts)
                )
        yield from recurrent_calls(dtype)


def recurrent_calls(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Yield the chunked and recurrent forms of Gated DeltaNet at the sizes of Qwen3.6-27B and
    Qwen3.6-35B-A3B, and of Mamba-2 at those of Nemotron 3 Nano and Super and of Nemotron Nano
    9B."""
    delta = (Dims(16, 48, 128, 128), Dims(16, 32, 128, 128))
    mamba = (Dims(8, 64, 128, 64), Dims(8, 128, 128, 64), Dims(8, 128, 128, 80))
    for op, cases, layers in (("gated_delta_step", gated_delta_step_cases, delta),
                              ("gated_delta_chunk", gated_delta_chunk_cases, delta),
                              ("mamba2_step", mamba2_step_cases, mamba),
                              ("mamba2_chunk", mamba2_chunk_cases, mamba)):  # fmt: skip
        run = all_ops()[op].backends["triton"].run
        for _, arguments in cases(dtype, layers):
            yield op, lambda run=run, arguments=arguments: run(**arguments)


def shared_calls(quick: bool) -> Iterator[tuple[str, Call]]:
    """Yield calls of the shared cases in bf16: the first case of each op, of each combination of
    absent arguments, and of each kind of quantized weight."""
    for name, op in all_ops().items():
        absent: set[tuple[str, frozenset[str]]] = set()
        for _, arguments in load_cases(op)(HALF):
            missing = frozenset(argument_kinds(arguments))
            traits = dict(device="cuda", dtype=HALF) | layer_traits(op, arguments)
            for backend in [op.backends[name] for name in COMPILED if name in op.backends]:
                served = backend.supports(**traits) is None and not empty(arguments)
                if served and (backend.run.__name__, missing) not in absent:
                    absent.add((backend.run.__name__, missing))
                    yield name, lambda run=backend.run, arguments=arguments: run(**arguments)
            if quick and absent:
                break


def stack_bytes(cubin: bytes) -> int:
    """Return the stack bytes per thread, which are its spills, since no kernel has local arrays."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        message = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"STACK:(\d+)", message)
    assert match, message
    return int(match[1])


def record_launches(number: int, quick: bool) -> Iterator[tuple[str, Any]]:
    """Yield (op, launch) of every launch of an architecture."""
    launches = Launches()
    architecture.sm_number = lambda device: number
    JITFunction.run = lambda kernel, *args, **kwargs: launches.record(kernel, *args, **kwargs)
    parts = [shared_calls(quick)] if quick else [shared_calls(False), real_calls()]
    for op, call in (pair for part in parts for pair in part):
        call()
        yield from ((op, launch) for launch in launches.recorded)
        launches.recorded.clear()


def main(arguments: list[str]) -> None:
    """Compile all launches; raise if one does not compile or does not fit."""
    quick = "--quick" in arguments
    names = [name for name in arguments if name != "--quick"]
    chosen = QUICK if quick else tuple(architecture.ARCHITECTURES)
    load()
    knobs.runtime.add_stages_inspection_hook = stop_after("llir") if quick else None
    for number in chosen:
        if names and f"sm_{number}" not in names:
            continue
        for op, (kernel, source, options) in record_launches(number, quick):
            target = GPUTarget("cuda", number, 32)
            recorded = compile_checked(source, target=target, options=options)
            shared = recorded.metadata.shared
            label = f"sm_{number} {op} {kernel.__name__}"
            assert shared <= architecture.shared_memory_limit(number), (label, shared, options)
            stack = "" if quick else stack_bytes(recorded.asm["cubin"])
            print(label, shared, stack, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
