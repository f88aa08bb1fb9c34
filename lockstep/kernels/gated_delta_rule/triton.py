"""gated_delta_step in Triton.

Sums run inside one warp, in one binary for any query length: the number of rows and tokens is never
a compile-time constant, so replay, single steps and windows share their bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.gated_delta_rule import (
    L2_EPS,
    GatedDeltaState,
    gated_delta_step,
)

MOST_VALUES = 16


@triton.jit
def head_channels(unit, lanes, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """First channel and width of head `unit` of [all q | all k | all v]."""
    is_value = unit >= 2 * HK
    first = tl.where(is_value, 2 * HK * K + (unit - 2 * HK) * V, unit * K)
    return first + lanes, lanes < tl.where(is_value, V, K)


@triton.jit(
    do_not_specialize=["length", "row_stride", "token_stride", "slot_stride"],
    do_not_specialize_on_alignment=["mixed", "g", "conv_weight", "conv", "heads", "decay"],
)
def _step_inputs_kernel(
    mixed, g, conv_weight, conv, slots, pending, heads, decay,
    length, row_stride, token_stride, slot_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One (row, head of q, k or v): convolution, SiLU, l2 norm; then the raw inputs are kept."""
    s, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c, live = head_channels(unit, tl.arange(0, BLOCK), HK, K, V)
    channels: tl.constexpr = 2 * HK * K + HV * V
    conv += tl.load(slots + s).to(tl.int64) * slot_stride + c
    past = conv + tl.load(pending + s).to(tl.int64) * channels
    mixed += s * row_stride + c
    for t in range(length):
        total = tl.zeros((BLOCK,), tl.float32)
        for j in tl.static_range(R + 1):
            old = tl.load(past + (t + j) * channels, mask=live & (t + j < R), other=0.0)
            new = tl.load(mixed + (t + j - R) * token_stride, mask=live & (t + j >= R), other=0.0)
            x = tl.where(t + j < R, old, new).to(tl.float32)
            tap = tl.load(conv_weight + c * (R + 1) + j, mask=live, other=0.0).to(tl.float32)
            total += x * tap
        y = total / (1.0 + tl.exp(-total))
        at = s * length + t
        if unit < 2 * HK:
            y = y * (1.0 / tl.sqrt_rn(tl.sum(y * y, 0) + EPS))
            y = tl.where(unit < HK, y * K**-0.5, y)
        else:
            fade = tl.exp(tl.load(g + at * HV + unit - 2 * HK))
            tl.store(decay + at * HV + unit - 2 * HK, fade)
        tl.store(heads + at * channels + c, y, mask=live)
    tl.debug_barrier()
    for i in range(R + length):  # ascending: a line is read before it is overwritten
        old = tl.load(past + i * channels, mask=live & (i < R), other=0.0)
        new = tl.load(mixed + (i - R) * token_stride, mask=live & (i >= R), other=0.0)
        tl.store(conv + i * channels, tl.where(i < R, old, new), mask=live)


@triton.jit
def _write(state, fade, k, u):
    """The decay and the rank-1 update: the one expression of stepping and replay."""
    return state * fade + k[:, None] * u[None, :]


