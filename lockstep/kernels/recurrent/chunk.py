"""Launchers of the kernels that the chunked forms of all recurrences share."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lockstep.kernels.recurrent.chunk_kernels import (
    chunk_state_kernel,
    list_chunks_kernel,
    save_raw_inputs_kernel,
)
from lockstep.kernels.recurrent.state import RecurrentState
from lockstep.kernels.recurrent.step import head_sizes
from lockstep.step import GRID

ZEROS = 4096
"""Elements that a CTA fills with zeros at once."""
CONV_CHANNELS = 512
"""Channels of a CTA that saves raw inputs."""


class PromptRows(NamedTuple):
    """Rows of a prompt step, on the device: arguments of the chunked ops.

    cu_seqlens: [S + 1]. All others: [S].
    """

    cu_seqlens: Tensor
    starts: Tensor
    state_src: Tensor
    state_slots: Tensor
    snapshot_slots: Tensor


def dot_precision(dtype: torch.dtype) -> str:
    """Return the input precision of all products: three tf32 products for an fp32 model, else one.

    tf32 keeps 10 bits where bf16 keeps 7: 1.7e-3 relative error of a layer's output, at 27 % of the
    time (H200, 48 heads of 128 x 128).
    """
    return "tf32x3" if dtype == torch.float32 else "tf32"


def list_chunks(out: Tensor, cu_seqlens: Tensor, state_slots: Tensor) -> tuple[Tensor, Tensor]:
    """List the chunks of a prompt step on the device, without reading a length on the host.

    Fills out [T, H, V] with zeros for rows without a state slot. Returns chunks [N, 3], where N is
    the maximum for T tokens and unused entries are zero, and first_chunks [S]: see
    list_chunks_kernel.
    """
    rows = state_slots.shape[0]
    max_chunks = len(out) // GRID + rows
    chunks = torch.zeros(max_chunks, 3, dtype=torch.int32, device=cu_seqlens.device)
    first_chunks = torch.zeros(rows, dtype=torch.int32, device=cu_seqlens.device)
    list_chunks_kernel[(rows,)](
        cu_seqlens, state_slots, chunks, first_chunks, out, rows, out[0].numel(),
        triton.next_power_of_2(rows), GRID, ZEROS,
    )  # fmt: skip
    return chunks, first_chunks


def carry_states(
    inputs: Tensor,
    wy: tuple[Tensor, Tensor] | None,
    dt: Tensor | None,
    g_cumsum: Tensor,
    state: RecurrentState,
    rows: PromptRows,
    first_chunks: Tensor,
    k_channel: int,
    v_channel: int,
    options: dict[str, Any],
) -> Tensor:
    """Carry states from chunk to chunk, and return those before each chunk [N, HV, K, V].

    wy: u and w of the delta rule. options: BLOCK_K, BLOCK_V, PRECISION and launch options. See
    chunk_state_kernel.
    """
    hv, k, v = state.recurrent.shape[1:]
    chunk_states = torch.empty(
        len(g_cumsum), hv, k, v, dtype=state.recurrent.dtype, device=inputs.device
    )
    u, w = wy or (None, None)
    chunk_state_kernel[(len(rows.starts) * hv, triton.cdiv(v, options["BLOCK_V"]))](
        inputs, u, w, dt, g_cumsum, state.recurrent, chunk_states, *rows, first_chunks,
        state.recurrent.stride(0), K_CHANNEL=k_channel, V_CHANNEL=v_channel,
        **head_sizes(state), **options,
    )  # fmt: skip
    return chunk_states


def save_raw_inputs(mixed: Tensor, state: RecurrentState, history: int, rows: PromptRows) -> None:
    """Save the last `history` raw inputs of each row to its slot and to its snapshot's slot."""
    channels = mixed.shape[1]
    save_raw_inputs_kernel[(len(rows.starts), triton.cdiv(channels, CONV_CHANNELS))](
        mixed, state.conv, *rows, mixed.stride(0), state.conv.shape[1], channels, history,
        CONV_CHANNELS, triton.next_power_of_2(history), GRID,
    )  # fmt: skip
