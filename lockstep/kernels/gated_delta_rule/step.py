# mypy: ignore-errors
"""gated_delta_step in Triton: the state is read once and written at most once.

Three kernels a call. inputs_kernel (_window_inputs.py) makes q, k, v, decay and beta of the
window's tokens and fills the rings. walk_kernel (recurrent/_walk_triton.py) replays the tokens that
the state lacks, writes it where that is due, and steps through the window. _norm_kernel is the
gated norm. See docs/kernels/gated_delta_rule.md, where the times are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.activations._device import silu_approx
from lockstep.kernels.gated_delta_rule import (
    L2_EPS,
    GatedDeltaWeights,
    gated_delta_step,
)
from lockstep.kernels.gated_delta_rule._shared import supports
from lockstep.kernels.gated_delta_rule._window_inputs import inputs_kernel
from lockstep.kernels.recurrent._sums_triton import pairwise_sum
from lockstep.kernels.recurrent._walk_triton import WIDEST, blocks_of, flat, launch_walk, sizes_of
from lockstep.kernels.recurrent.state import RecurrentState

MOST_TOKENS = 4
"""Window tokens whose inputs are made at once; in windows of fewer, as many as there are."""
HEADS = 8
"""Heads of a program of the norm. H200, 64 rows of 4 tokens: 3.1 us, 3.4 with 4, 8.5 with programs
of one head and one warp."""
NORM_WARPS = 4
"""Warps of such a program."""


@triton.jit(do_not_specialize=["heads", "eps"])
def _norm_kernel(
    o, z, norm, out, heads, z_stride, eps,
    HV: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """HEADS of all `heads` outputs: o / rms(o) * norm * silu(z). See gated_rms_norm."""
    n = (tl.program_id(0) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None, None]
    j = tl.arange(0, BLOCK_V)[None, None, :]
    mask = (n < heads) & (j < V)
    weight = tl.load(norm + j, mask=j < V, other=0.0).to(tl.float32)
    gate = tl.load(z + n // HV * z_stride + n % HV * V + j, mask=mask, other=0.0)
    x = tl.load(o + n * V + j, mask=mask, other=0.0)
    squares = pairwise_sum(tl.reshape(x * x, (HEADS, BLOCK_V)))[:, None, None]
    x = x * tl.rsqrt(squares / V + eps) * weight * silu_approx(gate.to(tl.float32))
    tl.store(out + n * V + j, x.to(out.dtype.element_ty), mask=mask)


@gated_delta_step.backend("triton", supports=supports)
def gated_delta_step_triton(
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
) -> Tensor:
    """See lockstep.kernels.gated_delta_rule.gated_delta_step."""
    rows, length, channels = mixed.shape
    sizes = sizes_of(state)
    hk, hv, _, v = state.sizes()
    out = torch.empty(rows, length, hv, v, dtype=z.dtype, device=mixed.device)
    if not out.numel():
        return out
    mixed = flat(mixed)
    z = flat(z)
    b = b.flatten(0, 1)
    a = a.flatten(0, 1)
    taps = weights.conv.t().contiguous()
    ring_slots = state.k.shape[1]
    f32 = dict(dtype=torch.float32, device=mixed.device)
    heads = torch.empty(rows, length, channels + 2 * hv, **f32)
    o = torch.empty(out.shape, **f32)
    blocks = blocks_of(sizes, WIDEST)
    inputs_kernel[(rows, 2 * hk + hv)](
        mixed, b, a, taps, weights.a_log, weights.dt_bias, state.conv, state.k, state.decay,
        slots, starts, heads, length, state.conv.shape[1], ring_slots, mixed.stride(0),
        b.stride(0), a.stride(0),
        **sizes, **blocks, R=len(taps) - 1, L2_EPS=L2_EPS,
        TOKENS=min(MOST_TOKENS, triton.next_power_of_2(length)),
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    launch_walk(state, heads, o, slots, starts, folded, flush)
    _norm_kernel[(triton.cdiv(rows * length * hv, HEADS),)](
        o, z, weights.norm, out, rows * length * hv, z.stride(0), weights.eps,
        HV=hv, V=v, BLOCK_V=blocks["BLOCK_V"], HEADS=HEADS,
        num_warps=NORM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out