@triton.jit(
    do_not_specialize=["length", "u_stride", "k_stride", "decay_stride"],
    do_not_specialize_on_alignment=[
        "heads", "decay", "beta", "kept_u", "kept_k", "kept_decay", "out",
    ],
)  # fmt: skip
def _step_kernel(
    heads, decay, beta, recurrent, kept_u, kept_k, kept_decay, slots, pending, out,
    length, recurrent_stride, u_stride, k_stride, decay_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One (row, value head, block of V): replay, write the state, run the window, keep u."""
    s, h = (tl.program_id(0) // HV).to(tl.int64), tl.program_id(0) % HV
    kh = h // (HV // HK)
    channels: tl.constexpr = 2 * HK * K + HV * V
    i, j = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    slot = tl.load(slots + s).to(tl.int64)
    kept_u += slot * u_stride + h * V + j
    kept_k += slot * k_stride + kh * K + i
    kept_decay += slot * decay_stride + h
    place = recurrent + slot * recurrent_stride + h * K * V + i[:, None] * V + j[None, :]
    inside = (i < K)[:, None] & (j < V)[None, :]
    state = tl.load(place, mask=inside, other=0.0)
    for t in range(tl.load(pending + s).to(tl.int32)):
        k = tl.load(kept_k + t * HK * K, mask=i < K, other=0.0)
        u = tl.load(kept_u + t * HV * V, mask=j < V, other=0.0)
        state = _write(state, tl.load(kept_decay + t * HV), k, u)
    tl.store(place, state, mask=inside)
    tl.debug_barrier()
    for t in range(length):
        at = s * length + t
        line = heads + at * channels
        q = tl.load(line + kh * K + i, mask=i < K, other=0.0)
        k = tl.load(line + (HK + kh) * K + i, mask=i < K, other=0.0)
        v = tl.load(line + 2 * HK * K + h * V + j, mask=j < V, other=0.0)
        fade, rate = tl.load(decay + at * HV + h), tl.load(beta + at * HV + h)
        seen = tl.sum(k[:, None] * (state * fade), 0)
        u = (v - seen) * rate
        state = _write(state, fade, k, u)
        tl.store(out + (at * HV + h) * V + j, tl.sum(q[:, None] * state, 0), mask=j < V)
        tl.store(kept_u + t * HV * V, u, mask=j < V)


@triton.jit(do_not_specialize=["length", "k_stride", "decay_stride"])
def _keep_kernel(
    heads, decay, kept_k, kept_decay, slots, length, k_stride, decay_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One (row, token): its k and decay for the next step's replay, once all have replayed."""
    s, t = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, at, lanes = tl.load(slots + s).to(tl.int64), s * length + t, tl.arange(0, BLOCK)
    k = heads + at * (2 * HK * K + HV * V) + HK * K
    kept_k += slot * k_stride + t * HK * K
    for i in range(0, HK * K, BLOCK):
        mask = i + lanes < HK * K
        tl.store(kept_k + i + lanes, tl.load(k + i + lanes, mask=mask), mask=mask)
    for i in range(0, HV, BLOCK):
        mask = i + lanes < HV
        value = tl.load(decay + at * HV + i + lanes, mask=mask)
        tl.store(kept_decay + slot * decay_stride + t * HV + i + lanes, value, mask=mask)


def sizes_of(state: GatedDeltaState) -> dict[str, int]:
    """The constants of every kernel of a layer."""
    hv, k, v = state.recurrent.shape[1:]
    return dict(HK=state.k.shape[2], HV=hv, K=k, V=v)


def blocks_of(sizes: dict[str, int], most_v: int) -> dict[str, int]:
    k, v = (max(16, triton.next_power_of_2(sizes[n])) for n in "KV")
    return dict(BLOCK_K=k, BLOCK_V=min(v, most_v))


def supports(**traits: Any) -> str | None:
    for name in ("key_dim", "value_dim"):
        if not 1 <= traits.get(name, 64) <= 128:
            return f"{name} {traits[name]} is not in 1 .. 128"
    return gpu_trait(**traits)


@gated_delta_step.backend("triton", supports=supports)
def gated_delta_step_triton(
    mixed: Tensor,
    g: Tensor,
    beta: Tensor,
    conv_weight: Tensor,
    state: GatedDeltaState,
    slots: Tensor,
    pending: Tensor,
) -> Tensor:
    """See lockstep.kernels.gated_delta_rule.gated_delta_step. Kernel order guards shared reads."""
    rows, length, channels = mixed.shape
    sizes, exact = sizes_of(state), dict(num_warps=1, enable_fp_fusion=False)
    hk, hv, v = sizes["HK"], sizes["HV"], sizes["V"]
    g, beta, conv_weight = g.contiguous(), beta.contiguous(), conv_weight.contiguous()
    heads = torch.empty(rows, length, channels, dtype=torch.float32, device=mixed.device)
    decay = torch.empty(rows, length, hv, dtype=torch.float32, device=mixed.device)
    out = torch.empty(rows, length, hv, v, dtype=torch.float32, device=mixed.device)
    if not out.numel():
        return out
    block = triton.next_power_of_2(max(sizes["K"], v))
    _step_inputs_kernel[(rows, 2 * hk + hv)](
        mixed, g, conv_weight, state.conv, slots, pending, heads, decay, length,
        mixed.stride(0), mixed.stride(1), state.conv.stride(0),
        **sizes, R=conv_weight.shape[1] - 1, BLOCK=block, EPS=L2_EPS, **exact,
    )  # fmt: skip
    blocks = blocks_of(sizes, MOST_VALUES)
    _step_kernel[(rows * hv, triton.cdiv(v, blocks["BLOCK_V"]))](
        heads, decay, beta, state.recurrent, state.u, state.k, state.decay, slots, pending, out,
        length, state.recurrent.stride(0), state.u.stride(0), state.k.stride(0),
        state.decay.stride(0), **sizes, **blocks, **exact,
    )  # fmt: skip
    _keep_kernel[(rows, length)](
        heads, decay, state.k, state.decay, slots, length, state.k.stride(0),
        state.decay.stride(0), **sizes, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return out
