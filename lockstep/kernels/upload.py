"""Upload of large host tensors, above all of memory-mapped files, to a device.

The driver copies pageable memory with one thread, which waits for every page of the file and for
the device. Here several threads read chunks into pinned staging buffers, from which the device
copies asynchronously.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

CHUNK_BYTES = 16 << 20
"""Bytes per staging buffer. About two buffers per thread are pinned."""
NUM_THREADS = 4
"""Reader threads."""


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device, without a copy if it is there already."""
    if tensor.device.type == device.type:
        return tensor
    return upload_concatenated([tensor], device).view(tensor.shape)


def upload_concatenated(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Concatenate the elements of tensors of one dtype in a new device tensor [N]."""
    (dtype,) = {part.dtype for part in parts}
    byte_views = [part.reshape(-1).view(torch.uint8) for part in parts]
    out = torch.empty(sum(map(len, byte_views)), dtype=torch.uint8, device=device)
    chunks = out.split(CHUNK_BYTES)
    if len(chunks) == 1:
        _copy_chunk(byte_views, out)
        return out.view(dtype)
    stream = torch.cuda.current_stream(device) if out.is_cuda else None

    @torch.inference_mode()
    def copy(sources: list[Tensor], chunk: Tensor) -> None:
        # The current stream is per thread: without this a worker would use the default stream.
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            _copy_chunk(sources, chunk)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(copy, _split_into_chunks(byte_views), chunks))
    return out.view(dtype)


def _copy_chunk(sources: list[Tensor], chunk: Tensor) -> None:
    """Copy the concatenated bytes of host tensors into one chunk of the result."""
    if not chunk.is_cuda:
        torch.cat(sources, out=chunk)
        return
    host = torch.empty(len(chunk), dtype=torch.uint8, pin_memory=True)
    torch.cat(sources, out=host)
    chunk.copy_(host, non_blocking=True)


def _split_into_chunks(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the bytes of the parts in lists of CHUNK_BYTES in total; the last may be shorter."""
    chunk: list[Tensor] = []
    free = CHUNK_BYTES
    for part in parts:
        rest = part
        while len(rest):
            chunk.append(rest[:free])
            rest = rest[free:]
            free -= len(chunk[-1])
            if free == 0:
                yield chunk
                chunk = []
                free = CHUNK_BYTES
    if chunk:
        yield chunk
