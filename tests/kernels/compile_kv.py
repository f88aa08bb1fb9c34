"""Compiles attention over packed caches and over packed latents, which needs no GPU: numbers must
enter products in the order that they have unpacked, so that both give the same bits. wgmma does
that by itself; mma.sync would widen kWidth to 4 where numbers come out of bytes. Down to machine
code where products are smallest, elsewhere down to their layouts.

    python -m tests.kernels.compile_kv [--quick] [86|90 ...]

--quick: those that go down to machine code, each for one of the two, one that rotates, and a format
of latents.
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

ROWS = (16, 64)
DIMS = (64, 128, 256)
ARCHES = (86, 90)
WHOLE = (128, 16)
"""Head dim and rows of those that are compiled down to machine code."""
ROTATED = "turboquant_k8v4 64 64"
"""Whose sums lay across warps as Triton 3.6 does not add them
(docs/decisions/0032-sums-across-warps.md)."""
LAYOUTS = "layouts alone"
"""Names what is kept of the others in Triton's cache."""


def stop_at_layouts(*given: Any) -> tuple[str, str] | None:
    """Triton's hook into its stages: nothing behind ttgir, which holds the layouts."""
    if not given:
        return LAYOUTS, LAYOUTS
    stages = given[1]

    def no_code(module: Any, metadata: dict[str, Any]) -> str:
        metadata.update(name=LAYOUTS, shared=0)
        return ""

    del stages["llir"]
    stages["ptx"] = no_code
    stages["cubin"] = lambda module, metadata: b""
    return None


def widths(arch: int, call: Callable[[], object], whole: bool) -> tuple[set[str], bool]:
    """kWidth of the products' operands in the first kernel that a call launches, and whether they
    are wgmma. whole: down to machine code."""
    made: list[Any] = []
    compile_launches.HOPPER = GPUTarget("cuda", arch, 32)
    architecture.sm_number = lambda device: arch
    for kernels in (attention, latent_attention):
        kernels.compile_target = lambda device: CompileTarget(arch, inline_ptx=True)
    launches = compile_launches.Launches()
    compiled = triton.compile
    knobs.runtime.add_stages_inspection_hook = None if whole else stop_at_layouts

    def keep(*args: Any, **given: Any) -> Any:
        made.append(compiled(*args, **given))
        return made[-1]

    JITFunction.run = lambda kernel, *args, **given: launches.compile(kernel, *args, **given)
    triton.compile = keep
    try:
        call()
    finally:
        triton.compile = compiled
    code = made[0].asm
    asynchronous = "warp_group_dot" in code["ttgir"]
    assert not whole or asynchronous == ("wgmma" in code["ptx"])
    return set(re.findall(r"kWidth = (\d)", code["ttgir"])), asynchronous


def heads(name: str, dim: int, rows: int) -> Callable[[], object]:
    """A call over keys and values in a format, by its name."""
    given = paged(((300, rows // 4),), 4, 1, dim, 64, torch.bfloat16, format=KERNEL_FORMATS[name])
    partition = attention.Partition(rows, 64, 1, True, 8 if rows == 64 else 4, 2)
    return lambda: attention.paged_attention_triton(**given, partition=partition)


def latents(name: str) -> Callable[[], object]:
    """A call over DeepSeek-V3's latents in a format, by its name."""
    given = paged_latents(
        ((300, 4),), 16, 512, 64, 64, torch.bfloat16, quantizer=LATENT_QUANTIZERS[name]
    )
    return lambda: latent_attention.latent_attention_triton(**given)


def calls(arch: int) -> Iterator[tuple[str, Callable[[], object], bool]]:
    """What is compiled for an architecture: (name, call, down to machine code)."""
    for name in KERNEL_FORMATS:
        for dim, rows in ((dim, rows) for dim in DIMS for rows in ROWS):
            if arch >= 90 or dim <= 128:
                yield f"{name} {dim} {rows}", heads(name, dim, rows), (dim, rows) == WHOLE
    for name in LATENT_QUANTIZERS:
        yield f"{name} latents", latents(name), False


def few(arch: int) -> list[tuple[str, Callable[[], object], bool]]:
    """Those of calls() that --quick names."""
    every = list(calls(arch))
    whole = [call for call in every if call[2]]
    rotated = [call for call in every if call[0] == ROTATED]
    return whole[ARCHES.index(arch) :: len(ARCHES)] + rotated + every[-1:]


def compile_unpacking_warps() -> None:
    """Hopper's kernel with warps that unpack alone, which Gluon compiles: down to machine code."""
    target = CompileTarget(architecture.HOPPER, inline_ptx=True)
    launches = compile_launches.Launches()
    JITFunction.run = lambda kernel, *args, **given: launches.compile(kernel, *args, **given)
    knobs.runtime.add_stages_inspection_hook = None
    given = paged(((300, 4),), 24, 4, 256, 64, torch.bfloat16, format=KERNEL_FORMATS["fp8_e4m3"])
    shape = quantized_hopper.choose_shape(1, 24, 4, 256, 2, target.num_sms)
    with mock.patch.object(quantized_hopper, "compile_target", lambda device: target):
        quantized_hopper.paged_attention_quantized_hopper(**given, shape=shape)
    code = dict(launches.code)
    assert "wgmma.mma_async" in code["_split_kv_kernel"]


def compile_prefill() -> None:
    """Compile Hopper's kernel for long queries, with heads of both dims, to machine code."""
    launches = compile_launches.Launches()
    JITFunction.run = lambda kernel, *args, **given: launches.compile(kernel, *args, **given)
    knobs.runtime.add_stages_inspection_hook = None
    for dim in (128, 256):
        hopper.paged_attention_hopper(**paged(((0, 70),), 8, 2, dim, 64, torch.bfloat16))
    code = [ptx for name, ptx in launches.code if name == "_prefill_kernel"]
    assert len(code) == 2 and all("wgmma.mma_async" in ptx for ptx in code)


def main(arches: list[int], quick: bool) -> None:
    """Compiles each for these architectures; prints what was compiled."""
    load()
    for arch in arches:
        for name, call, whole in few(arch) if quick else calls(arch):
            found, asynchronous = widths(arch, call, whole)
            assert found == {"2"}, (arch, name, found)
            assert asynchronous == (arch == 90), (arch, name)
            print(arch, name, flush=True)
        if arch == architecture.HOPPER:
            compile_unpacking_warps()
            print(arch, "unpacking warps", flush=True)
            compile_prefill()
            print(arch, "prefill", flush=True)


if __name__ == "__main__":
    named = [int(name) for name in sys.argv[1:] if name.isdigit()]
    main(named or list(ARCHES), "--quick" in sys.argv)
