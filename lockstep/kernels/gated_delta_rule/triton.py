"""Launchers of gated_delta_step and gated_delta_chunk in Triton."""

from typing import Any

import torch
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
    chunk_inputs_kernel,
    chunk_output_kernel,
    delta_state_kernel,
    intra_chunk_kernel,
)
from lockstep.kernels.gated_delta_rule.step_kernels import gated_norm_kernel, step_inputs_kernel
from lockstep.kernels.integers import ceil_div, next_power_of_2
from lockstep.kernels.recurrent.chunk import (
    PromptRows,
    dot_precision,
    list_chunks,
    save_raw_inputs,
)
from lockstep.kernels.recurrent.state import RecurrentState
from lockstep.kernels.recurrent.step import (
    MAX_DIM,
    block_sizes,
    flatten_tokens,
    head_sizes,
    launch_recurrent_step,
)
from lockstep.step import GRID

MAX_TOKENS = 4
"""Maximum window tokens whose inputs a CTA computes at once."""
HEADS = 8
"""Heads of a CTA of the gated norm. H200, 64 rows of 4 tokens: 3.1 us, 3.4 with 4, 8.5 with CTAs
of one head and one warp."""
NORM_WARPS = 4
"""Warps of a CTA of the gated norm."""
# Times below: H200, 8,192 tokens of 48 heads of 128 x 128, bf16.
STATE_VALUES = 64
"""Columns of V of a CTA that carries the state: 197 us, 257 with 32, 332 with 128 and 8 warps."""
OUT_VALUES = 128
"""Columns of V of a CTA that computes outputs: 148 us, 174 with 64, 252 with 32."""
INPUT_WARPS = 8
"""Warps of a CTA of the convolution: 174 us, 260 with 4, 322 with 2 (before INPUT_REGISTERS)."""
INPUT_REGISTERS = 80
"""Registers of its threads, for three CTAs a multiprocessor: 145 us, 160 with two."""
SIDE = 16
"""Rows of the diagonal blocks that the UT transform inverts by forward substitution. Substitution
over all 64 rows of a chunk took 1.1 ms instead of 0.2."""
INTRA_WARPS = GRID // SIDE
"""Warps of a CTA of the WY representation: one for each of these blocks."""
INTRA_REGISTERS = 168
"""Registers of its threads, for three CTAs a multiprocessor: 246 us, 277 with two."""
STATE_WARPS = 4
"""Warps of a CTA that carries the state: 197 us, 256 with 8."""
STATE_STAGES = 3
"""Pipeline stages (chunks of w, k and u) of the kernel that carries the state, where they fit:
197 us, 317 with 2, 307 with 1, 198 with 4."""
OUT_WARPS = 4
"""Warps of a CTA that computes outputs: 148 us, 191 with 8."""
MIN_OPERAND = 64
"""Minimum rows and columns of an operand. Blocks of 16 and 32 gave wrong values in bf16 and fp16 on
sm_90 (Triton 3.6), and right ones in fp32; columns past K and V are zeros."""


