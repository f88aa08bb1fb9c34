"""Which backends these tests run, where, and how arguments travel to them and back."""

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
from lockstep.kernels.exchange import exchange

load()
OPS = tuple(op for op in all_ops().values() if op is not exchange)
"""Ops of one rank. An exchange has no kernel: tests/kernels/test_exchange.py."""
CPU = ("reference", "cpu")
"""Backends that run on a CPU; of the others, INTERPRETED does so under Triton's interpreter."""
INTERPRETED = "triton"
GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NULL_LINES = {"gated_delta_chunk": ("state",), "mamba2_chunk": ("state",)}
"""Op -> the arguments whose line 0 may hold anything afterwards: several rows at once, those of a
padded step, keep their state in the null slot, and nobody reads it."""


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
        """Whether its bits are the reference's, not only its own on every batch."""
        return self.name in CPU

    def serves(self, op: Op, arguments: dict[str, Any]) -> bool:
        """Whether the backend says that it serves a layer of these arguments."""
        device = "cpu" if self.name in CPU else "cuda"
        traits = dict(device=device, dtype=self.dtype) | layer_traits(op, arguments)
        return op.backends[self.name].supports(**traits) is None

    def cases(self, op: Op, most: int | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """The op's first cases that the backend serves: `most` of them, None for all."""
        made = load_cases(op)(self.dtype)
        return islice(((n, given) for n, given in made if self.serves(op, given)), most)

    def run(self, op: Op, arguments: dict[str, Any]) -> Any:
        """Calls the backend; in-place arguments must be on the backend's device already.

        An op without a backend "cpu" is served by its reference there.
        """
        lacks = self.name == "cpu" and "cpu" not in op.backends
        name = "reference" if lacks else self.name
        return op.backends[name].run(**self.place(arguments))

    def place(self, value: Any) -> Any:
        """The same arguments on this backend's device: what is there already is not copied."""
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
        """The arguments on this backend's device, copied: all of them, or those of these names."""
        chosen = arguments if names is None else {name: arguments[name] for name in names}
        return self.place(arguments | copy.deepcopy(chosen))


def backends(*interpreted_marks: pytest.MarkDecorator, op: Op | None = None) -> list[Any]:
    """Params of what serves on a CPU, then of every other backend of the op wherever it runs;
    without an op, of the backends that most ops have."""
    names = {"cpu", INTERPRETED} if op is None else set(op.backends)
    gpu = torch.cuda.is_available()
    found = [_param(Backend("cpu" if "cpu" in names else "reference", "cpu", torch.float32))]
    if INTERPRETED in names and find_spec("triton") and not gpu:
        found.append(_param(Backend(INTERPRETED, "cpu", torch.float32), *interpreted_marks))
    for name in sorted(name for name in names if name not in CPU):
        every = [Backend(name, "cuda", dtype) for dtype in GPU_DTYPES]
        asked = [backend for backend in every if op is None or not gpu or any(backend.cases(op))]
        found += [_param(backend, pytest.mark.gpu) for backend in asked]
    return found


def of_every_op(ops: Iterable[Op] = OPS, reference: bool = True) -> list[Any]:
    """Params (op, backend) of every backend of these ops; reference: the reference's among them."""
    return [
        pytest.param(op, *param.values, id=f"{op.name}-{param.id}", marks=param.marks)
        for op in ops
        for param in backends(op=op)
        if reference or param.values[0].name != "reference"
    ]


def _param(backend: Backend, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(backend, id=str(backend), marks=marks)


def tensors_of(*values: Any) -> list[Tensor]:
    """All tensors in tensors, state dataclasses and tuples, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            found.extend(tensors_of(*value))
        elif dataclasses.is_dataclass(value):
            found.extend(tensors_of(*(getattr(value, f.name) for f in dataclasses.fields(value))))
    return found


def written(op: Op, arguments: dict[str, Any]) -> list[Tensor]:
    """The tensors that the op writes in place."""
    return tensors_of(*(arguments[name] for name in op.writes))


def kept(op: Op, arguments: dict[str, Any]) -> dict[str, list[Tensor]]:
    """The tensors of each argument that the op must leave as they are."""
    return {name: tensors_of(x) for name, x in arguments.items() if name not in op.writes}


def left(op: Op, result: Any, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """What a call leaves behind that counts, by name: its results, then what it wrote in place,
    without the lines that NULL_LINES names."""
    found = {f"result {i}": x for i, x in enumerate(tensors_of(result))}
    for name in op.writes:
        first = 1 if name in NULL_LINES.get(op.name, ()) else 0
        parts = tensors_of(arguments[name])
        found |= {f"{name} {i}": x[first:] for i, x in enumerate(parts)}
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal element for element, NaN where NaN."""
    a = a.detach().cpu()
    b = b.detach().cpu()
    if not a.is_floating_point():
        return torch.equal(a, b)
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
