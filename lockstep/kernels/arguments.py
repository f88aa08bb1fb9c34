"""Arguments of ops as values: moved to a device, copied, and compared bit for bit."""

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.registry import Op

Arguments = dict[str, Any]
NULL_LINES = {"gated_delta_chunk": ("state",), "mamba2_chunk": ("state",)}
"""Op -> arguments whose line 0 has undefined contents after a call.

The padded rows of a step all write their state to the null slot, which nothing reads.
"""


def place(value: Any, device: torch.device | str) -> Any:
    """Return arguments on a device; tensors that are there already are not copied.

    Quantized weights are finalized, as loaded ones are: no launch reads their scales.
    """
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: place(part, device) for name, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: place(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        placed = type(value)(**parts)
        if isinstance(placed, QuantizedWeight):
            placed.finalize()
        return placed
    return value


def fresh(
    arguments: Arguments, device: torch.device | str, names: Iterable[str] | None = None
) -> Arguments:
    """Return arguments on a device, copied: all of them, or those of these names."""
    chosen = arguments if names is None else {name: arguments[name] for name in names}
    return place(arguments | copy.deepcopy(chosen), device)


def tensors_of(*values: Any) -> list[Tensor]:
    """Return all tensors in tensors, dataclasses and tuples, in order."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list):
            tensors.extend(tensors_of(*value))
        elif dataclasses.is_dataclass(value):
            tensors.extend(tensors_of(*(getattr(value, f.name) for f in dataclasses.fields(value))))
    return tensors


def outputs(op: Op, result: Any, arguments: Arguments) -> dict[str, Tensor]:
    """Return the outputs of a call by name: results, then in-place arguments without NULL_LINES."""
    named = {f"result {i}": x for i, x in enumerate(tensors_of(result))}
    for name in op.writes:
        first = 1 if name in NULL_LINES.get(op.name, ()) else 0
        parts = tensors_of(arguments[name])
        named |= {f"{name} {i}": x[first:] for i, x in enumerate(parts)}
    return named


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether the tensors are equal element for element, with NaN equal to NaN."""
    a = a.detach().cpu()
    b = b.detach().cpu()
    if not a.is_floating_point():
        return torch.equal(a, b)
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
