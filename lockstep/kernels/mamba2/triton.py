"""Launchers of mamba2_step and mamba2_chunk in Triton."""

from typing import Any

import torch
import triton
from torch import Tensor

from lockstep.kernels import architecture
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.mamba2 import Mamba2Weights, mamba2_chunk, mamba2_step
from lockstep.kernels.mamba2.chunk_kernels import (
    chunk_inputs_kernel,
    out_kernel,
    scores_kernel,
    state_kernel,
)
from lockstep.kernels.mamba2.step_kernels import step_inputs_kernel
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
    for name in ("state_dim", "head_dim"):
        if not 1 <= traits.get(name, WIDEST) <= WIDEST:
            return f"{name} {traits[name]} is not in 1 .. {WIDEST}"
    return gpu_trait(**traits)


MOST_TOKENS = 4
"""Window tokens whose inputs are made at once; in windows of fewer, as many as there are."""


@mamba2_step.backend("triton", supports=supports)
def mamba2_step_triton(
    mixed: Tensor,
    dt: Tensor,
    weights: Mamba2Weights,
    state: RecurrentState,
    slots: Tensor,
    starts: Tensor,
    folded: Tensor,
    flush: int = 1,
) -> Tensor:
    """See lockstep.kernels.mamba2.mamba2_step."""
    rows, length, channels = mixed.shape
    sizes = sizes_of(state)
    groups, count, _, p = state.sizes()
    out = torch.empty(rows, length, count, p, dtype=torch.float32, device=mixed.device)
    if not out.numel():
        return out
    mixed = flat(mixed)
    dt = dt.flatten(0, 1)
    taps = weights.conv.t().contiguous()
    heads = out.new_empty(rows, length, channels + 2 * count)
    step_inputs_kernel[(rows, 2 * groups + count)](
        mixed, dt, taps, weights.conv_bias, weights.a_log, weights.dt_bias, state.conv, state.k,
        state.decay, slots, starts, heads, length, state.conv.shape[1], state.k.shape[1],
        mixed.stride(0), dt.stride(0), weights.shortest, weights.longest, **sizes,
        **blocks_of(sizes, WIDEST),
        R=len(taps) - 1, TOKENS=min(MOST_TOKENS, triton.next_power_of_2(length)),
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    launch_walk(state, heads, out, slots, starts, folded, flush, weights.d, corrects=False)
    return out


# Not measured: as in the delta rule's kernels, whose shapes these are.
CHANNELS = 128
"""Channels of a program of the convolution."""
STATE_VALUES = 32
"""Channels of P of a program of the state's walk."""
OUT_VALUES = 64
"""Channels of P of a program of the outputs."""
INPUT_WARPS = 8
"""Warps of a program of the convolution."""
WARPS = 4
"""Of every other program."""
STATE_STAGES = 3
"""Chunks of B and x in shared memory, of which two are under way while one is multiplied, where so
many fit."""


def _state_stages(blocks: dict[str, int], precision: str, itemsize: int, arch: int) -> int:
    """Stages of state_kernel: beside its chunks, the factors of its product are in shared memory.

    What Triton 3.6 asks for: B, once for one tf32 product; twice, and dt x once, for three.
    """
    b, x = GRID * blocks["BLOCK_K"] * itemsize, GRID * blocks["BLOCK_V"] * itemsize
    factors = 2 * b + x if precision == "tf32x3" else b
    return architecture.fit_stages(STATE_STAGES, b + x + 2 * GRID * itemsize, factors, arch)


@mamba2_chunk.backend("triton", supports=supports)
def mamba2_chunk_triton(
    mixed: Tensor,
    dt: Tensor,
    weights: Mamba2Weights,
    state: RecurrentState,
    cu_seqlens: Tensor,
    starts: Tensor,
    state_src: Tensor,
    state_slots: Tensor,
    snapshot_slots: Tensor,
) -> Tensor:
    """See lockstep.kernels.mamba2.mamba2_chunk. No length is read on the host."""
    tokens, channels = mixed.shape
    rows = starts.shape[0]
    sizes = sizes_of(state)
    groups, count, n, p = state.sizes()
    taps = weights.conv.t().contiguous()
    history = len(taps) - 1
    f32: dict[str, Any] = dict(dtype=torch.float32, device=mixed.device)
    out = torch.empty(tokens, count, p, **f32)
    if not out.numel() or not rows:
        return out
    chunks, firsts = list_chunks(out, cu_seqlens, state_slots)
    most = len(chunks)
    heads = torch.empty(tokens, channels, **f32)
    scores = torch.empty(most, groups, GRID, GRID, **f32)
    steps, growth = (torch.empty(most, count, GRID, **f32) for _ in range(2))
    states = torch.empty(most, count, n, p, dtype=state.recurrent.dtype, device=mixed.device)
    exact: dict[str, Any] = dict(GRID=GRID, enable_fp_fusion=False)
    products: dict[str, Any] = dict(PRECISION=precision_of(mixed.dtype), num_warps=WARPS, **exact)
    chunk_inputs_kernel[(most, triton.cdiv(channels, CHANNELS))](
        mixed, taps, weights.conv_bias, state.conv, cu_seqlens, starts, state_src, chunks, heads,
        mixed.stride(0), state.conv.shape[1], C=channels, R=history, BLOCK=CHANNELS,
        num_warps=INPUT_WARPS, **exact,
    )  # fmt: skip
    scores_kernel[(most, groups)](
        heads, dt, weights.a_log, weights.dt_bias, cu_seqlens, chunks, scores, steps, growth,
        dt.stride(0), weights.shortest, weights.longest, **sizes, **blocks_of(sizes, WIDEST),
        **products,
    )  # fmt: skip
    blocks = blocks_of(sizes, STATE_VALUES)
    arch = architecture.sm_number(mixed.device)
    stages = _state_stages(blocks, products["PRECISION"], heads.itemsize, arch)
    state_kernel[(rows * count, triton.cdiv(p, blocks["BLOCK_V"]))](
        heads, steps, growth, state.recurrent, states, cu_seqlens, starts, state_src, state_slots,
        snapshot_slots, firsts, state.recurrent.stride(0), **sizes, **blocks, num_stages=stages,
        **products,
    )  # fmt: skip
    blocks = blocks_of(sizes, OUT_VALUES)
    out_kernel[(most, count, triton.cdiv(p, blocks["BLOCK_V"]))](
        heads, steps, growth, scores, states, weights.d, cu_seqlens, chunks, out,
        **sizes, **blocks, SECTOR=SECTOR, **products,
    )  # fmt: skip
    places = (cu_seqlens, starts, state_src, state_slots, snapshot_slots)
    keep_raw_inputs(mixed, state, history, *places)
    return out
