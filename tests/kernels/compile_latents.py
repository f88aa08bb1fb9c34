"""Compile latent attention's Hopper kernel without a GPU, in all of its forms.

A CTA stores a partial for each split, one for each span, or the whole output; and it has all
columns of the values or half of them.

    python -m tests.kernels.compile_latents [--quick]

--quick: only the first form. Prints the form, columns of an accumulator, and per thread registers
and stack bytes.
"""

import sys
from typing import Any

import torch
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from lockstep.kernels.architecture import HOPPER, shared_memory_limit
from lockstep.kernels.latent_attention.cases import paged_latents
from lockstep.kernels.latent_attention.hopper import latent_attention_hopper
from lockstep.kernels.latent_attention.triton import Partition, choose_tile
from tests.kernels.compile_launches import HOPPER as TARGET
from tests.kernels.compile_launches import OPTIONS, check_wait, type_of
from tests.kernels.compile_quantized import resource_usage
from tests.kernels.layouts import compile_checked

SPILLED = {"segments": 64, "spans": 512, "whole": 1024}
"""Form -> maximum stack bytes per thread: spills at the end of a split, none in the loop."""


def compile_launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile a launch with these arguments."""
    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    fixed: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}
    types = {}
    for i, (p, value) in enumerate(zip(kernel.params, args, strict=True)):
        if p.is_constexpr:
            types[p.name] = "constexpr"
            fixed[(i,)] = value
        else:
            types[p.name] = type_of(value, (i,), fixed, aligned)
    source = GluonASTSource(fn=kernel, signature=types, constexprs=fixed, attrs=aligned)
    return compile_checked(source, target=TARGET, options=options)


def main(quick: bool) -> None:
    """Compile the forms, and assert their registers, shared memory and wgmma shapes."""
    results: list[Any] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if kernel.__name__ == "_latent_kernel":
            results.append(compile_launch(kernel, *args, **kwargs))

    JITFunction.run = run
    tile = choose_tile(torch.bfloat16, HOPPER)
    for tokens, width in ((70, 128), (1, 64)):
        batch = paged_latents(((63, tokens),), 128, 512, 64, 64, torch.bfloat16)
        for form, unit in (("segments", tile.near_split), ("spans", tile.span), ("whole", 0)):
            latent_attention_hopper(**batch, partition=Partition(unit, 1))
            code = results[-1].asm["ptx"]
            check_wait("_latent_kernel", code)
            assert "wgmma.mma_async.sync.aligned.m64n64k16" in code, form
            assert f"wgmma.mma_async.sync.aligned.m64n{width}k16" in code, form
            assert results[-1].metadata.shared <= shared_memory_limit(HOPPER), form
            print(form, width, *resource_usage(results[-1].asm["cubin"], SPILLED[form]), flush=True)
            if quick:
                return


if __name__ == "__main__":
    main("--quick" in sys.argv)
