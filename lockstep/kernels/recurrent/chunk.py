"""Launchers that the chunked forms of every recurrence share."""

import torch
import triton
from torch import Tensor

from lockstep.kernels.recurrent.chunk_kernels import keep_kernel, list_kernel
from lockstep.kernels.recurrent.state import RecurrentState
from lockstep.step import GRID

ZEROS = 4096
"""Numbers that a program fills with zeros at once."""
CONV_CHANNELS = 512
"""Channels of a program that keeps raw inputs."""


def precision_of(dtype: torch.dtype) -> str:
    """Of all products: three tf32 products per fp32 product where the model is fp32, else one.

    tf32 keeps 10 bits where bf16 keeps 7: 1.7e-3 relative error of a layer's output, at 27 % of the
    time (H200, 48 heads of 128 x 128).
    """
    return "tf32x3" if dtype == torch.float32 else "tf32"


def list_chunks(out: Tensor, cu_seqlens: Tensor, state_slots: Tensor) -> tuple[Tensor, Tensor]:
    """chunks [as many as rows of T tokens can have, 3], zero behind the last, and firsts [S] of
    list_kernel, which fills out [T, H, V] with zeros for rows that do nothing. No length is read
    on the host."""
    rows = state_slots.shape[0]
    most = len(out) // GRID + rows
    chunks = torch.zeros(most, 3, dtype=torch.int32, device=cu_seqlens.device)
    firsts = torch.zeros(rows, dtype=torch.int32, device=cu_seqlens.device)
    list_kernel[(rows,)](
        cu_seqlens, state_slots, chunks, firsts, out, rows, out[0].numel(),
        triton.next_power_of_2(rows), GRID, ZEROS,
    )  # fmt: skip
    return chunks, firsts


def keep_raw_inputs(
    mixed: Tensor,
    state: RecurrentState,
    history: int,
    cu_seqlens: Tensor,
    starts: Tensor,
    state_src: Tensor,
    state_slots: Tensor,
    snapshot_slots: Tensor,
) -> None:
    """Leaves the last `history` raw inputs of each row in its ring, and in its snapshot's."""
    rows = starts.shape[0]
    channels = mixed.shape[1]
    keep_kernel[(rows, triton.cdiv(channels, CONV_CHANNELS))](
        mixed, state.conv, cu_seqlens, starts, state_src, state_slots, snapshot_slots,
        mixed.stride(0), state.conv.shape[1], channels, history, CONV_CHANNELS,
        triton.next_power_of_2(history), GRID,
    )  # fmt: skip
