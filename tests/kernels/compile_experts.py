"""Compiles the products of experts for a Hopper GPU, which needs none, at Qwen3.6-35B-A3B's sizes:
whatever the number of tokens, the tensor cores read natural K order through wgmma alone.

    python -m tests.kernels.compile_experts
"""

from typing import Any

import torch
from triton.runtime.jit import JITFunction

from lockstep.kernels.experts.triton import experts_triton
from tests.kernels.compile_launches import Launches

TOKENS = (1, 1024)
"""Of the form for few tokens, and of the other."""
PRODUCTS = {"_up_kernel", "_down_sum_kernel", "_down_kernel"}


def main() -> None:
    """Compiles them, and prints each that multiplies."""
    launches = Launches()

    def run(kernel: Any, *args: Any, **given: Any) -> None:
        if kernel.__name__ in PRODUCTS:
            launches.compile(kernel, *args, **given)

    JITFunction.run = run

    def half(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    for tokens in TOKENS:
        ids = torch.empty(tokens, 8, dtype=torch.int32, device="meta")
        up = half(256, 1024, 2048)
        down = half(256, 2048, 512)
        experts_triton(half(tokens, 2048), up, down, ids, half(tokens, 8), half(tokens, 2048))
    for name, code in launches.code:
        assert "wgmma.mma_async" in code and "mma.sync" not in code, name
        print(name)


if __name__ == "__main__":
    main()
