"""Launchers of the kernels that the chunked forms of all recurrences share."""

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.kernels.integers import ceil_div, next_power_of_2
from lockstep.kernels.recurrent.chunk_kernels import list_chunks_kernel, save_raw_inputs_kernel
from lockstep.kernels.recurrent.state import RecurrentState
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
    """Return the precision of products of fp32: three tf32 products for an fp32 model, else one.

    Products of 16-bit operands have no such choice.
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
        next_power_of_2(rows), GRID, ZEROS,
    )  # fmt: skip
    return chunks, first_chunks


def save_raw_inputs(mixed: Tensor, state: RecurrentState, history: int, rows: PromptRows) -> None:
    """Save the last `history` raw inputs of each row to its slot and to its snapshot's slot."""
    channels = mixed.shape[1]
    save_raw_inputs_kernel[(len(rows.starts), ceil_div(channels, CONV_CHANNELS))](
        mixed, state.conv, *rows, mixed.stride(0), state.conv.shape[1], channels, history,
        CONV_CHANNELS, next_power_of_2(history), GRID,
    )  # fmt: skip
