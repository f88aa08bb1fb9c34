"""lora on a CPU by a Numba kernel: one call for the tokens of all adapters."""

import torch
from torch import Tensor

from lockstep.kernels.backends import numba_trait
from lockstep.kernels.lora import lora
from lockstep.kernels.lora.cpu import lora_cpu
from lockstep.kernels.lora.numba_kernels import KERNELS
from lockstep.kernels.simd.strides import address, address_of_rows
from lockstep.kernels.simd.threads import split_range


@lora.backend("numba", supports=numba_trait)
def lora_numba(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    parts: Tensor,
    adapter_ids: Tensor,
) -> Tensor:
    """See lockstep.kernels.lora.contract.lora."""
    # Most steps have requests of the base model only: x is not converted for them.
    if not adapter_ids.any():
        return y
    if not a.dtype == b.dtype == y.dtype:
        return lora_cpu(y, x, a, b, scales, parts, adapter_ids)
    tokens, columns = y.shape
    adapters, num_parts = scales.shape
    k_size = a.shape[2]
    rank = b.shape[1]
    x = x.float()
    x_address, x_stride = address_of_rows("x", x, torch.float32, tokens, k_size)
    kernel = KERNELS[y.dtype]
    operands = (
        address("y", y, y.dtype, tokens * columns),
        x_address,
        address("a", a, y.dtype, adapters * num_parts * rank * k_size),
        address("b", b, y.dtype, adapters * rank * columns),
        address("scales", scales, torch.float32, adapters * num_parts),
        address("parts", parts, torch.int32, columns),
        address("adapter_ids", adapter_ids, torch.int32, tokens),
    )

    def run(begin: int, end: int) -> None:
        kernel(*operands, begin, end, x_stride, columns, k_size, rank, num_parts)

    split_range(tokens, run)
    return y
