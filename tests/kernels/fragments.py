"""CPU stand-in for Gluon, which runs the quantizers' KVMmaFunctions on torch tensors.

Gluon itself has no interpreter for them. tests/kernels/ptx.py runs their inline PTX. Of a layout
only one fact is used: which values are adjacent in a thread.
"""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.experimental.gluon import language as gluon_language
from triton.runtime.jit import JITFunction

from tests.kernels import ptx

MODULES = ("device.mma_layouts", "formats.kv.fp8_mma", "formats.kv.turboquant_mma")


class Tile(Tensor):
    """Tensor with Gluon's casts.

    reg: the dimension along which a thread's first two values are adjacent.
    """

    reg: int | None = None

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Tile":  # type: ignore[override]
        plain = self.as_subclass(Tensor)
        return (plain.view(dtype) if bitcast else plain.to(dtype)).as_subclass(Tile)


def with_layout(tensor: Tensor, layout: Any) -> Tile:
    """Return the tensor with this layout's register dimension."""
    result = tensor.as_subclass(Tensor).clone().as_subclass(Tile)
    bases = getattr(layout, "reg_bases", None)
    result.reg = next(i for i, step in enumerate(bases[0]) if step) if bases else None
    return result


class Shared:
    """Tile in shared memory."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def index(self, i: int) -> "Shared":
        return Shared(self.data[i])

    def slice(self, start: int, length: int) -> "Shared":
        return Shared(self.data[start : start + length])

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.data.permute(order))

    def load(self, layout: Any) -> Tile:
        shape = getattr(layout, "shape", None)
        assert shape is None or list(shape) == list(self.data.shape), (shape, self.data.shape)
        return with_layout(self.data, layout)


def join(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(a, b), -1).as_subclass(Tile)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, layout: Any) -> Tile:
    return with_layout(torch.zeros(*shape, dtype=dtype), layout)


def arange(start: int, end: int, layout: Any) -> Tile:
    return with_layout(torch.arange(start, end, dtype=torch.int32), layout)


def split_16bit(pair: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the lower and the upper 16 bits of words, as numbers of dtype."""
    both = pair.as_subclass(Tensor).contiguous().view(dtype).unflatten(-1, (-1, 2))
    return both[..., 0].as_subclass(Tile), both[..., 1].as_subclass(Tile)


def run_inline_asm(
    asm: Any, constraints: str, args: list[Tensor], dtype: tuple[torch.dtype, ...], is_pure: bool,
    pack: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run inline_asm_elementwise on one value per thread, or on two adjacent ones."""
    first: Any = args[0]
    axis = first.reg if pack == 2 else -1
    arguments: list[Any] = []
    parts = torch.broadcast_tensors(*(arg.as_subclass(Tensor) for arg in args))
    for part in parts:
        pairs = part.movedim(axis, -1).unflatten(-1, (-1, pack)).contiguous()
        if part.dtype == torch.bfloat16:
            arguments.append(pairs.view(torch.int32).flatten().numpy().view(np.uint32))
        else:
            arguments += [pairs[..., i].flatten().numpy().view(np.uint32) for i in range(pack)]
    shape = parts[0].movedim(axis, -1).unflatten(-1, (-1, pack)).shape
    expected = [name for name in constraints.split(",") if not name.startswith("=")]
    assert len(expected) == len(arguments), (constraints, len(arguments))
    thread = ptx.Thread(arguments, len(dtype))
    for line in asm.value.strip().strip("{}").split(";"):
        if line.strip():
            thread.run(" ".join(line.split()))
    results = []
    for i, kind in enumerate(dtype):
        words = torch.from_numpy(thread.registers[f"${i}"].view(np.int32).copy())
        full = words.view(kind).reshape(shape).flatten(-2).movedim(-1, axis)
        results.append(full.as_subclass(Tile))
    return tuple(results)


LANGUAGE = types.SimpleNamespace(
    **{name: getattr(gluon_language, name) for name in ("constexpr", "SliceLayout")},
    DistributedLinearLayout=gluon_language.DistributedLinearLayout,
    int16=torch.int16,
    int32=torch.int32,
    bfloat16=torch.bfloat16,
    join=join,
    zeros=zeros,
    arange=arange,
    where=torch.where,
    reshape=lambda x, shape: x.reshape(shape),
    permute=lambda x, order: x.permute(order),
    convert_layout=with_layout,
    inline_asm_elementwise=run_inline_asm,
)


@contextmanager
def patch_gluon() -> Iterator[None]:
    """Replace Gluon's language by torch in the modules of the quantizers' KVMmaFunctions."""
    with mock.patch("lockstep.kernels.device.mma_layouts.split_16bit", split_16bit):
        patches = []
        for name in MODULES:
            module = import_module(f"lockstep.kernels.{name}")
            patches.append(mock.patch.object(module, "gl", LANGUAGE))
            for arguments, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    patches.append(mock.patch.object(module, arguments, value.fn))
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in reversed(patches):
                patch.stop()
