"""Launchers of gated_delta_step and gated_delta_chunk in Triton."""

from typing import Any

import torch
import triton
from torch import Tensor

from lockstep.kernels import architecture
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.gated_delta_rule import (
    L2_EPS,
    GatedDeltaWeights,
    gated_delta_chunk,
    gated_delta_step,
)
from lockstep.kernels.gated_delta_rule.chunk_kernels import (
    chunk_inner_kernel,
    chunk_inputs_kernel,
    chunk_out_kernel,
    chunk_state_kernel,
)
from lockstep.kernels.gated_delta_rule.step_kernels import inputs_kernel, norm_kernel
from lockstep.kernels.recurrent.chunk import (
    keep_raw_inputs,
    list_chunks,
    precision_of,
)
from lockstep.kernels.recurrent.state import RecurrentState
from lockstep.kernels.recurrent.step import SECTOR, WIDEST, blocks_of, flat, launch_walk, sizes_of
from lockstep.step import GRID


def supports(**traits: Any) -> str | None:
    """None where these kernels serve a layer of these traits, else the reason why not."""
    for name in ("key_dim", "value_dim"):
        if not 1 <= traits.get(name, WIDEST) <= WIDEST:
            return f"{name} {traits[name]} is not in 1 .. {WIDEST}"
    return gpu_trait(**traits)


MOST_TOKENS = 4
"""Window tokens whose inputs are made at once; in windows of fewer, as many as there are."""
HEADS = 8
"""Heads of a program of the norm. H200, 64 rows of 4 tokens: 3.1 us, 3.4 with 4, 8.5 with programs
of one head and one warp."""
NORM_WARPS = 4
"""Warps of such a program."""


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
    f32: dict[str, Any] = dict(dtype=torch.float32, device=mixed.device)
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
    norm_kernel[(triton.cdiv(rows * length * hv, HEADS),)](
        o, z, weights.norm, out, rows * length * hv, z.stride(0), weights.eps,
        HV=hv, V=v, BLOCK_V=blocks["BLOCK_V"], HEADS=HEADS,
        num_warps=NORM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


# Times below: H200, 8,192 tokens of 32 heads of 128 x 128.
STATE_VALUES = 32
"""Values of V of a program of the state's walk: 367 us; with two stages 443, 650 with 16."""
OUT_VALUES = 64
"""Values of V of a program of the outputs: 226 us, 290 with 32, 274 with 128."""
INPUT_WARPS = 8
"""Warps of a program: 178 us, 230 with 4."""
INNER_WARPS = 4
"""442 us, 908 with 8, which gives other bits: sums of the substitution follow its layout."""
STATE_WARPS = 4
"""367 us, 387 with 8."""
STATE_STAGES = 3
"""Chunks of w, k and u in shared memory, of which two are under way while one is multiplied, where
so many fit: 367 us, 443 with 2, 611 with 1."""
OUT_WARPS = 4
"""226 us; 391 with 8 and 128 values."""
SIDE = 16
"""Side of the diagonal blocks of a chunk's triangle that are inverted by substitution: the whole
triangle of 64 took 1.1 ms instead of 0.2."""


@gated_delta_chunk.backend("triton", supports=supports)
def gated_delta_chunk_triton(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: RecurrentState,
    cu_seqlens: Tensor,
    starts: Tensor,
    state_src: Tensor,
    state_slots: Tensor,
    snapshot_slots: Tensor,
) -> Tensor:
    """See lockstep.kernels.gated_delta_rule.gated_delta_chunk. No length is read on the host."""
    tokens, channels = mixed.shape
    rows = starts.shape[0]
    sizes = sizes_of(state)
    hk, hv, k, v = state.sizes()
    taps = weights.conv.t().contiguous()
    ring_slots = state.conv.shape[1]
    history = taps.shape[0] - 1
    f32 = torch.float32
    out = torch.empty(tokens, hv, v, dtype=f32, device=mixed.device)
    if not out.numel() or not rows:
        return out
    chunks, firsts = list_chunks(out, cu_seqlens, state_slots)
    most = len(chunks)
    shapes = ((tokens, channels), (tokens, hv, v), (tokens, hv, k), (most, hv, GRID, GRID))
    heads, u, w, scores = (torch.empty(n, dtype=f32, device=mixed.device) for n in shapes)
    growth = torch.empty(most, hv, GRID, dtype=f32, device=mixed.device)
    states = torch.empty(most, hv, k, v, dtype=state.recurrent.dtype, device=mixed.device)
    exact: dict[str, Any] = dict(GRID=GRID, enable_fp_fusion=False)
    precision = precision_of(mixed.dtype)
    chunk_inputs_kernel[(most, 2 * hk + hv)](
        mixed, taps, state.conv, cu_seqlens, starts, state_src, chunks, heads,
        mixed.stride(0), ring_slots, **sizes, R=history,
        BLOCK=triton.next_power_of_2(max(k, v)), EPS=L2_EPS, num_warps=INPUT_WARPS, **exact,
    )  # fmt: skip
    chunk_inner_kernel[(most, hv)](
        heads, b, a, weights.a_log, weights.dt_bias, cu_seqlens, chunks, u, w, scores, growth,
        b.stride(0), a.stride(0), **sizes, **blocks_of(sizes, WIDEST), PRECISION=precision,
        SIDE=SIDE, SECTOR=SECTOR, num_warps=INNER_WARPS, **exact,
    )  # fmt: skip
    blocks = blocks_of(sizes, STATE_VALUES)
    chunk = GRID * (2 * blocks["BLOCK_K"] + blocks["BLOCK_V"] + 1) * f32.itemsize
    arch = architecture.sm_number(mixed.device)
    stages = architecture.fit_stages(STATE_STAGES, chunk, chunk, arch)
    chunk_state_kernel[(rows * hv, triton.cdiv(v, blocks["BLOCK_V"]))](
        heads, u, w, growth, state.recurrent, states, cu_seqlens, starts, state_src, state_slots,
        snapshot_slots, firsts, state.recurrent.stride(0),
        **sizes, **blocks, PRECISION=precision, num_warps=STATE_WARPS, num_stages=stages, **exact,
    )  # fmt: skip
    blocks = blocks_of(sizes, OUT_VALUES)
    chunk_out_kernel[(most, hv, triton.cdiv(v, blocks["BLOCK_V"]))](
        heads, u, scores, growth, states, cu_seqlens, chunks, out,
        **sizes, **blocks, PRECISION=precision, SECTOR=SECTOR, num_warps=OUT_WARPS, **exact,
    )  # fmt: skip
    places = (cu_seqlens, starts, state_src, state_slots, snapshot_slots)
    keep_raw_inputs(mixed, state, history, *places)
    return out
