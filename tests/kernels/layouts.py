"""What a kernel's layouts, in its ttgir, must not be."""

import re
from typing import Any

import triton

LAYOUT = re.compile(r"^(#linear\d*) = #ttg\.linear<\{.*?warp = \[(.*?)\], block", re.MULTILINE)
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
    """Layouts of what is added across warps, where the warps' dimensions do not come from the last
    to the first: Triton 3.6 takes them to, and gives sums of other numbers, and of none."""
    warps = {name: _dimensions(found) for name, found in LAYOUT.findall(ttgir)}
    found = []
    for axis, name in SUM.findall(ttgir):
        dims = warps.get(name, [])
        if int(axis) in dims and dims != sorted(dims, reverse=True):
            found.append(f"axis {axis} of {name}: warps along {dims}")
    return found


def _dimensions(warp: str) -> list[int]:
    """The dimension along which each bit of a warp's number lies: "[0, 1], [8, 0]" -> 1, 0."""
    bits = [[int(x) for x in bit.split(",")] for bit in re.findall(r"\[([^\]]*)\]", warp)]
    return [next(i for i, x in enumerate(bit) if x) for bit in bits if any(bit)]
