"""Runs codecs' KVFragments on the CPU, which Gluon cannot: its language on torch's tensors, and the
assembly by ptx.py. Layouts only say which numbers a thread holds side by side."""

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
    """A tensor with the casts of Gluon's. reg: the dimension along which a thread's first two
    numbers lie."""

    reg: int | None = None

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Tile":  # type: ignore[override]
        plain = self.as_subclass(Tensor)
        return (plain.view(dtype) if bitcast else plain.to(dtype)).as_subclass(Tile)


def held(tensor: Tensor, layout: Any) -> Tile:
    """The tensor as this layout holds it."""
    found = tensor.as_subclass(Tensor).clone().as_subclass(Tile)
    bases = getattr(layout, "reg_bases", None)
    found.reg = next(i for i, step in enumerate(bases[0]) if step) if bases else None
    return found


class Shared:
    """A tile in shared memory."""

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
        return held(self.data, layout)


def join(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(a, b), -1).as_subclass(Tile)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, layout: Any) -> Tile:
    return held(torch.zeros(*shape, dtype=dtype), layout)


def arange(start: int, end: int, layout: Any) -> Tile:
    return held(torch.arange(start, end, dtype=torch.int32), layout)


def split_16bit(pair: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the lower and the upper 16 bits of words, as numbers of dtype."""
    both = pair.as_subclass(Tensor).contiguous().view(dtype).unflatten(-1, (-1, 2))
    return both[..., 0].as_subclass(Tile), both[..., 1].as_subclass(Tile)


def assembled(
    asm: Any, constraints: str, args: list[Tensor], dtype: tuple[torch.dtype, ...], is_pure: bool,
    pack: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """inline_asm_elementwise, of one number a thread or of two side by side."""
    first: Any = args[0]
    axis = first.reg if pack == 2 else -1
    given: list[Any] = []
    parts = torch.broadcast_tensors(*(arg.as_subclass(Tensor) for arg in args))
    for part in parts:
        pairs = part.movedim(axis, -1).unflatten(-1, (-1, pack)).contiguous()
        if part.dtype == torch.bfloat16:
            given.append(pairs.view(torch.int32).flatten().numpy().view(np.uint32))
        else:
            given += [pairs[..., i].flatten().numpy().view(np.uint32) for i in range(pack)]
    shape = parts[0].movedim(axis, -1).unflatten(-1, (-1, pack)).shape
    wanted = [name for name in constraints.split(",") if not name.startswith("=")]
    assert len(wanted) == len(given), (constraints, len(given))
    thread = ptx.Thread(given, len(dtype))
    for line in asm.value.strip().strip("{}").split(";"):
        if line.strip():
            thread.run(" ".join(line.split()))
    found = []
    for i, kind in enumerate(dtype):
        words = torch.from_numpy(thread.registers[f"${i}"].view(np.int32).copy())
        whole = words.view(kind).reshape(shape).flatten(-2).movedim(-1, axis)
        found.append(whole.as_subclass(Tile))
    return tuple(found)


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
    convert_layout=held,
    inline_asm_elementwise=assembled,
)


@contextmanager
def on_torch() -> Iterator[None]:
    """Codecs' fragments call this language while it lasts."""
    with mock.patch("lockstep.kernels.device.mma_layouts.split_16bit", split_16bit):
        patches = []
        for name in MODULES:
            module = import_module(f"lockstep.kernels.{name}")
            patches.append(mock.patch.object(module, "gl", LANGUAGE))
            for given, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    patches.append(mock.patch.object(module, given, value.fn))
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in reversed(patches):
                patch.stop()
