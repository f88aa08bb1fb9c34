"""Compile the products of experts for a Hopper GPU, without one, at Qwen3.6-35B-A3B's sizes.

For every number of tokens, and for dense and quantized weights, only wgmma reads K in natural
order. Quantized weights are its left operand with kWidth 2, dequantized in registers. For a few
tokens they pass through a multistage pipeline to mma.sync, with words loaded 16 bytes at a time and
no spills.

    python -m tests.kernels.compile_experts [--quick]

--quick: int4 only.
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
from tests.kernels.compile_quantized import LEFT, Compiled, resource_usage

ARCH = 90
TOKENS = (1, 1024)
"""Numbers of tokens: the first takes the form for few tokens, the second the other form."""
PIPELINE_KERNELS = {"up_pipeline_kernel", "down_pipeline_kernel"}
PRODUCTS = {"up_kernel", "down_combine_kernel", "down_kernel", *PIPELINE_KERNELS}
EXPERTS = 256
HIDDEN = 2048
INNER = 512


def layouts() -> Iterator[tuple[str, Tensor | QuantizedWeight, Tensor | QuantizedWeight]]:
    """Yield (name, up, down), without memory."""
    up = (EXPERTS * 2 * INNER, HIDDEN)
    down = (EXPERTS * HIDDEN, INNER)
    plain = torch.empty(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.bfloat16, device="meta")
    yield "plain", plain, plain.new_empty(EXPERTS, HIDDEN, INNER)
    for name, scale in (("int4", 0.0), ("int4, scales of 1", 1.0)):
        integers = [IntWeight.empty(*shape, device="meta") for shape in (up, down)]
        for weight in integers:
            vars(weight)["max_scale"] = scale
        yield name, *integers
    blocks = (Fp8Weight.empty(*shape, 128, 128, device="meta") for shape in (up, down))
    yield "fp8 by blocks", *blocks
    yield "nvfp4", Fp4Weight.empty(*up, device="meta"), Fp4Weight.empty(*down, device="meta")


def main(quick: bool) -> None:
    """Compile them; print kernel, layout, tokens and bytes of shared memory of each."""
    compiled = Compiled(ARCH)

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        if kernel.__name__ in PRODUCTS:
            compiled.compile(kernel, *args, **kwargs)

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
            result = {created.metadata.name for created in compiled.made}
            assert result & PIPELINE_KERNELS == (
                PIPELINE_KERNELS if tokens == 1 and name != "plain" else set()
            ), name
            for created in compiled.made:
                check(name, created)
                print(created.metadata.name, name, tokens, created.metadata.shared, flush=True)
            compiled.made.clear()


def check(name: str, result: Any) -> None:
    """Assert the operands of the matrix units."""
    ptx = result.asm["ptx"]
    pipelined = result.metadata.name in PIPELINE_KERNELS
    assert ("wgmma.mma_async" in ptx) != pipelined and ("mma.sync" in ptx) == pipelined, name
    assert result.metadata.shared <= shared_memory_limit(ARCH), name
    if pipelined:
        assert "ld.shared.v4" in ptx, name
        resource_usage(result.asm["cubin"], max_stack=0)
    elif name != "plain":
        matches = LEFT.findall(result.asm["ttgir"])
        assert matches and set(matches) == {"2"}, (name, set(matches))


if __name__ == "__main__":
    main("--quick" in sys.argv)
