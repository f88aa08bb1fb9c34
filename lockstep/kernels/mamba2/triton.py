"""Launchers of mamba2_step and mamba2_chunk in Triton."""

from typing import Any

import torch
from torch import Tensor

from lockstep.kernels import architecture
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.integers import ceil_div, next_power_of_2
from lockstep.kernels.mamba2 import Mamba2Weights, mamba2_chunk, mamba2_step
from lockstep.kernels.mamba2.chunk_kernels import (
    chunk_inputs_kernel,
    chunk_output_kernel,
    chunk_scores_kernel,
    chunk_state_kernel,
)
from lockstep.kernels.mamba2.step_kernels import step_inputs_kernel
from lockstep.kernels.recurrent.chunk import (
    PromptRows,
    dot_precision,
    list_chunks,
    save_raw_inputs,
)
from lockstep.kernels.recurrent.state import RecurrentState
from lockstep.kernels.recurrent.step import (
    MAX_DIM,
    SECTOR,
    block_sizes,
    flatten_tokens,
    head_sizes,
    launch_recurrent_step,
)
from lockstep.step import GRID

MAX_TOKENS = 4
"""Maximum window tokens whose inputs a CTA computes at once."""
# The tiles of the chunked form were not measured: they are those of Gated DeltaNet.
CHANNELS = 128
"""Channels of a CTA of the convolution."""
STATE_VALUES = 32
"""Columns (channels of P) of a CTA that carries the state."""
OUT_VALUES = 64
"""Columns (channels of P) of a CTA that computes outputs."""
INPUT_WARPS = 8
"""Warps of a CTA of the convolution."""
WARPS = 4
"""Warps of every other CTA."""
STATE_STAGES = 3
"""Pipeline stages (chunks of B and x) of the kernel that carries the state, where they fit."""


def supports(**traits: Any) -> str | None:
    """Return None if these kernels serve a layer of these traits, else the reason why not."""
    for name in ("state_dim", "head_dim"):
        if not 1 <= traits.get(name, MAX_DIM) <= MAX_DIM:
            return f"{name} {traits[name]} is not in 1 .. {MAX_DIM}"
    return gpu_trait(**traits)


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
    committed: Tensor | None = None,
) -> Tensor:
    """Run the window in two kernels: see lockstep.kernels.mamba2.mamba2_step."""
    rows, length, channels = mixed.shape
    sizes = head_sizes(state)
    groups, heads, _, p = state.sizes()
    # The recurrence writes the outputs of committed tokens alone; those of padding are zeros.
    create = torch.empty if committed is None else torch.zeros
    out = create(rows, length, heads, p, dtype=torch.float32, device=mixed.device)
    if not out.numel():
        return out
    mixed = flatten_tokens(mixed)
    dt = dt.flatten(0, 1)
    conv_weight = weights.conv.t().contiguous()
    inputs = out.new_empty(rows, length, channels + 2 * heads)
    step_inputs_kernel[(rows, 2 * groups + heads)](
        mixed, dt, conv_weight, weights.conv_bias, weights.a_log, weights.dt_bias, state.conv,
        state.k, state.decay, slots, starts, committed, inputs, length, state.conv.shape[1],
        state.k.shape[1], mixed.stride(0), dt.stride(0), weights.dt_min, weights.dt_max, **sizes,
        **block_sizes(sizes, MAX_DIM),
        R=len(conv_weight) - 1, TOKENS=min(MAX_TOKENS, next_power_of_2(length)),
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    launch_recurrent_step(
        state, inputs, out, slots, starts, folded, flush, committed, weights.d, delta_rule=False
    )
    return out


def _state_stages(blocks: dict[str, int], precision: str, itemsize: int, number: int) -> int:
    """Return the pipeline stages of the kernel that carries the state on an architecture."""
    b_bytes = GRID * blocks["BLOCK_K"] * itemsize
    x_bytes = GRID * blocks["BLOCK_V"] * itemsize
    # The operands of tl.dot take shared memory in addition to the stages. Triton 3.6
    # allocates B once for one tf32 product; for three it allocates B twice, and dt x once.
    operands = 2 * b_bytes + x_bytes if precision == "tf32x3" else b_bytes
    stage_bytes = b_bytes + x_bytes + 2 * GRID * itemsize
    return architecture.fit_stages(STATE_STAGES, stage_bytes, operands, number)


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
    """Run prompt chunks without reading a length on the host: see mamba2.mamba2_chunk."""
    tokens, channels = mixed.shape
    rows = PromptRows(cu_seqlens, starts, state_src, state_slots, snapshot_slots)
    sizes = head_sizes(state)
    groups, heads, _, p = state.sizes()
    conv_weight = weights.conv.t().contiguous()
    history = len(conv_weight) - 1
    f32: dict[str, Any] = dict(dtype=torch.float32, device=mixed.device)
    out = torch.empty(tokens, heads, p, **f32)
    if not out.numel() or not len(starts):
        return out
    chunks, first_chunks = list_chunks(out, cu_seqlens, state_slots)
    n = len(chunks)
    inputs = torch.empty(tokens, channels, **f32)
    scores = torch.empty(n, groups, GRID, GRID, **f32)
    steps, g_cumsum = (torch.empty(n, heads, GRID, **f32) for _ in range(2))
    exact: dict[str, Any] = dict(GRID=GRID, enable_fp_fusion=False)
    precision = dot_precision(mixed.dtype)
    products: dict[str, Any] = dict(PRECISION=precision, num_warps=WARPS, **exact)
    chunk_inputs_kernel[(n, ceil_div(channels, CHANNELS))](
        mixed, conv_weight, weights.conv_bias, state.conv, cu_seqlens, starts, state_src, chunks,
        inputs, mixed.stride(0), state.conv.shape[1], C=channels, R=history, BLOCK=CHANNELS,
        num_warps=INPUT_WARPS, **exact,
    )  # fmt: skip
    chunk_scores_kernel[(n, groups)](
        inputs, dt, weights.a_log, weights.dt_bias, cu_seqlens, chunks, scores, steps, g_cumsum,
        dt.stride(0), weights.dt_min, weights.dt_max, **sizes, **block_sizes(sizes, MAX_DIM),
        **products,
    )  # fmt: skip
    blocks = block_sizes(sizes, STATE_VALUES)
    number = architecture.sm_number(mixed.device)
    stages = _state_stages(blocks, precision, inputs.itemsize, number)
    chunk_states = inputs.new_empty(n, *state.recurrent.shape[1:], dtype=state.recurrent.dtype)
    chunk_state_kernel[(len(starts) * heads, ceil_div(p, blocks["BLOCK_V"]))](
        inputs, steps, g_cumsum, state.recurrent, chunk_states, *rows, first_chunks,
        state.recurrent.stride(0), **sizes, **blocks, num_stages=stages, **products,
    )  # fmt: skip
    blocks = block_sizes(sizes, OUT_VALUES)
    chunk_output_kernel[(n, heads, ceil_div(p, blocks["BLOCK_V"]))](
        inputs, steps, g_cumsum, scores, chunk_states, weights.d, cu_seqlens, chunks, out,
        **sizes, **blocks, SECTOR=SECTOR, **products,
    )  # fmt: skip
    save_raw_inputs(mixed, state, history, rows)
    return out
