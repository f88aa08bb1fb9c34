"""Compile attention over quantized KV caches and quantized latents, without a GPU.

Dequantized values must enter products in the same order as unquantized ones, so that both give the
same bits. wgmma guarantees this; mma.sync would widen kWidth to 4 for values that come from bytes.
The smallest products are compiled to machine code, the others to their layouts.

    python -m tests.kernels.compile_kv [--quick] [86|90 ...]

--quick: the calls that are compiled to machine code, each for one of the two architectures, one
format that rotates, and one format of latents.
"""

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from lockstep.kernels import architecture
from lockstep.kernels.attention import hopper, quantized_hopper
from lockstep.kernels.attention import triton as attention
from lockstep.kernels.attention.cases import paged
from lockstep.kernels.backends import load
from lockstep.kernels.compile_target import CompileTarget
from lockstep.kernels.formats.kv.cases import KERNEL_FORMATS, LATENT_QUANTIZERS
from lockstep.kernels.latent_attention import triton as latent_attention
from lockstep.kernels.latent_attention.cases import paged_latents
from tests.kernels import compile_launches
from tests.kernels.layouts import stop_after

ROWS = (16, 64)
DIMS = (64, 128, 256)
ARCHES = (86, 90)
MACHINE_CODE_SHAPE = (128, 16)
"""Head dim and rows of the calls that are compiled to machine code."""
ROTATED = "turboquant_k8v4 64 64"
"""A call whose sums have a layout across warps that Triton 3.6 adds incorrectly
(docs/decisions/0032-sums-across-warps.md)."""


def widths(arch: int, call: Callable[[], object], full: bool) -> tuple[set[str], bool]:
    """Return (kWidth of the products' operands in the first kernel that a call launches, whether
    they are wgmma).

    full: compile down to machine code.
    """
    results: list[Any] = []
    compile_launches.HOPPER = GPUTarget("cuda", arch, 32)
    architecture.sm_number = lambda device: arch
    for kernels in (attention, latent_attention):
        kernels.compile_target = lambda device: CompileTarget(arch, inline_ptx=True)
    launches = compile_launches.Launches()
    compiled = triton.compile
    knobs.runtime.add_stages_inspection_hook = None if full else stop_after("ttgir")

    def keep(*args: Any, **kwargs: Any) -> Any:
        results.append(compiled(*args, **kwargs))
        return results[-1]

    JITFunction.run = lambda kernel, *args, **kwargs: launches.compile(kernel, *args, **kwargs)
    triton.compile = keep
    try:
        call()
    finally:
        triton.compile = compiled
    code = results[0].asm
    asynchronous = "warp_group_dot" in code["ttgir"]
    assert not full or asynchronous == ("wgmma" in code["ptx"])
    return set(re.findall(r"kWidth = (\d)", code["ttgir"])), asynchronous


def heads_call(name: str, dim: int, rows: int) -> Callable[[], object]:
    """Return a call over keys and values in a format, by its name."""
    arguments = paged(
        ((300, rows // 4),), 4, 1, dim, 64, torch.bfloat16, format=KERNEL_FORMATS[name]
    )
    partition = attention.Partition(rows, 64, 1, True, 8 if rows == 64 else 4, 2)
    return lambda: attention.paged_attention_triton(**arguments, partition=partition)


def latents_call(name: str) -> Callable[[], object]:
    """Return a call over DeepSeek-V3's latents in a format, by its name."""
    arguments = paged_latents(
        ((300, 4),), 16, 512, 64, 64, torch.bfloat16, quantizer=LATENT_QUANTIZERS[name]
    )
    return lambda: latent_attention.latent_attention_triton(**arguments)


def calls(arch: int) -> Iterator[tuple[str, Callable[[], object], bool]]:
    """Yield (name, call, whether to compile to machine code) for an architecture."""
    for name in KERNEL_FORMATS:
        for dim, rows in ((dim, rows) for dim in DIMS for rows in ROWS):
            if arch >= 90 or dim <= 128:
                yield (
                    f"{name} {dim} {rows}",
                    heads_call(name, dim, rows),
                    (dim, rows) == MACHINE_CODE_SHAPE,
                )
    for name in LATENT_QUANTIZERS:
        yield f"{name} latents", latents_call(name), False


def quick_calls(arch: int) -> list[tuple[str, Callable[[], object], bool]]:
    """Return the calls that --quick names."""
    every = list(calls(arch))
    full = [call for call in every if call[2]]
    rotated = [call for call in every if call[0] == ROTATED]
    return full[ARCHES.index(arch) :: len(ARCHES)] + rotated + every[-1:]


def compile_dequantizing_warps() -> None:
    """Compile Hopper's kernel with dedicated dequantizing warps (Gluon) to machine code."""
    target = CompileTarget(architecture.HOPPER, inline_ptx=True)
    launches = compile_launches.Launches()
    JITFunction.run = lambda kernel, *args, **kwargs: launches.compile(kernel, *args, **kwargs)
    knobs.runtime.add_stages_inspection_hook = None
    kwargs = paged(((300, 4),), 24, 4, 256, 64, torch.bfloat16, format=KERNEL_FORMATS["fp8_e4m3"])
    shape = quantized_hopper.choose_shape(1, 24, 4, 256, 2, target.num_sms)
    with mock.patch.object(quantized_hopper, "compile_target", lambda device: target):
        quantized_hopper.paged_attention_quantized_hopper(**kwargs, shape=shape)
    code = dict(launches.code)["_split_kv_kernel"]
    assert "wgmma.mma_async" in code
    compile_launches.check_wait("_split_kv_kernel", code)


def compile_prefill() -> None:
    """Compile Hopper's kernel for long queries, with heads of both dims, to machine code."""
    launches = compile_launches.Launches()
    JITFunction.run = lambda kernel, *args, **kwargs: launches.compile(kernel, *args, **kwargs)
    knobs.runtime.add_stages_inspection_hook = None
    for dim in (128, 256):
        hopper.paged_attention_hopper(**paged(((0, 70),), 8, 2, dim, 64, torch.bfloat16))
    code = [ptx for name, ptx in launches.code if name == "_prefill_kernel"]
    assert len(code) == 2 and all("wgmma.mma_async" in ptx for ptx in code)
    for ptx in code:
        compile_launches.check_wait("_prefill_kernel", ptx)


def main(arches: list[int], quick: bool) -> None:
    """Compile each call for these architectures; print what was compiled."""
    load()
    for arch in arches:
        for name, call, full in quick_calls(arch) if quick else calls(arch):
            result, asynchronous = widths(arch, call, full)
            assert result == {"2"}, (arch, name, result)
            assert asynchronous == (arch == 90), (arch, name)
            print(arch, name, flush=True)
        if arch == architecture.HOPPER:
            compile_dequantizing_warps()
            print(arch, "dequantizing warps", flush=True)
            compile_prefill()
            print(arch, "prefill", flush=True)


if __name__ == "__main__":
    named = [int(name) for name in sys.argv[1:] if name.isdigit()]
    main(named or list(ARCHES), "--quick" in sys.argv)
