"""Inventory of a worker's memory: the tensors that a walk over its objects finds.

The walk does not use the worker's own lists of rows, pages and states. So a tensor that one of
those lists lacks is poisoned before a scenario too.
"""

import types
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lockstep.worker.worker import Worker

LEAVES = (str, bytes, int, float, types.ModuleType, type, torch.dtype, torch.device)
"""Types of objects that refer to no tensor of a worker."""
WEIGHT_MODULES = (
    "lockstep.quantization",
    "lockstep.kernels.linear",
    "lockstep.kernels.formats.weights",
)
"""Modules whose objects have weights."""


def tensors_of(root: object) -> Iterator[Tensor]:
    """Yield every tensor that is reached from an object, except for weights and buffers."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, LEAVES):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if not isinstance(item, nn.Parameter) and item.layout is torch.strided:
                yield item
        elif not type(item).__module__.startswith(WEIGHT_MODULES):
            todo.extend(_references(item))


def _references(item: object) -> list[object]:
    """Return the objects that an object refers to."""
    if isinstance(item, dict):
        return list(item.values())
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if isinstance(item, types.FunctionType):
        return [cell.cell_contents for cell in item.__closure__ or ()]
    if isinstance(item, types.MethodType):
        return [item.__self__]
    values = dict(getattr(item, "__dict__", {}))
    if isinstance(item, nn.Module):
        # Rotary tables and such: constants, as weights are.
        values.pop("_buffers", None)
        values.pop("_parameters", None)
    names = [name for kind in type(item).__mro__ for name in _slots(kind)]
    references = [*values.values(), *(getattr(item, name) for name in names if hasattr(item, name))]
    if hasattr(item, "func") and hasattr(item, "args"):
        references += [item.func, item.args, getattr(item, "keywords", None)]
    return references


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def poison(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill a tensor with random values that nothing may read."""
    shape = tensor.shape
    if tensor.dtype == torch.bool:
        values = torch.rand(shape, generator=generator) < 0.5
    elif tensor.dtype.is_floating_point:
        values = torch.randn(shape, generator=generator)
    else:
        values = torch.randint(1, 64, shape, generator=generator)
    tensor.copy_(values.to(tensor.device, tensor.dtype))


def rows_and_units(worker: Worker) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors with one entry per row, and those with one per page or slot, once each.

    Row 0 is the null row. Each tensor's storage is its own or a part of a shared one. A tensor is
    recognised by its first size. Without snapshots there are as many state slots as rows: then
    tensors outside of the row table count as slots.
    """
    plan = worker.plan
    num_rows = worker.table.page_table.shape[0]
    num_units = {plan.num_pages, plan.num_slots}
    rows: dict[tuple[int, int], Tensor] = {}
    units: dict[tuple[int, int], Tensor] = {}
    for tensor in tensors_of(worker.table):
        if tensor.dim() and tensor.numel() and tensor.shape[0] == num_rows:
            rows[_extent(tensor)] = tensor
    for tensor in tensors_of(worker):
        if not tensor.dim() or not tensor.numel() or _extent(tensor) in rows:
            continue
        if tensor.shape[0] in num_units:
            units[_extent(tensor)] = tensor
        elif tensor.shape[0] == num_rows:
            rows[_extent(tensor)] = tensor
    return list(rows.values()), list(units.values())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the address and the number of elements of a tensor."""
    return tensor.data_ptr(), tensor.numel()
