"""Compile fp8_linear for GPUs that multiply e4m3 operands, without one, and check its code.

Any number of tokens must run on one instruction, and the sums of blocks must be added in fp32: the
accumulator of an FP8 product has fewer bits.

    python -m tests.kernels.compile_fp8 [--quick]

Prints architecture, scales, tokens, registers and stack bytes per thread. --quick: Hopper with a
scale per block.
"""

import re
import sys
from itertools import product

import torch
from triton.runtime.jit import JITFunction

from lockstep.kernels.compile_target import CompileTarget
from lockstep.kernels.formats.weights import Fp8Weight
from lockstep.kernels.fp8_linear.triton import choose_tile, launch
from tests.kernels.compile_quantized import Compiled, resource_usage

PRODUCT = {90: r"wgmma\.mma_async\S*\.m64n\d+k32\.f32\.e4m3\.e4m3", 89: r"mma\.sync\S*k32\S*e4m3"}
"""Instruction of a product by architecture."""
TOKENS = (1, 17, 64, 65, 8192)
N = 5120
K = 17408
SPLIT_K = 2
BLOCK = 128
EPILOGUE_STACK = 96
"""Maximum bytes of stack per thread: 23 scales of a wide tile, stored once per partition."""


def main(quick: bool) -> None:
    """Compile all; raise if a product has another instruction, or if its sum is not added."""
    compile_hopper((BLOCK,) if quick else (BLOCK, K))
    for arch in (90,) if quick else PRODUCT:
        compiled = Compiled(arch)
        JITFunction.run = lambda kernel, *a, c=compiled, **kwargs: c.compile(kernel, *a, **kwargs)
        target = CompileTarget(arch, inline_ptx=True)
        for block_k in (BLOCK,) if quick else (BLOCK, K):
            weight = Fp8Weight.empty(N, K, BLOCK, block_k, device="meta")
            for tokens in TOKENS:
                x = torch.empty(tokens, K, dtype=torch.bfloat16, device="meta")
                tile = choose_tile(tokens, SPLIT_K, True, target)
                parts = (SPLIT_K,) if tile.splits else ()
                dtype = torch.float32 if tile.splits else torch.bfloat16
                out = torch.empty(*parts, tokens, N, dtype=dtype, device="meta")
                launch(x, weight, SPLIT_K, tile, target, out)
                outputs = tile.m * tile.n // (32 * tile.warps)
                label = (arch, block_k, tokens)
                check_code(compiled, arch, outputs, tile.splits, block_k == BLOCK, label)


def compile_hopper(block_ks: tuple[int, ...]) -> None:
    """Compile hopper.py for each number of tokens, with and without partials in memory."""
    from lockstep.kernels.fp8_linear.hopper import CTA_ROWS, choose_hopper_tile, launch_hopper

    compiled = Compiled(90)
    JITFunction.run = lambda kernel, *a, **kwargs: compiled.compile(kernel, *a, **kwargs)
    target = CompileTarget(90, inline_ptx=True)
    for block_k, tokens, may_split in product(block_ks, TOKENS, (True, False)):
        weight = Fp8Weight.empty(N, K, BLOCK, block_k, device="meta")
        x = torch.empty(tokens, K, dtype=torch.bfloat16, device="meta")
        tile = choose_hopper_tile(tokens, weight, SPLIT_K, may_split)
        parts = (SPLIT_K,) if tile.splits else ()
        dtype = torch.float32 if tile.splits else torch.bfloat16
        out = torch.empty(*parts, tokens, N, dtype=dtype, device="meta")
        launch_hopper(x, weight, SPLIT_K, tile, target, out)
        # Two consumers, each with the code of every partition.
        columns = tile.outputs if tile.tokens == CTA_ROWS else tile.tokens
        outputs = CTA_ROWS * columns // 128
        by_block = block_k == BLOCK
        check_code(compiled, 90, outputs, tile.splits, by_block, ("hopper", block_k, tokens, tile))


def check_code(
    compiled: Compiled,
    arch: int,
    outputs: int,
    splits: bool,
    by_block: bool,
    label: tuple[object, ...],
) -> None:
    """Assert that the last kernel has the instruction and the additions; print its resource usage.

    outputs: elements of the result in the code of a thread. splits: partials go to memory.
    by_block: there is a scale per block, so a block is scaled and added by FMA.
    """
    result = compiled.made[-1]
    ptx = result.asm["ptx"]
    assert re.search(PRODUCT[arch], ptx), label
    assert "f16.f16" not in ptx, label
    # A thread adds each of its outputs once per block, and once per level of the tree.
    partitions = 1 if splits else SPLIT_K
    fused = len(re.findall(r"fma\.rn\.f32 ", ptx))
    additions = len(re.findall(r"add(?:\.rn)?\.f32 ", ptx)) + fused
    assert additions == outputs * (2 * partitions - 1), (label, additions)
    assert fused == (outputs * partitions if by_block else 0), (label, fused)
    print(*label, *resource_usage(result.asm["cubin"], EPILOGUE_STACK), flush=True)


if __name__ == "__main__":
    main("--quick" in sys.argv)
