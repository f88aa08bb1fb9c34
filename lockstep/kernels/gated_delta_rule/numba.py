"""gated_delta_step on a CPU by one Numba kernel."""

import torch
from torch import Tensor

from lockstep.kernels.backends import numba_trait
from lockstep.kernels.gated_delta_rule import (
    GatedDeltaWeights,
    add_partials,
    gated_delta_step,
)
from lockstep.kernels.gated_delta_rule.numba_kernels import KERNELS
from lockstep.kernels.recurrent.state import RecurrentState
from lockstep.kernels.simd.strides import address, check_operand, optional_address, token_stride
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
    rows, window, channels = mixed.shape
    slot_count, conv_len = state.conv.shape[:2]
    entries = state.k.shape[1]
    hk, hv, dk, dv = state.sizes()
    dtype = mixed.dtype
    heads = rows * window * hv
    b, a = add_partials(b, a, mixed)
    if channels != 2 * hk * dk + hv * dv or hv % hk:
        raise ValueError(
            f"mixed: {channels} channels do not fit a state of {hk} key heads of {dk} and {hv} "
            f"value heads of {dv}"
        )
    for name, x, size in (("z", z, heads * dv), ("b", b, heads), ("a", a, heads)):
        check_operand(name, x, dtype, size)
    out = torch.zeros(z.shape, dtype=z.dtype)
    mixed, mixed_stride = token_stride(mixed)
    z, z_stride = token_stride(z)
    b, b_stride = token_stride(b)
    a, a_stride = token_stride(a)
    taps = weights.conv.t().contiguous()
    history_entries = slot_count * entries
    operands = (
        mixed.data_ptr(), z.data_ptr(), b.data_ptr(), a.data_ptr(),
        address("conv weight", taps, dtype, len(taps) * channels),
        address("a_log", weights.a_log, torch.float32, hv),
        address("dt_bias", weights.dt_bias, torch.float32, hv),
        address("norm weight", weights.norm, dtype, dv),
        address("recurrent", state.recurrent, state.recurrent.dtype, slot_count * hv * dk * dv),
        address("conv", state.conv, dtype, slot_count * conv_len * channels),
        address("u", state.u, torch.float32, history_entries * hv * dv),
        address("k", state.k, torch.float32, history_entries * hk * dk),
        address("decay", state.decay, torch.float32, history_entries * hv),
        address("slots", slots, torch.int64, rows), address("starts", starts, torch.int32, rows),
        address("folded", folded, torch.int32, rows),
        optional_address("committed", committed, torch.int32, rows), out.data_ptr(),
        window, hk, hv, dk, dv, len(taps) - 1, conv_len, entries, state.grid,
        mixed_stride, z_stride, b_stride, a_stride, weights.eps, flush,
    )  # fmt: skip
    kernel = KERNELS[dtype, state.recurrent.dtype]
    split_range(rows, lambda begin, end: kernel(*operands, begin, end))
    return out
