"""Compile linear with quantized weights for Hopper and for Ampere, without a GPU, and check the
compiled code.

It checks the order of columns in the matrix units, and the path of a tile to them. A kWidth other
than 2 would distribute other columns among the groups of 16 of a product, which is another
reduction tree.

    python -m tests.kernels.compile_quantized [--gemv | --pipeline [--quick]]

--gemv: the register-only GEMV kernel. --pipeline: the multistage pipeline kernel. Without either:
the kernel whose layouts the compiler chooses. --quick: the pipeline of each number of tokens once.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from lockstep.kernels.architecture import HOPPER, shared_memory_limit
from lockstep.kernels.compile_target import CompileTarget, uses_mma_sync
from lockstep.kernels.formats.weights import IntWeight, QuantizedWeight
from lockstep.kernels.formats.weights.cases import layouts, random_weights
from lockstep.kernels.formats.weights.operand import shared_memory_bytes
from lockstep.kernels.linear.quantized import launch
from lockstep.kernels.linear.quantized_tuning import candidates, compiler_tile, fit_tile, lookup
from tests.kernels.compile_launches import OPTIONS, check_wait, source_kind, type_of
from tests.kernels.layouts import compile_checked

N = 256
K = 1024
LEFT = re.compile(r"opIdx = 0, parent = [^>]*?kWidth = (\d+)")
"""Layout of a product's left operand in registers."""
COMPILED = {
    90: ("int4", "int4 asymmetric", "int8", "fp8 by blocks", "nvfp4", "Q3_K", "Q4_K", "Q6_K"),
    86: ("int4", "fp8 by blocks", "Q4_K"),
}
"""Architecture -> layouts; each is compiled in bf16 for 16 tokens."""
GEMV_LAYOUTS = {
    90: (
        "int4", "int4 asymmetric", "int4 by 32", "int8 by 16", "fp8 by blocks", "fp8", "nvfp4",
        "Q4_K", "Q6_K", "IQ4_XS",
    ),
    86: ("int4", "int4 asymmetric", "int4 wide", "fp8 by outputs", "nvfp4"),
    120: ("int4", "fp8 by blocks", "nvfp4"),
}  # fmt: skip
"""Architecture -> layouts of the register-only GEMV."""
PIPELINE_LAYOUTS = ("int4", "int4 asymmetric", "int8", "fp8 by blocks", "nvfp4")
"""Layouts that the pipeline serves."""
PIPELINE_TOKENS = (8, 64, 128, 256)
"""Token counts that the pipeline is compiled for."""
LARGE_SCALES = "int4, scales of 1"
"""Layout for which the pipeline has another decoder than for int4, whose scales are small."""
QUICK_PIPELINES = {"int4": (64,), "int4 asymmetric": (8, 256), "fp8 by blocks": (128,)}
"""Layout -> token counts of --quick: two layouts of 4 bits, one of 8, and each count once."""
MAX_STACK = 64
"""Maximum bytes of stack per thread of the register-only GEMV: a few addresses."""
WAITS = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
"""Instruction that waits for all products of a warpgroup."""
MARGIN = 4096
"""Shared memory in bytes that a kernel may use besides its tiles."""


class Compiled:
    """Replacement of JITFunction.run that compiles and keeps each launch."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.made: list[Any] = []

    def compile(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Compile a launch of the kernel with these arguments."""
        source, options = source_of(kernel, args, kwargs)
        target = GPUTarget("cuda", self.arch, 32)
        result = compile_checked(source, target=target, options=options)
        if self.arch >= HOPPER:
            check_wait(kernel.__name__, result.asm["ptx"])
        self.made.append(result)


def source_of(
    kernel: Any, args: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[ASTSource, dict[str, Any]]:
    """Return (the source of a launch with these arguments, the compiler's options).

    Integers divisible by 16 are marked as such, as in a launch.
    """
    options = {name: arguments[name] for name in OPTIONS if name in arguments}
    values = dict(zip(kernel.arg_names, args, strict=False)) | arguments
    fixed: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}
    types = {}
    for i, p in enumerate(kernel.params):
        if p.is_constexpr:
            types[p.name] = "constexpr"
            fixed[(i,)] = values[p.name]
            continue
        types[p.name] = type_of(values[p.name], (i,), fixed, aligned)
        if not p.do_not_specialize:
            _align(values[p.name], (i,), aligned)
    kind = source_kind(kernel)
    return kind(fn=kernel, signature=types, constexprs=fixed, attrs=aligned), options


def _align(value: Any, index: tuple[int, ...], aligned: dict[Any, Any]) -> None:
    """Record the integers that are divisible by 16, in tuples too."""
    if isinstance(value, tuple):
        for i, part in enumerate(value):
            _align(part, (*index, i), aligned)
    elif isinstance(value, int) and value and value % 16 == 0:
        aligned[index] = [["tt.divisibility", 16]]


def main() -> None:
    """Compile all; print architecture, layout and bytes of shared memory: actual, predicted."""
    x = torch.empty(16, K, dtype=torch.bfloat16)
    for arch, names in COMPILED.items():
        compiled = Compiled(arch)
        JITFunction.run = lambda kernel, *a, c=compiled, **kwargs: c.compile(kernel, *a, **kwargs)
        for name, weight in layouts(N, K):
            if name in names:
                tile = lookup(16, weight, 1, x.dtype, arch)
                if not tile.laid_out:
                    tile = compiler_tile(tile, weight, 1, arch)
                launch(x, weight, 1, tile, CompileTarget(arch, inline_ptx=True))
                result = compiled.made[-1]
                code = result.asm["ttgir"]
                matches = LEFT.findall(code)
                assert matches and set(matches) == {"2"}, (arch, name, set(matches))
                if arch == 90 and tile.wgmma:
                    assert "warp_group_dot" in code, name
                    assert "ttg.local_store" not in code, f"{name} goes through shared memory"
                sync = uses_mma_sync(arch)
                stage, fixed = shared_memory_bytes(tile.n, tile.m, tile.k, weight, sync)
                counted = (tile.stages - 1) * stage + fixed
                shared = result.metadata.shared
                assert shared <= min(shared_memory_limit(arch), counted + MARGIN), (
                    arch,
                    name,
                    counted,
                )
                print(arch, name, shared, counted, flush=True)


