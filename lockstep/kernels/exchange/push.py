"""Launchers of the exchanges that write into the memory of the other GPUs of the host."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.exchange import exchange, exchange_add_rms_norm
from lockstep.kernels.exchange.collective import exchange_nccl
from lockstep.kernels.exchange.contract import Activation, AddNorm
from lockstep.kernels.exchange.group import RankGroup
from lockstep.kernels.exchange.peer_memory import (
    BUFFER_BYTES,
    BUFFERS,
    FLAGS,
    PACKET_BYTES,
    PACKETS,
    SLOTS,
)
from lockstep.kernels.exchange.push_kernels import (
    push_add_rms_norm_kernel,
    push_kernel,
    push_packets_kernel,
)
from lockstep.kernels.integers import ceil_div, next_power_of_2
from lockstep.kernels.norm.triton import row_layout

BLOCK = 1024
"""Columns of a tile: 8 values of 16 bits per thread, a store of 16 bytes."""
WARPS = 4
CTAS = 128
"""Maximum CTAs of an exchange by flags. All run at once on a GPU of 132 multiprocessors, so that
none waits for a peer that cannot start."""
PACKET_LIMIT = 5 << 18
"""Bytes of the largest tensor that is sent in packets; their tags are not counted. Two H200s, 32
rows of 17,408 columns of 16 bits: 6.2 us in packets, 6.4 by flags."""
NORM_ROWS = 64
"""Maximum rows of which one kernel exchanges the columns and computes the norm."""
PACKED = (torch.bfloat16, torch.float16)


def _supports(**traits: Any) -> str | None:
    return None if traits.get("peer_access") else "the GPUs cannot reach each other's memory"


@exchange.backend("push", supports=_supports)
def exchange_push(
    local: Tensor,
    widths: Sequence[int],
    group: RankGroup,
    dtype: torch.dtype | None = None,
    act: Activation | None = None,
    needed: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.exchange.contract.exchange. The last stride of `local` is 1."""
    dtype = dtype or local.dtype
    rows = local.shape[-2]
    max_rows = BUFFER_BYTES // 2 // (sum(widths) * dtype.itemsize)
    if group.peers is None or not rows or (rows > max_rows and needed is None):
        return exchange_nccl(local, widths, group, dtype, act, needed)
    out = torch.empty(rows, sum(widths), dtype=dtype, device=local.device)
    for begin in range(0, rows, max_rows):
        end = min(begin + max_rows, rows)
        part = None if needed is None else needed[begin:end]
        _launch(local[..., begin:end, :], out[begin:end], widths, group, act, part)
    return out


def _launch(
    local: Tensor,
    out: Tensor,
    widths: Sequence[int],
    group: RankGroup,
    act: Activation | None,
    needed: Tensor | None,
) -> None:
    """Launch the exchange of rows that fit into a buffer."""
    rows, total = out.shape
    parts = local if local.dim() == 3 else local[None]
    tiles_per_row = ceil_div(max(widths), BLOCK)
    tiles = rows * tiles_per_row
    options: dict[str, Any] = dict(
        PARTS=len(parts), ACT=act and act.name, WIDTHS=tuple(widths),
        OFFSETS=tuple(accumulate(widths[:-1], initial=0)), TOTAL=total, RANK=group.index,
        SIZE=group.size, PACKETS=PACKETS, PACKET_BYTES=PACKET_BYTES, BLOCK=BLOCK,
        TILES_PER_ROW=tiles_per_row, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    arguments = (local, out, needed, group.peers, rows, parts.stride(1), parts.stride(0))
    if out.nbytes <= PACKET_LIMIT and _is_packed(out.dtype, widths):
        push_packets_kernel[(tiles,)](*arguments, **options)
    else:
        options |= dict(BUFFERS=BUFFERS, BUFFER_BYTES=BUFFER_BYTES, FLAGS=FLAGS)
        push_kernel[(min(tiles, CTAS, SLOTS),)](*arguments, **options)


def _is_packed(dtype: torch.dtype, widths: Sequence[int]) -> bool:
    """Return whether columns of these widths travel in packets of two values."""
    return dtype in PACKED and all(width % 2 == 0 for width in widths)


@exchange_add_rms_norm.backend("push", supports=_supports)
def exchange_add_rms_norm_push(
    x: Tensor,
    delta: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    widths: Sequence[int],
    group: RankGroup,
    add_norm: AddNorm,
) -> tuple[Tensor, Tensor]:
    """See lockstep.kernels.exchange.contract.exchange_add_rms_norm."""
    fits = 0 < len(x) <= NORM_ROWS and 2 * x.nbytes <= PACKET_BYTES // 2
    if group.peers is None or not (fits and _is_packed(x.dtype, widths)):
        gathered = exchange_push(delta, widths, group, x.dtype)
        return add_norm(x, gathered, weight, eps, offset)
    rank = group.index
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = delta if delta.dim() == 3 else delta[None]
    push_add_rms_norm_kernel[(len(x),)](
        x, delta, weight, total, out, group.peers, x.stride(0), parts.stride(1),
        parts.stride(0), eps, offset, PARTS=len(parts), WIDTH=widths[rank],
        FIRST=sum(widths[:rank]), RANK=rank, SIZE=group.size, PACKETS=PACKETS,
        PACKET_BYTES=PACKET_BYTES, OWN_BLOCK=next_power_of_2(max(widths)),
        **row_layout(x.shape[1]),
    )  # fmt: skip
    return total, out
