"""Option with the memory of a GPU that another machine has."""

from typing import Annotated

import typer

from lockstep.errors import ConfigError, brief, choice_error
from lockstep.settings import SIZES, read_bytes

GPUMemory = Annotated[
    str | None,
    typer.Option("--gpu-memory-bytes", help="memory of that GPU, e.g. 24G or 25.3e9"),
]
"""Option with the memory of the GPU that --arch names."""
MAX_BYTES = 1e15
"""Maximum bytes of GPU memory, far above any real GPU."""


def read_gpu_memory(arch: str | None, text: str | None) -> int | None:
    """Return the memory of the planned GPU in bytes. Raises ConfigError."""
    if text is None:
        return None
    if arch is None:
        raise ConfigError(
            f"gpu_memory_bytes={brief(text)} is not allowed without arch; allowed: with --arch, "
            "for a GPU that this machine does not have. Name its architecture, or leave it out."
        )
    try:
        # read_bytes raises ValueError too; both get the message with the range.
        total = read_bytes(text)
        if not 1 <= total <= MAX_BYTES:
            raise ValueError
    except ValueError:
        allowed = f"1 to {MAX_BYTES:g} bytes, such as {SIZES}"
        error = choice_error(
            ConfigError, "gpu_memory_bytes", text, allowed, "Pass a size in that range."
        )
        raise error from None
    return int(total)
