"""Dry runs of a step: its allocations, counted on tensors without memory (FakeTensorMode).

A step never waits for the device and never reads a tensor on the host, so its allocations follow
from its static shape. The host side of every op runs unchanged, for a GPU that may be absent; only
kernel launches are left out.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.errors import CaptureError
from lockstep.kernels.architecture import Architecture, assume_architecture
from lockstep.step import StepShape
from lockstep.worker.capture_checks import describe_fault
from lockstep.worker.program import Program

ALIGNED_ADDRESS = 4096
"""Address of every storage: the allocator's are multiples of 512, and kernels ask for 16."""
BLOCK_BYTES = 512
"""torch's CUDA allocator rounds every block up to a multiple of it."""


class AllocationCounter(TorchDispatchMode):
    """Counts the bytes of tensors that are created while it is active.

    live: bytes of those that still exist. peak: maximum of live. Older storages, such as weights,
    do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._track(tensor, created=False)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._track(tensor, created=True)
        return result

    def _track(self, tensor: Tensor, created: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES if created else 0
        self._sizes[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key)  # another storage may get its address

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


class _WithoutDevice(TorchFunctionMode):
    """Answers questions of torch to the device about tensors without memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.data_ptr:
            # Kernels are specialized on alignment, and views may begin anywhere.
            (x,) = args
            return ALIGNED_ADDRESS + x.storage_offset() * x.element_size()
        if func is Tensor.__getitem__:  # the original sets the current GPU, which may not be there
            return _indexed(*args)
        return func(*args, **(kwargs or {}))


def _indexed(x: Tensor, index: Any) -> Tensor:
    """Return x[index], by ops that need no device."""
    parts = index if isinstance(index, tuple) else (index,)
    missing = x.dim() - sum(part is not None and part is not Ellipsis for part in parts)
    dim = 0
    for part in parts:
        if part is None:
            x = x.unsqueeze(dim)
            dim += 1
        elif part is Ellipsis:
            dim += missing
        elif isinstance(part, slice):
            bounds = (part.start, part.stop, part.step or 1)
            x = torch.ops.aten.slice.Tensor(x, dim, *bounds)
            dim += 1
        elif isinstance(part, Tensor):
            x = torch.ops.aten.index.Tensor(x, [None] * dim + [part])
            dim += part.dim()
        else:
            x = torch.ops.aten.select.int(x, dim, int(part))
    return x


def launch_nothing(*arguments: Any, **options: Any) -> None:
    """Launch no kernel."""


@contextmanager
def dry(card: Architecture, launch: Callable[..., None] = launch_nothing) -> Iterator[None]:
    """Run steps without a device: tiles are those of this card.

    launch: called instead of Triton's launches, with their arguments.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    compiled = mock.patch.object(JITFunction, "run", launch)
    interpreted = mock.patch.object(InterpretedFunction, "run", launch_nothing)
    with compiled, interpreted, assume_architecture(card), _WithoutDevice(), torch.inference_mode():
        yield


def allocated(make: Callable[[], Any]) -> int:
    """Return the bytes of the tensors that `make` creates and returns."""
    counter = AllocationCounter()
    with counter:
        result = make()
        size = counter.live
    del result
    return size


class PassBytes(NamedTuple):
    """Bytes of a forward pass and its steps: at the peak, and of their results."""

    peak: int
    results: int

    @property
    def working(self) -> int:
        """Bytes at the peak that graphs share, since the results are not among them."""
        return self.peak - self.results


def step_bytes(program: Program, *shapes: StepShape) -> PassBytes:
    """Run the steps of a forward pass dry, and count their bytes.

    Results are what a graph keeps, auxiliary hidden states included.
    Raises CaptureError, which names the op, where the step reads a tensor on the host or needs a
    device.
    """
    counter = AllocationCounter()
    with counter:
        try:
            forwarded = program.forward(*shapes)
            outcomes = [program.decide(step) for step in forwarded]
        except (RuntimeError, AssertionError) as error:  # torch asserts what it cannot do dry
            raise _unpredictable(shapes, error) from error
        size = PassBytes(counter.peak, counter.live)
    del forwarded, outcomes
    return size


def _unpredictable(shapes: Sequence[StepShape], error: Exception) -> CaptureError:
    """Return the error of a step whose memory cannot be counted without a device."""
    kind = "prompt" if shapes[-1].prompt else "decoding"
    reason = str(error).partition("\n")[0]
    return CaptureError(
        f"dry run of a {kind} step: {describe_fault(error)} reads a tensor on the host or needs a "
        f"device: {reason}. The memory of a step must follow from its shape alone: change that op, "
        "or report this."
    )
