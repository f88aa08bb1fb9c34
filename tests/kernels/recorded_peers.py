"""Memory of a rank whose peers have already sent: an exchange between GPUs with a single GPU.

Packets and flags are written as lockstep.kernels.exchange.device_push describes them, by torch.
"""

import mmap
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.backends import load_cases
from lockstep.kernels.exchange import exchange, exchange_add_rms_norm, push
from lockstep.kernels.exchange.cases import RecordedGroup
from lockstep.kernels.exchange.device_push import TAGS, Peers
from lockstep.kernels.exchange.peer_memory import (
    BUFFER_BYTES,
    BUFFERS,
    FLAGS,
    PACKET_BYTES,
    PACKETS,
    SLOTS,
)

EPOCH = 1
"""The first exchange; its buffers are the second ones."""


class RecordedPeers:
    """Memory of all ranks of a recorded group. pointers: into the tensors that it keeps."""

    def __init__(self, group: RecordedGroup, device: str) -> None:
        full = torch.cat(group.parts, dim=1).to(device)
        size = FLAGS + SLOTS * group.size * 8
        inbox = zeros(size, device)
        begin = BUFFERS + EPOCH * BUFFER_BYTES // 2
        inbox[begin : begin + full.nbytes] = full.view(torch.uint8).flatten()
        if full.dtype in push.PACKED and not full.shape[1] % 2:
            packets = pack(full)
            begin = PACKETS + EPOCH * PACKET_BYTES // 2
            inbox[begin : begin + packets.nbytes] = packets.view(torch.uint8).flatten()
        inbox[FLAGS:].view(torch.int64).fill_(EPOCH)
        # What this rank sends arrives in memory that is never read.
        peer_inbox = zeros(size, device)
        self.words = torch.zeros(2, dtype=torch.int32, device=device)
        state = torch.zeros(3, dtype=torch.int64, device=device)
        addresses = [peer_inbox.data_ptr()] * group.size
        addresses[group.index] = inbox.data_ptr()
        self.memory = (inbox, peer_inbox)
        self.pointers = Peers(tuple(addresses), state, self.words.data_ptr())


def zeros(size: int, device: str) -> Tensor:
    """Return zero bytes; on a CPU, the system zeroes a page where it is touched first."""
    if device != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def pack(full: Tensor) -> Tensor:
    """Return the packets of 16-bit values [T, N] in the first exchange: [T, N / 2] int64."""
    pairs = full.view(torch.int16).long().view(len(full), -1, 2) & 0xFFFF
    tag = (EPOCH | TAGS.value) << 32
    return pairs[..., 0] | pairs[..., 1] << 16 | tag - (1 << 64)


def recorded_cases(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield (name, op, arguments) of every case of the exchange with rows, on a device."""
    for op in (exchange, exchange_add_rms_norm):
        for name, arguments in load_cases(op)(dtype):
            group = arguments["group"]
            if not len(group.parts[0]):
                continue
            tensors = {k: v.to(device) for k, v in arguments.items() if isinstance(v, Tensor)}
            recorded = RecordedPeers(group, device)
            group.peers = recorded.pointers
            group.memory = recorded
            yield f"{op.name}, {name}", op, arguments | tensors
