"""Compiles the products of experts for a Hopper GPU, which needs none, at Qwen3.6-35B-A3B's sizes:
whatever the number of tokens, packed weights or not, wgmma alone reads natural K order.

Packed ones are its left operand with kWidth 2, made in registers out of their words. At a few
tokens they pass through a ring, and mma.sync multiplies: words come 16 bytes at a time, and nothing
spills.

    python -m tests.kernels.compile_experts [--quick]

--quick: of int4 alone.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from lockstep.kernels.architecture import shared_memory_limit
from lockstep.kernels.experts.triton import experts_triton
from lockstep.kernels.formats.weights import Fp4Weight, Fp8Weight, IntWeight, QuantizedWeight
from tests.kernels.compile_quantized import LEFT, Compiled, spills_of

ARCH = 90
TOKENS = (1, 1024)
"""Of the form for few tokens, and of the other."""
RINGS = {"up_pipeline_kernel", "down_pipeline_kernel"}
PRODUCTS = {"up_kernel", "down_combine_kernel", "down_kernel", *RINGS}
EXPERTS = 256
HIDDEN = 2048
INNER = 512


def layouts() -> Iterator[tuple[str, Tensor | QuantizedWeight, Tensor | QuantizedWeight]]:
    """(name, up, down), without memory."""
    up = (EXPERTS * 2 * INNER, HIDDEN)
    down = (EXPERTS * HIDDEN, INNER)
    plain = torch.empty(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.bfloat16, device="meta")
    yield "plain", plain, plain.new_empty(EXPERTS, HIDDEN, INNER)
    yield "int4", IntWeight.empty(*up, device="meta"), IntWeight.empty(*down, device="meta")
    blocks = (Fp8Weight.empty(*shape, 128, 128, device="meta") for shape in (up, down))
    yield "fp8 by blocks", *blocks
    yield "nvfp4", Fp4Weight.empty(*up, device="meta"), Fp4Weight.empty(*down, device="meta")


def main(quick: bool) -> None:
    """Compiles them; prints kernel, layout, tokens and bytes of shared memory of each."""
    compiled = Compiled(ARCH)

    def run(kernel: Any, *args: Any, **given: Any) -> None:
        if kernel.__name__ in PRODUCTS:
            compiled.compile(kernel, *args, **given)

    JITFunction.run = run

    def half(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    for name, up, down in layouts():
        if quick and name != "int4":
            continue
        for tokens in TOKENS:
            ids = torch.empty(tokens, 8, dtype=torch.int32, device="meta")
            x = half(tokens, HIDDEN)
            experts_triton(x, up, down, ids, half(tokens, 8), half(tokens, HIDDEN))
            found = {made.metadata.name for made in compiled.made}
            assert found & RINGS == (RINGS if tokens == 1 and name != "plain" else set()), name
            for made in compiled.made:
                check(name, made)
                print(made.metadata.name, name, tokens, made.metadata.shared, flush=True)
            compiled.made.clear()


def check(name: str, made: Any) -> None:
    """What the matrix units are given."""
    ptx = made.asm["ptx"]
    ring = made.metadata.name in RINGS
    assert ("wgmma.mma_async" in ptx) != ring and ("mma.sync" in ptx) == ring, name
    assert made.metadata.shared <= shared_memory_limit(ARCH), name
    if ring:
        assert "ld.shared.v4" in ptx, name
        spills_of(made.asm["cubin"], max_stack=0)
    elif name != "plain":
        found = LEFT.findall(made.asm["ttgir"])
        assert found and set(found) == {"2"}, (name, set(found))


if __name__ == "__main__":
    main("--quick" in sys.argv)
