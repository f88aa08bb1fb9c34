"""Reject layouts, in a kernel's ttgir, that Triton adds incorrectly; compile to layouts alone."""

import re
from collections.abc import Callable
from typing import Any

import triton

LAYOUT = re.compile(
    r"^(#linear\d*) = #ttg\.linear<\{.*?lane = \[(.*?)\], warp = \[(.*?)\], block", re.MULTILINE
)
SUM = re.compile(
    r'"tt\.reduce"\([^)]*\) <\{axis = (\d+) : i32\}>.*?\) : \(tensor<[^,>]*, (#linear\d*)>',
    re.DOTALL,
)
"""A sum or maximum: its axis, and the layout of its reshaped operand."""


def stop_after(stage: str) -> Callable[..., tuple[str, str] | None]:
    """Return a hook into Triton's stages that ends a compilation after "ttgir" or "llir".

    The ttgir contains the layouts, and the llir is the first stage with the bytes of shared memory.
    The two later stages, ptx and machine code, take a third of the time of a compilation. The
    hook's key is a part of the key of Triton's cache.
    """
    key = f"stop after {stage}"

    def hook(*args: Any) -> tuple[str, str] | None:
        if not args:
            return key, key
        stages = args[1]

        def no_code(module: Any, metadata: dict[str, Any]) -> str:
            metadata.setdefault("shared", 0)
            metadata["name"] = key
            return ""

        if stage == "ttgir":
            del stages["llir"]
        stages["ptx"] = no_code
        stages["cubin"] = lambda module, metadata: b""
        return None

    return hook


def compile_checked(source: Any, **how: Any) -> Any:
    """Compile with triton.compile and assert that the kernel adds correctly."""
    result = triton.compile(source, **how)
    assert not (lost := incorrect_sums(result.asm["ttgir"])), (result.metadata.name, lost)
    return result


def incorrect_sums(ttgir: str) -> list[str]:
    """Return the layouts of incorrect sums across warps.

    These are layouts in which the bits of a warp or lane index belong to one dimension, another,
    and the first one again. Triton 3.6 assumes that the bits of a dimension are contiguous, and
    would add the wrong elements.
    """
    layouts = {
        name: (_dimensions(lanes), _dimensions(warps))
        for name, lanes, warps in LAYOUT.findall(ttgir)
    }
    results = []
    for axis, name in SUM.findall(ttgir):
        (lanes, warps) = layouts.get(name, ([], []))
        if int(axis) in warps and not (_is_contiguous(lanes) and _is_contiguous(warps)):
            results.append(f"axis {axis} of {name}: lanes along {lanes}, warps along {warps}")
    return results


def _is_contiguous(dims: list[int]) -> bool:
    """Return True if equal numbers are adjacent."""
    changes = sum(a != b for a, b in zip(dims, dims[1:], strict=False))
    return not dims or changes == len(set(dims)) - 1


def _dimensions(bits: str) -> list[int]:
    """Return the dimension of each bit: "[0, 1], [8, 0]" -> 1, 0."""
    numbers = [[int(x) for x in bit.split(",")] for bit in re.findall(r"\[([^\]]*)\]", bits)]
    return [next(i for i, x in enumerate(bit) if x) for bit in numbers if any(bit)]
