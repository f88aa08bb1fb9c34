"""Tensors of host memory, those of mapped files above all, into device memory.

The driver copies out of memory that is not pinned by one thread, which waits for every page of a
file and for the device. Here threads read pieces into pinned memory, from which the device fetches
them on its own.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

PIECE = 16 << 20
"""Bytes that a thread reads at once; pinned memory has about twice as many for each thread."""
THREADS = 4
"""Threads that read."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; itself where it is there."""
    if tensor.device.type == device.type:
        return tensor
    return joined_to_device([tensor], device).view(tensor.shape)


def joined_to_device(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The elements of the parts, which are of one dtype, one after another on the device: [N]."""
    (dtype,) = {part.dtype for part in parts}
    found = [part.reshape(-1).view(torch.uint8) for part in parts]
    out = torch.empty(sum(map(len, found)), dtype=torch.uint8, device=device)
    places = out.split(PIECE)
    if len(places) == 1:
        _send(found, out)
        return out.view(dtype)
    stream = torch.cuda.current_stream(device) if out.is_cuda else None

    @torch.inference_mode()
    def send(run: list[Tensor], place: Tensor) -> None:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            _send(run, place)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(send, _runs(found), places))
    return out.view(dtype)


def _send(run: list[Tensor], place: Tensor) -> None:
    """Copies the bytes of a run, one after another, to their place."""
    if not place.is_cuda:
        torch.cat(run, out=place)
        return
    host = torch.empty(len(place), dtype=torch.uint8, pin_memory=True)
    torch.cat(run, out=host)
    place.copy_(host, non_blocking=True)


def _runs(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The bytes of the parts in runs of PIECE; the last may be shorter."""
    run: list[Tensor] = []
    free = PIECE
    for part in parts:
        rest = part
        while len(rest):
            run.append(rest[:free])
            rest = rest[free:]
            free -= len(run[-1])
            if free == 0:
                yield run
                run = []
                free = PIECE
    if run:
        yield run
