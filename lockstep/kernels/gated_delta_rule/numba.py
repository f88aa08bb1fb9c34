"""gated_delta_step on a CPU by one Numba kernel."""

import torch
from torch import Tensor

from lockstep.kernels.backends import numba_trait
from lockstep.kernels.gated_delta_rule import GatedDeltaWeights, gated_delta_step
from lockstep.kernels.gated_delta_rule.numba_kernels import KERNELS
from lockstep.kernels.recurrent.state import RecurrentState
from lockstep.kernels.simd.strides import address, token_stride
from lockstep.kernels.simd.threads import split_range


@gated_delta_step.backend("numba", supports=numba_trait)
def gated_delta_step_numba(
    mixed: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: RecurrentState,
    slots: Tensor,
    starts: Tensor,
    folded: Tensor,
    flush: int = 1,
    committed: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.gated_delta_rule.gated_delta_step."""
    rows, window = mixed.shape[:2]
    out = torch.zeros(z.shape, dtype=z.dtype)
    mixed, mixed_stride = token_stride(mixed)
    z, z_stride = token_stride(z)
    b, b_stride = token_stride(b)
    a, a_stride = token_stride(a)
    taps = weights.conv.t().contiguous()
    operands = (
        *(x.data_ptr() for x in (mixed, z, b, a, taps, weights.a_log, weights.dt_bias)),
        weights.norm.data_ptr(),
        *(x.data_ptr() for x in (state.recurrent, state.conv, state.u, state.k, state.decay)),
        address(slots, torch.int64), address(starts, torch.int32), address(folded, torch.int32),
        0 if committed is None else address(committed, torch.int32), out.data_ptr(),
        window, *state.sizes(), len(taps) - 1, state.conv.shape[1], state.k.shape[1], state.grid,
        mixed_stride, z_stride, b_stride, a_stride, weights.eps, flush,
    )  # fmt: skip
    kernel = KERNELS[mixed.dtype, state.recurrent.dtype]
    split_range(rows, lambda begin, end: kernel(*operands, begin, end))
    return out