def compile_gemv(arch: int, names: tuple[str, ...]) -> None:
    """Compile the register-only GEMV and check its code.

    On Hopper every candidate for 1, 16 and 32 tokens of the first layout, and one of each other.
    Tensors must have one element per thread, loads 16 bytes, no shared memory is used, and the loop
    spills no register. Prints registers and bytes of stack.
    """
    compiled = Compiled(arch)
    JITFunction.run = lambda kernel, *a, **kwargs: compiled.compile(kernel, *a, **kwargs)
    for name, weight in layouts(N, K):
        if name not in names:
            continue
        every = arch == 90 and name == names[0]
        for tokens in (1, 16, 32) if every else (1,):
            x = torch.empty(tokens, K, dtype=torch.bfloat16)
            results = [tile for tile in candidates(tokens, 1, weight.bits) if tile.gemv]
            for tile in results if every else results[:1]:
                launch(
                    x,
                    weight,
                    1,
                    fit_tile(tile, weight, 1, arch),
                    CompileTarget(arch, inline_ptx=True),
                )
                result = compiled.made[-1]
                code = result.asm["ptx"]
                assert result.metadata.shared == 0, (arch, name, tile)
                assert "sizePerThread = [1]" in result.asm["ttgir"], (arch, name, tile)
                assert "v4.b32" in code and "mma.sync.aligned.m16n8k16" in code, (
                    arch,
                    name,
                    tile,
                )
                print(arch, name, tile, *resource_usage(result.asm["cubin"]), flush=True)


def _pipeline_weights(n: int, k: int) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yield (name, weight) of all layouts, then of int4 with large scales."""
    yield from random_weights(n, k)
    weight = IntWeight.empty(n, k)
    weight.words.zero_()
    weight.scales.fill_(1.0)
    yield LARGE_SCALES, weight


def compile_pipelines(token_counts: Mapping[str, tuple[int, ...]]) -> None:
    """Compile the largest pipeline candidate of each layout and number of tokens; check its code.

    Loads are 16 bytes and the loop spills no register. Only the last wgmma is waited for at once:
    ptxas serializes all of them where registers are short. With stream-K, partial sums pass
    through memory two at a time.
    """
    compiled = Compiled(HOPPER)
    JITFunction.run = lambda kernel, *a, **kwargs: compiled.compile(kernel, *a, **kwargs)
    two_sms = CompileTarget(HOPPER, inline_ptx=True, num_sms=2)
    for name, weight in _pipeline_weights(4 * N, K):
        for tokens in token_counts.get(name, ()):
            x = torch.empty(tokens, K, dtype=torch.bfloat16)
            pipelines = [tile for tile in candidates(tokens, 1, weight.bits) if tile.pipeline]
            largest = max(pipelines, key=lambda tile: (tile.m * tile.n, tile.m))
            for stream_k in (0, 1):
                tile = replace(fit_tile(largest, weight, 1, HOPPER), stream_k=stream_k)
                assert tile.pipeline, (name, tile)
                launch(x, weight, 1, tile, two_sms)
                result = compiled.made[-1]
                code = result.asm["ptx"]
                product = "mma.sync" if tile.mma_sync else "wgmma.mma_async"
                assert product in code and "ld.shared.v4" in code, (name, tile)
                assert ("atom.global.acquire" in code) == bool(stream_k), (name, tile)
                assert not stream_k or "st.global.v2.b32" in code, (name, tile)
                machine = run_cuda_tool(result.asm["cubin"], knobs.nvidia.nvdisasm.path)
                assert tile.mma_sync or machine.count(WAITS) == 1, (name, tile)
                print(HOPPER, name, tile, *resource_usage(result.asm["cubin"]), flush=True)


def run_cuda_tool(cubin: bytes, *command: str) -> str:
    """Return the output of a CUDA tool on compiled code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        arguments = [*command, file.name]
        return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout


def resource_usage(cubin: bytes, max_stack: int = MAX_STACK) -> tuple[int, int]:
    """Return (registers per thread, stack bytes per thread); assert that the latter are at most
    `max_stack_bytes`."""
    message = run_cuda_tool(cubin, knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    match = re.search(r"REG:(\d+) STACK:(\d+)", message)
    assert match is not None, message
    (registers, stack) = map(int, match.groups())
    assert stack <= max_stack, message
    return registers, stack


def compile_gemvs() -> None:
    """Compile the register-only GEMV for all of GEMV_LAYOUTS."""
    for arch, names in GEMV_LAYOUTS.items():
        compile_gemv(arch, names)


if __name__ == "__main__":
    if "--gemv" in sys.argv:
        compile_gemvs()
    elif "--pipeline" in sys.argv:
        full = dict.fromkeys((*PIPELINE_LAYOUTS, LARGE_SCALES), PIPELINE_TOKENS)
        compile_pipelines(QUICK_PIPELINES if "--quick" in sys.argv else full)
    else:
        main()
