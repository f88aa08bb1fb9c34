"""Compiles what ops launch for the GPUs of other architectures, which needs none of them: every
launch must be accepted by ptxas and keep within the architecture's shared memory.

Launches are recorded, not made, with tiles as each architecture chooses them: of the shared cases
and, at the sizes of Qwen3-8B, Qwen3.6-27B, Qwen3.6-35B-A3B and
DeepSeek-V3, in bf16 and in fp32.

    python -m tests.kernels.architectures [--quick] [sm_86 ...]

Prints a line per launch: architecture, op, kernel, bytes of shared memory, bytes that a thread
keeps in memory (what it spills). --quick: each op once, on one architecture below Hopper and one
above.
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
from lockstep.kernels.formats.weights.bench import LAYOUTS
from lockstep.kernels.formats.weights.cases import layouts
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
from tests.kernels.compile_launches import COMPILED, absent_of, empty
from tests.kernels.compile_quantized import source_of
from tests.kernels.layouts import compile_held

QUICK = (86, 120)
"""One architecture below Hopper and one above, of the least shared memory."""
HALF = torch.bfloat16
Call = Callable[[], object]


class Launches:
    """Stands for JITFunction.run: keeps each launch that differs from those before."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, ...]] = set()
        self.made: list[tuple[Any, ASTSource, dict[str, Any]]] = []

    def keep(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        """A launch of the kernel with these arguments."""
        source, options = source_of(kernel, args, given)
        parts = (source.signature, source.constants, source.attrs, options)
        key = (kernel.__name__, *map(str, parts))
        if key not in self.seen:
            self.seen.add(key)
            self.made.append((kernel, source, options))


def meta(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """A tensor without memory."""
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
    """A call of paged_attention over 32 K tokens a row, with output gates where dim is 256."""
    tokens = rows * query_len
    ints = dict(dtype=torch.int32)
    spec = kv_spec(kv_heads, dim, dtype, format)
    k, v = kv_caches(spec.allocate(9, 64, "meta"), dim, format)
    gates = meta(tokens, 2 * heads * dim, dtype=dtype) if dim == 256 else None
    return lambda: paged_attention_triton(
        meta(tokens, heads, dim, dtype=dtype), k, v, meta(rows, 512, **ints),
        meta(rows + 1, **ints), meta(rows, **ints), query_len, dim**-0.5, gates,
    )  # fmt: skip


def latent(
    heads: int, rows: int, query_len: int, dtype: torch.dtype, quantizer: KVQuantizer | None = None
) -> Call:
    """A call of latent_attention over 32 K tokens a row, of DeepSeek-V3's latents."""
    tokens = rows * query_len
    ints = dict(dtype=torch.int32)
    spec = latent_spec(512, 64, dtype, quantizer)
    kept, ropes = latent_caches(spec.allocate(9, 64, "meta"), 512, quantizer)
    return lambda: latent_attention_triton(
        meta(tokens, heads, 512, dtype=dtype), meta(tokens, heads, 64, dtype=dtype),
        kept, ropes, meta(rows, 512, **ints), meta(rows + 1, **ints), meta(rows, **ints),
        query_len, 192**-0.5,
    )  # fmt: skip


def ahead(dtype: torch.dtype, quantizer: KVQuantizer) -> Call:
    """A call that unpacks DeepSeek-V3's latents of 8 rows."""
    ints = dict(dtype=torch.int32)
    kept, ropes = latent_caches(
        latent_spec(512, 64, dtype, quantizer).allocate(9, 64, "meta"), 512, quantizer
    )
    rest = (meta(8, 512, **ints), meta(9, **ints), meta(8, **ints))
    return lambda: list(dequantized_groups(kept, ropes, *rest))


def head_maps(tokens: int, dtype: torch.dtype) -> Iterator[Call]:
    """Calls of head_linear at DeepSeek-V3's sizes: what queries are absorbed by, and values."""
    for inputs, outputs in ((128, 512), (512, 128)):
        x = meta(tokens, 128, inputs, dtype=dtype)
        weight = meta(128, outputs, inputs, dtype=dtype)
        yield lambda x=x, weight=weight: head_linear_triton(x, weight)


def latents(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Latent attention at the sizes of DeepSeek-V3 and Kimi-K2."""
    for heads in (128, 64):
        for rows, query_len in ((1, 1), (1, 4), (8, 4), (64, 1), (64, 4), (1, 2048)):
            yield "latent_attention", latent(heads, rows, query_len, dtype)
    for quantizer in LATENT_QUANTIZERS.values():
        for rows, query_len in ((1, 1), (64, 4)):
            yield "latent_attention", latent(128, rows, query_len, dtype, quantizer)
        yield "latent_attention", ahead(dtype, quantizer)
    for tokens in (1, 17, 65, 257):
        yield from (("head_linear", call) for call in head_maps(tokens, dtype))


def expert_weights(dtype: torch.dtype) -> Iterator[tuple[Any, Any]]:
    """(up, down) of experts at Qwen3.6-35B-A3B's sizes: plain, then packed in each layout."""
    yield meta(256, 1024, 2048, dtype=dtype), meta(256, 2048, 512, dtype=dtype)
    for empty_of in LAYOUTS.values():
        yield empty_of(256 * 1024, 2048, "meta"), empty_of(256 * 2048, 512, "meta")


def mixture(tokens: int, dtype: torch.dtype, up: Any, down: Any) -> Call:
    """A call of experts at Qwen3.6-35B-A3B's sizes."""
    ids = meta(tokens, 8, dtype=torch.int32)
    x = meta(tokens, 2048, dtype=dtype)
    return lambda: experts_triton(x, up, down, ids, meta(tokens, 8), x)


def packed(tokens: int, dtype: torch.dtype, split_k: int) -> Iterator[Call]:
    """Calls of linear with each layout of a packed weight."""
    for _, weight in layouts(512, 2048):
        x = meta(tokens, 2048, dtype=dtype)
        yield lambda weight=weight, x=x: linear_quantized(x, weight, split_k)


def caches(dtype: torch.dtype) -> Iterator[Call]:
    """Attention over keys and values: at real sizes over those that are not packed, and over each
    format, the first and the last of TurboQuant with all heads."""
    for heads, kv_heads, dim in ((32, 8, 128), (24, 4, 256), (16, 2, 256)):
        for rows, query_len in ((1, 1), (1, 4), (8, 4), (64, 1), (64, 4), (1, 2048), (4, 512)):
            yield attention(heads, kv_heads, dim, rows, query_len, dtype)
    for format in {one.name: one for one in KV_FORMATS.values()}.values():
        yield attention(24, 4, 256, 64, 4, dtype, format)
    for name, dim in product(("turboquant_k8v4", "turboquant_3bit_nc"), (64, 128, 256)):
        for rows, query_len in ((1, 1), (64, 4), (1, 2048)):
            yield attention(24, 4, dim, rows, query_len, dtype, KV_FORMATS[name])


def real_calls() -> Iterator[tuple[str, Call]]:
    """(op, a call of its Triton backend) at the sizes of real models, for every choice of a tile:
    each class of the number of tokens, each dtype of a model, K cut and uncut."""
    for dtype in (HALF, torch.float32):
        yield from (("paged_attention", call) for call in caches(dtype))
        yield from latents(dtype)
        for tokens in (1, 4, 16, 64, 256, 640, 1536, 2048):
            for weights in expert_weights(dtype):
                yield "experts", mixture(tokens, dtype, *weights)
        for tokens in (1, 17, 65, 257):
            x = meta(tokens, 4096, dtype=dtype)
            for n, cuts in ((6144, 1), (48, 2), (4096, 2), (34816, 1)):
                w = meta(n, 4096, dtype=dtype)
                yield "linear", lambda x=x, w=w, cuts=cuts: linear_triton(x, w, cuts)
            for cuts in (1, 2):
                yield from (("linear", call) for call in packed(tokens, dtype, cuts))
        yield from recurrent(dtype)


def recurrent(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Both laws of Gated DeltaNet at the sizes of Qwen3.6-27B and Qwen3.6-35B-A3B, of Mamba-2 at
    those of Nemotron 3 Nano and Super and of Nemotron Nano 9B."""
    delta = (Dims(16, 48, 128, 128), Dims(16, 32, 128, 128))
    mamba = (Dims(8, 64, 128, 64), Dims(8, 128, 128, 64), Dims(8, 128, 128, 80))
    for op, cases, layers in (("gated_delta_step", gated_delta_step_cases, delta),
                              ("gated_delta_chunk", gated_delta_chunk_cases, delta),
                              ("mamba2_step", mamba2_step_cases, mamba),
                              ("mamba2_chunk", mamba2_chunk_cases, mamba)):  # fmt: skip
        run = all_ops()[op].backends["triton"].run
        for _, given in cases(dtype, layers):
            yield op, lambda run=run, given=given: run(**given)


def shared_calls(quick: bool) -> Iterator[tuple[str, Call]]:
    """The calls of the shared cases in bf16: of each op's first one, of the first in which other
    arguments are None, and of the first of each kind of packed weight."""
    for name, op in all_ops().items():
        absent: set[tuple[str, frozenset[str]]] = set()
        for _, given in load_cases(op)(HALF):
            missing = frozenset(absent_of(given))
            traits = dict(device="cuda", dtype=HALF) | layer_traits(op, given)
            for backend in [op.backends[name] for name in COMPILED if name in op.backends]:
                served = backend.supports(**traits) is None and not empty(given)
                if served and (backend.run.__name__, missing) not in absent:
                    absent.add((backend.run.__name__, missing))
                    yield name, lambda run=backend.run, given=given: run(**given)
            if quick and absent:
                break


def spills_of(cubin: bytes) -> int:
    """Bytes of a thread's stack: what it spills, since no kernel has arrays of its own."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", said)
    assert found, said
    return int(found[1])


def recorded(number: int, quick: bool) -> Iterator[tuple[str, Any]]:
    """(op, launch) of every launch of an architecture."""
    launches = Launches()
    architecture.sm_number = lambda device: number
    JITFunction.run = lambda kernel, *args, **given: launches.keep(kernel, *args, **given)
    parts = [shared_calls(quick)] if quick else [shared_calls(False), real_calls()]
    for op, call in (pair for part in parts for pair in part):
        call()
        yield from ((op, launch) for launch in launches.made)
        launches.made.clear()


def main(arguments: list[str]) -> None:
    """Compiles them all; raises where one does not compile or fit."""
    quick = "--quick" in arguments
    names = [name for name in arguments if name != "--quick"]
    chosen = QUICK if quick else tuple(architecture.ARCHITECTURES)
    load()
    for number in chosen:
        if names and f"sm_{number}" not in names:
            continue
        for op, (kernel, source, options) in recorded(number, quick):
            target = GPUTarget("cuda", number, 32)
            made = compile_held(source, target=target, options=options)
            shared = made.metadata.shared
            label = f"sm_{number} {op} {kernel.__name__}"
            assert shared <= architecture.shared_memory_limit(number), (label, shared, options)
            print(label, shared, spills_of(made.asm["cubin"]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
