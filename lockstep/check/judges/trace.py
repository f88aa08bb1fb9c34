"""Trace a model run: digests of every module's output per request and position.

Two runs of one request are compared position by position, module by module, in the order of the
computation: the first difference names the layer and op that broke the contract.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lockstep.check.engines import CheckEngine
from lockstep.scheduling.schedule import RowSpec
from lockstep.step import ForwardContext, StepShape
from lockstep.worker.executor import worker_of
from lockstep.worker.step_observer import StepObserver

Digests = dict[int, dict[str, bytes]]
"""position -> module name -> digest of its output there, modules in the order of their calls."""


class Trace(StepObserver):
    """Digests of the model's outputs for one request, which `selects` recognizes by its row.

    A position that runs again (after a rejected draft, or replayed) replaces its digests, so the
    remaining ones belong to committed tokens.
    """

    def __init__(self, selects: Callable[[RowSpec], bool]) -> None:
        self.selects = selects
        self.digests: Digests = {}
        self._requests: list[Sequence[RowSpec]] = []  # rows of each step of the next model call
        self._ctx: ForwardContext | None = None
        self._positions: list[tuple[int, int]] = []

    def before_step(self, rows: Sequence[RowSpec], shape: StepShape) -> None:
        """Record the rows of a step of the next model call."""
        self._requests.append(rows)

    def begin(self, ctx: ForwardContext) -> None:
        """Find the selected request's tokens at the start of a model call."""
        self._ctx = ctx
        self._positions = []
        begin = 0
        for step, requests in zip(ctx.steps, self._requests, strict=False):
            rows = [row for row, request in enumerate(requests) if self.selects(request)]
            # The call after a step that raised may be a probe on null rows. This waits for the
            # device, so only traced runs do it.
            if rows and step.row_ids.any():
                first, last = step.cu_seqlens[rows[0] : rows[0] + 2].tolist()
                positions = step.positions[first:last].tolist()
                indices = range(begin + first, begin + last)
                self._positions += zip(indices, positions, strict=True)
                for position in positions:
                    self.digests[position] = {}
            begin += step.shape.tokens
        self._requests = []

    def end(self) -> None:
        """End the model call; later calls of shared modules by a drafter are ignored."""
        self._ctx = None

    def record(self, name: str, output: object) -> None:
        """Digest the [T, ...] tensors of a module's output; other outputs are ignored."""
        if self._ctx is None:
            return
        parts = output if isinstance(output, tuple) else (output,)
        num_tokens = self._ctx.token_ids.shape[0]
        tensors = [
            part
            for part in parts
            if isinstance(part, Tensor) and part.dim() and part.shape[0] == num_tokens
        ]
        if tensors:
            for index, position in self._positions:
                self.digests[position][name] = _digest([tensor[index] for tensor in tensors])


def _digest(tensors: list[Tensor]) -> bytes:
    """Return a digest of the bytes of these tensors, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        raw = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        digest.update(bytes(raw.tolist()))
    return digest.digest()


@contextmanager
def traced(engine: CheckEngine, selects: Callable[[RowSpec], bool]) -> Iterator[Digests]:
    """Trace the model for the selected request in the context; the engine must be eager."""
    # A replayed CUDA graph calls no module, so no hook would run.
    trace = Trace(selects)
    model: nn.Module = worker_of(engine.engine).model
    handles = [
        module.register_forward_hook(lambda _m, _i, output, name=name: trace.record(name, output))
        for name, module in model.named_modules()
        if name
    ]
    handles.append(model.register_forward_pre_hook(lambda _m, inputs: trace.begin(inputs[0])))
    handles.append(model.register_forward_hook(lambda _m, _i, _o: trace.end()))
    try:
        with engine.observed(trace):
            yield trace.digests
    finally:
        for handle in handles:
            handle.remove()


def compare(plain: Digests, other: Digests, end: int) -> str | None:
    """Name the first module and position below `end` whose digests differ, or return None."""
    for position in sorted(p for p in plain if p in other and p < end):
        for name, digest in plain[position].items():
            if other[position].get(name, digest) != digest:
                return f"the first to differ is {name} at position {position}"
    return None
