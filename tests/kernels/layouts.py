"""What a kernel's layouts, in its ttgir, must not be."""

import re
from typing import Any

import triton

LAYOUT = re.compile(
    r"^(#linear\d*) = #ttg\.linear<\{.*?lane = \[(.*?)\], warp = \[(.*?)\], block", re.MULTILINE
)
SUM = re.compile(
    r'"tt\.reduce"\([^)]*\) <\{axis = (\d+) : i32\}>.*?\) : \(tensor<[^,>]*, (#linear\d*)>',
    re.DOTALL,
)
"""A sum or a maximum: its axis, and the layout of what it takes, where numbers were reshaped."""


def compile_held(source: Any, **how: Any) -> Any:
    """triton.compile, of a kernel that adds what it is asked to."""
    made = triton.compile(source, **how)
    assert not (lost := lost_sums(made.asm["ttgir"])), (made.metadata.name, lost)
    return made


def lost_sums(ttgir: str) -> list[str]:
    """Layouts of what is added across warps, where the bits of a warp's number, or of a lane's, lie
    along one dimension, another, and the first one again: Triton 3.6 takes the bits of a dimension
    to be side by side, and gives sums of other numbers, and of none."""
    layouts = {
        name: (_dimensions(lanes), _dimensions(warps))
        for name, lanes, warps in LAYOUT.findall(ttgir)
    }
    found = []
    for axis, name in SUM.findall(ttgir):
        (lanes, warps) = layouts.get(name, ([], []))
        if int(axis) in warps and not (_grouped(lanes) and _grouped(warps)):
            found.append(f"axis {axis} of {name}: lanes along {lanes}, warps along {warps}")
    return found


def _grouped(dims: list[int]) -> bool:
    """Whether equal numbers stand side by side."""
    changes = sum(a != b for a, b in zip(dims, dims[1:], strict=False))
    return not dims or changes == len(set(dims)) - 1


def _dimensions(bits: str) -> list[int]:
    """The dimension along which each bit lies: "[0, 1], [8, 0]" -> 1, 0."""
    numbers = [[int(x) for x in bit.split(",")] for bit in re.findall(r"\[([^\]]*)\]", bits)]
    return [next(i for i, x in enumerate(bit) if x) for bit in numbers if any(bit)]