def supports(**traits: Any) -> str | None:
    """Return None if these kernels serve a layer of these traits, else the reason why not."""
    for name in ("key_dim", "value_dim"):
        if not 1 <= traits.get(name, MAX_DIM) <= MAX_DIM:
            return f"{name} {traits[name]} is not in 1 .. {MAX_DIM}"
    return gpu_trait(**traits)


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
    committed: Tensor | None = None,
) -> Tensor:
    """Run the window in three kernels: see lockstep.kernels.gated_delta_rule.gated_delta_step."""
    rows, length, channels = mixed.shape
    sizes = head_sizes(state)
    hk, hv, _, v = state.sizes()
    out = torch.empty(rows, length, hv, v, dtype=z.dtype, device=mixed.device)
    if not out.numel():
        return out
    mixed = flatten_tokens(mixed)
    z = flatten_tokens(z)
    b = b.flatten(-3, -2)
    a = a.flatten(-3, -2)
    conv_weight = weights.conv.t().contiguous()
    history_len = state.k.shape[1]
    f32: dict[str, Any] = dict(dtype=torch.float32, device=mixed.device)
    inputs = torch.empty(rows, length, channels + 2 * hv, **f32)
    o = torch.empty(out.shape, **f32)
    blocks = block_sizes(sizes, MAX_DIM)
    step_inputs_kernel[(rows, 2 * hk + hv)](
        mixed, b, a, conv_weight, weights.a_log, weights.dt_bias, state.conv, state.k, state.decay,
        slots, starts, committed, inputs, length, state.conv.shape[1], history_len, mixed.stride(0),
        b.stride(-2), a.stride(-2), b.stride(0), a.stride(0),
        **sizes, **blocks, R=len(conv_weight) - 1, L2_EPS=L2_EPS,
        TOKENS=min(MAX_TOKENS, next_power_of_2(length)), PARTS=_count_partials(b),
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    launch_recurrent_step(state, inputs, o, slots, starts, folded, flush, committed)
    gated_norm_kernel[(ceil_div(rows * length * hv, HEADS),)](
        o, z, weights.norm, out, committed, rows * length * hv, z.stride(0), weights.eps,
        None if committed is None else length,
        HV=hv, V=v, BLOCK_V=blocks["BLOCK_V"], HEADS=HEADS,
        num_warps=NORM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _count_partials(gate: Tensor) -> int:
    """Return P of partials [P, T, HV], or 1 of a gate [T, HV]."""
    return len(gate) if gate.dim() > 2 else 1


def _operand_sizes(sizes: dict[str, int], values: int) -> dict[str, int]:
    """Return block_sizes of at least MIN_OPERAND: at most `values` columns of V."""
    blocks = block_sizes(sizes, values)
    return {name: max(size, MIN_OPERAND) for name, size in blocks.items()}


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
    """Run prompt chunks, reading no length on the host: see gated_delta_rule.gated_delta_chunk."""
    tokens, channels = mixed.shape
    rows = PromptRows(cu_seqlens, starts, state_src, state_slots, snapshot_slots)
    sizes = head_sizes(state)
    hk, hv, k, v = state.sizes()
    conv_weight = weights.conv.t().contiguous()
    history = conv_weight.shape[0] - 1
    f32: dict[str, Any] = dict(dtype=torch.float32, device=mixed.device)
    out = torch.empty(tokens, hv, v, **f32)
    if not out.numel() or not len(starts):
        return out
    chunks, first_chunks = list_chunks(out, cu_seqlens, state_slots)
    n = len(chunks)
    # Operands of products have the model's dtype; see chunk_kernels.py for their order in memory.
    inputs = mixed.new_empty(tokens, channels)
    w = mixed.new_empty(tokens, hv, k)
    u = mixed.new_empty(n, hv, v, GRID)
    scores = mixed.new_empty(n, hv, GRID, GRID)
    chunk_states = mixed.new_empty(n, hv, v, k)
    g_cumsum = torch.empty(n, hv, GRID, **f32)
    exact: dict[str, Any] = dict(GRID=GRID, enable_fp_fusion=False)
    precision = dot_precision(mixed.dtype)
    products: dict[str, Any] = dict(PRECISION=precision, **sizes, **exact)
    chunk_inputs_kernel[(n, 2 * hk + hv)](
        mixed, conv_weight, state.conv, cu_seqlens, starts, state_src, chunks, inputs,
        mixed.stride(0), state.conv.shape[1], **sizes, R=history,
        BLOCK=next_power_of_2(max(k, v)), EPS=L2_EPS,
        num_warps=INPUT_WARPS, maxnreg=INPUT_REGISTERS, **exact,
    )  # fmt: skip
    intra_chunk_kernel[(n, hv)](
        inputs, b, a, weights.a_log, weights.dt_bias, cu_seqlens, chunks, u, w, scores, g_cumsum,
        b.stride(-2), a.stride(-2), b.stride(0), a.stride(0), **_operand_sizes(sizes, MAX_DIM),
        SIDE=SIDE, PARTS=_count_partials(b),
        num_warps=INTRA_WARPS, maxnreg=INTRA_REGISTERS, **products,
    )  # fmt: skip
    blocks = _operand_sizes(sizes, STATE_VALUES)
    # Bytes of one stage: w and k, u, and g_cumsum. Triton allocates up to as much again for the
    # operands, and a block of v_new.
    v_new = GRID * blocks["BLOCK_V"] * inputs.itemsize
    stage = GRID * (2 * blocks["BLOCK_K"] + 1) * inputs.itemsize + v_new
    number = architecture.sm_number(mixed.device)
    stages = architecture.fit_stages(STATE_STAGES, stage, stage + v_new, number)
    delta_state_kernel[(len(starts) * hv, ceil_div(v, blocks["BLOCK_V"]))](
        inputs, u, w, g_cumsum, state.recurrent, chunk_states, *rows, first_chunks,
        state.recurrent.stride(0), **blocks, num_warps=STATE_WARPS, num_stages=stages, **products,
    )  # fmt: skip
    blocks = _operand_sizes(sizes, OUT_VALUES)
    # delta_state_kernel has overwritten u with v_new.
    chunk_output_kernel[(n, hv, ceil_div(v, blocks["BLOCK_V"]))](
        inputs, u, scores, g_cumsum, chunk_states, cu_seqlens, chunks, out,
        **blocks, num_warps=OUT_WARPS, **products,
    )  # fmt: skip
    save_raw_inputs(mixed, state, history, rows)
    return out
