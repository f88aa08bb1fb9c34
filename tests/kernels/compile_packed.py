"""Compiles linear with packed weights for Hopper and for Ampere, which needs no GPU, and looks at
what the compiler made: the order of columns in the matrix units, and how a tile reaches them.

Other kWidths than 2 share other columns among the groups of 16 of a product: another tree.

    python -m tests.kernels.compile_packed
"""

import re
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from lockstep.kernels.architecture import shared_of
from lockstep.kernels.linear.packed import launch
from lockstep.kernels.linear.packed_tuning import lookup
from lockstep.kernels.packed._form import Target, multiplies_by_mma_sync, shared_by
from lockstep.kernels.packed.cases import layouts
from tests.kernels.compile_launches import OPTIONS, type_of

N = 256
K = 1024
LEFT = re.compile(r"opIdx = 0, parent = [^>]*?kWidth = (\d+)")
"""The layout of a product's left operand in registers."""
COMPILED = {
    90: ("int4", "int4 asymmetric", "int8", "fp8 by blocks", "nvfp4"),
    86: ("int4", "fp8 by blocks"),
}
"""Architecture -> layouts; each is compiled in bf16 for 16 tokens."""
MARGIN = 4096
"""Bytes of shared memory that a kernel may take beside its tiles."""


class Compiled:
    """Stands for JITFunction.run: compiles a launch and keeps it."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.made: list[Any] = []

    def compile(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        """A launch of the kernel with these arguments."""
        source, options = source_of(kernel, args, given)
        target = GPUTarget("cuda", self.arch, 32)
        self.made.append(triton.compile(source, target=target, options=options))


def source_of(
    kernel: Any, args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[ASTSource, dict[str, Any]]:
    """(what is compiled of a launch with these arguments, the compiler's options); numbers that 16
    divides are said to be so, as a launch would."""
    options = {name: given[name] for name in OPTIONS if name in given}
    values = dict(zip(kernel.arg_names, args, strict=False)) | given
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
    return ASTSource(fn=kernel, signature=types, constexprs=fixed, attrs=aligned), options


def _align(value: Any, place: tuple[int, ...], aligned: dict[Any, Any]) -> None:
    """Notes the whole numbers that 16 divides, in tuples too."""
    if isinstance(value, tuple):
        for i, part in enumerate(value):
            _align(part, (*place, i), aligned)
    elif isinstance(value, int) and value and value % 16 == 0:
        aligned[place] = [["tt.divisibility", 16]]


def main() -> None:
    """Compiles them all; prints architecture, layout and bytes of shared memory: taken, counted."""
    x = torch.empty(16, K, dtype=torch.bfloat16)
    for arch, names in COMPILED.items():
        compiled = Compiled(arch)
        JITFunction.run = lambda kernel, *a, c=compiled, **given: c.compile(kernel, *a, **given)
        for name, weight in layouts(N, K):
            if name in names:
                tile = lookup(16, weight, 1, x.dtype, arch)
                launch(x, weight, 1, tile, Target(arch, assembly=True))
                made = compiled.made[-1]
                code = made.asm["ttgir"]
                found = LEFT.findall(code)
                assert found and set(found) == {"2"}, (arch, name, set(found))
                if arch == 90 and tile.warpgroup:
                    assert "warp_group_dot" in code, name
                    assert "ttg.local_store" not in code, f"{name} goes through shared memory"
                sync = multiplies_by_mma_sync(arch)
                stage, fixed = shared_by(tile.n, tile.m, tile.k, weight, sync)
                counted = (tile.stages - 1) * stage + fixed
                shared = made.metadata.shared
                assert shared <= min(shared_of(arch), counted + MARGIN), (arch, name, counted)
                print(arch, name, shared, counted, flush=True)


if __name__ == "__main__":
    main()
