"""The backends that these tests run, the devices they run on, and the transfer of arguments to
them."""

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.kernels import Op
from lockstep.kernels.backends import all_ops, layer_traits, load, load_cases
from lockstep.kernels.exchange import exchange, exchange_add_rms_norm
from lockstep.kernels.registry import Backend as Implementation

load()
EXCHANGES = (exchange, exchange_add_rms_norm)
OPS = tuple(op for op in all_ops().values() if op not in EXCHANGES)
"""Ops of one rank. Exchanges: tests/kernels/test_exchange.py and test_push.py."""
EXACT = ("reference", "cpu")
"""Backends with the reference's bits."""
NUMBA = "numba"
CPU = (*EXACT, NUMBA)
"""Backends that run on a CPU, the preferred one last. INTERPRETED runs there under Triton's
interpreter."""
INTERPRETED = "triton"
GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NULL_LINES = {"gated_delta_chunk": ("state",), "mamba2_chunk": ("state",)}
"""Op -> arguments whose line 0 has undefined contents after a call.

The padded rows of a step all write their state to the null slot, which nothing reads.
"""


@dataclass(frozen=True)
class Backend:
    """A backend on a device in a dtype."""

    name: str
    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name}-{self.device}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def interpreted(self) -> bool:
        return self.name == INTERPRETED and not self.on_gpu

    @property
    def exact(self) -> bool:
        """True if the backend gives the reference's bits, not only the same bits in every batch."""
        return self.name in EXACT

    def serves(self, op: Op, arguments: dict[str, Any]) -> bool:
        """Return True if the backend reports support for a layer of these arguments."""
        device = "cpu" if self.name in CPU else "cuda"
        traits = dict(device=device, dtype=self.dtype) | layer_traits(op, arguments)
        return self._implementation(op).supports(**traits) is None

    def cases(self, op: Op, max_cases: int | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the op's first cases that the backend serves: at most `max_cases` of them, None for
        all."""
        result = load_cases(op)(self.dtype)
        return islice(
            ((n, arguments) for n, arguments in result if self.serves(op, arguments)), max_cases
        )

    def run(self, op: Op, arguments: dict[str, Any]) -> Any:
        """Call the backend; in-place arguments must be on its device already.

        An op without a backend "cpu" or "numba" is served by the next one of CPU.
        """
        return self._implementation(op).run(**self.place(arguments))

    def _implementation(self, op: Op) -> Implementation:
        """Return the op's backend that serves under this name."""
        name = self.name
        while name in CPU and name not in op.backends:
            name = CPU[CPU.index(name) - 1]
        return op.backends[name]

    def place(self, value: Any) -> Any:
        """Return the arguments on this backend's device; tensors there are not copied."""
        if isinstance(value, Tensor):
            return value.to(self.device)
        if isinstance(value, dict):
            return {name: self.place(part) for name, part in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {f.name: self.place(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return type(value)(**parts)
        return value

    def fresh(
        self, arguments: dict[str, Any], names: Iterable[str] | None = None
    ) -> dict[str, Any]:
        """Return the arguments on this backend's device, copied: all of them, or those of these
        names."""
        chosen = arguments if names is None else {name: arguments[name] for name in names}
        return self.place(arguments | copy.deepcopy(chosen))


def backends(*interpreted_marks: pytest.MarkDecorator, op: Op | None = None) -> list[Any]:
    """Return params of the CPU's backend, then of every other backend of the op on each device that
    it runs on.

    Without an op: of the backends that most ops have.
    """
    names = {"cpu", INTERPRETED, NUMBA} if op is None else set(op.backends)
    gpu = torch.cuda.is_available()
    results = [_param(Backend("cpu" if "cpu" in names else "reference", "cpu", torch.float32))]
    if NUMBA in names and find_spec(NUMBA):
        results += [_param(Backend(NUMBA, "cpu", dtype)) for dtype in GPU_DTYPES]
    if INTERPRETED in names and find_spec("triton") and not gpu:
        results.append(_param(Backend(INTERPRETED, "cpu", torch.float32), *interpreted_marks))
    for name in sorted(name for name in names if name not in CPU):
        every = [Backend(name, "cuda", dtype) for dtype in GPU_DTYPES]
        served = [backend for backend in every if op is None or not gpu or any(backend.cases(op))]
        results += [_param(backend, pytest.mark.gpu) for backend in served]
    return results


def of_every_op(ops: Iterable[Op] = OPS, reference: bool = True) -> list[Any]:
    """Return params (op, backend) of every backend of these ops; reference: include the
    reference."""
    return [
        pytest.param(op, *param.values, id=f"{op.name}-{param.id}", marks=param.marks)
        for op in ops
        for param in backends(op=op)
        if reference or param.values[0].name != "reference"
    ]


def _param(backend: Backend, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(backend, id=str(backend), marks=marks)


def tensors_of(*values: Any) -> list[Tensor]:
    """Return all tensors in tensors, state dataclasses and tuples, in order."""
    results: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            results.append(value)
        elif isinstance(value, tuple):
            results.extend(tensors_of(*value))
        elif dataclasses.is_dataclass(value):
            results.extend(tensors_of(*(getattr(value, f.name) for f in dataclasses.fields(value))))
    return results


def written(op: Op, arguments: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that the op writes in place."""
    return tensors_of(*(arguments[name] for name in op.writes))


def read_only(op: Op, arguments: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Return the tensors of each argument that the op must not change."""
    return {name: tensors_of(x) for name, x in arguments.items() if name not in op.writes}


def left(op: Op, result: Any, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Return the outputs of a call by name: results, then in-place arguments without NULL_LINES."""
    results = {f"result {i}": x for i, x in enumerate(tensors_of(result))}
    for name in op.writes:
        first = 1 if name in NULL_LINES.get(op.name, ()) else 0
        parts = tensors_of(arguments[name])
        results |= {f"{name} {i}": x[first:] for i, x in enumerate(parts)}
    return results


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if the tensors are equal element for element, with NaN equal to NaN."""
    a = a.detach().cpu()
    b = b.detach().cpu()
    if not a.is_floating_point():
        return torch.equal(a, b)
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
