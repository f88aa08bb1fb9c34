"""Compiles the stepping laws' kernels for a Hopper GPU, which needs none: what the interpreter lets
pass, such as a name of two shapes in the branches of an `if`, is an error here. The walk has a
binary for short windows and one for long ones: K's lanes must lie alike in both.

    python -m tests.kernels.compiles [--quick]

--quick: of a layer with odd widths alone.
"""

import re
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lockstep.kernels.gated_delta_rule import triton as delta
from lockstep.kernels.gated_delta_rule.step_kernels import inputs_kernel, norm_kernel
from lockstep.kernels.recurrent import step
from lockstep.kernels.recurrent.history import ROUNDING_INTERVAL
from lockstep.kernels.recurrent.step_kernel import walk_kernel
from tests.kernels.layouts import compile_held

ODD = dict(HK=1, HV=3, K=24, V=40)
LAYERS = (dict(HK=2, HV=4, K=64, V=16), ODD, dict(HK=16, HV=48, K=128, V=128))
"""K above V, below it, and Qwen3.6-27B's."""
MAMBA = (dict(HK=8, HV=64, K=128, V=64), dict(HK=8, HV=128, K=128, V=80))
"""Nemotron 3 Nano's, and Nemotron Nano 9B's."""
LONGS = {"slots"}
INTS = {"starts", "folded"}
FLOATS = {"eps"}
HALVES = {"mixed", "z", "b", "a", "taps", "norm", "conv", "out"}
NUMBERS = {
    "length",
    "conv_slots",
    "ring_slots",
    "flush",
    "stride",
    "z_stride",
    "b_stride",
    "a_stride",
}
ANYWHERE = {"b", "a", "slots", "starts", "folded"}
"""Pointers that are not specialised on alignment."""
SUM = re.compile(
    r'"tt.reduce"\(%\S+\) <\{axis = 0 : i32\}> \(\{.*?\}\) : \(tensor<((?:\d+x)+)\w+, (#\w+)>',
    re.DOTALL,
)
"""A sum over axis 0: sizes and layout of what it adds."""


def type_of(name: str, kernel: str, grid: int) -> str:
    """The type of an argument, as the launches pass it to a model in bf16, with a state of 16 bits
    where its grid is not 1."""
    if name in NUMBERS or (name == "heads" and kernel == "norm_kernel"):
        return "i32"
    if name in FLOATS:
        return "fp32"
    halves = HALVES | ({"recurrent"} if grid > 1 else set())
    kinds = ((LONGS, "*i64"), (INTS, "*i32"), (halves, "*bf16"))
    return next((kind for names, kind in kinds if name in names), "*fp32")


def kernels(quick: bool) -> Iterator[tuple[Any, int, dict[str, Any]]]:
    """(kernel, warps, constants) of each layer."""
    for sizes in (ODD,) if quick else LAYERS:
        same = dict(**sizes, R=3, L2_EPS=1e-6, **step.blocks_of(sizes, 128))
        yield from walks(sizes, dict(CORRECTS=True, skip=None))
        yield norm_kernel, delta.NORM_WARPS, dict(**same, HEADS=delta.HEADS)
        yield inputs_kernel, 1, dict(**same, TOKENS=delta.MOST_TOKENS)
    for sizes in () if quick else MAMBA:
        yield from walks(sizes, dict(CORRECTS=False))


def walks(sizes: dict[str, int], rule: dict[str, Any]) -> Iterator[tuple[Any, int, dict[str, Any]]]:
    """The walk through a state: in fp32 and in 16 bits, of short windows and of long ones."""
    layout = step.layout_of(sizes)
    warps = layout["WARPS"] // step.PARTS or 1
    same = {**sizes, **layout, **rule, "WARPS": warps, "SECTOR": step.SECTOR}
    columns = warps * layout["COLUMNS"]
    for (grid, size), near in product(((1, 4), (ROUNDING_INTERVAL, 2)), (step.NEAR, 2 * step.NEAR)):
        beside = step.beside_of(sizes["V"], columns, size)
        yield walk_kernel, warps, same | {"NEAR": near, "STATE_GRID": grid, "BESIDE": beside}


def lanes_of_sums(code: str) -> set[tuple[bool, int]]:
    """Of each sum over axis 0 of three: whether one warp holds all of it, in how many lanes."""
    found = set()
    for sizes, layout in SUM.findall(code):
        rows, *others = sizes.split("x")[:-1]
        of = re.search(rf"{layout} = .*?threadsPerWarp = \[(\d+).*?warpsPerCTA = \[(\d+)", code)
        if len(others) == 2:
            assert of, layout
            found.add((of[1] == rows and of[2] == "1", int(rows)))
    return found


def main(quick: bool) -> None:
    """Compiles them, down to machine code."""
    found: dict[tuple[int, int, int], list[set[tuple[bool, int]]]] = {}
    for kernel, warps, constants in kernels(quick):
        name = kernel.__name__
        own = kernel.arg_names
        fixed = {n: constants[n] for n in own if n in constants}
        grid = constants.get("STATE_GRID", 1)
        types = {n: "constexpr" if n in fixed else type_of(n, name, grid) for n in own}
        aligned = [i for i, n in enumerate(own) if types[n].startswith("*") and n not in ANYWHERE]
        made = compile_held(
            ASTSource(
                fn=kernel,
                signature=types,
                constexprs=fixed,
                attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
            ),
            target=GPUTarget("cuda", 90, 32),
            options=dict(num_warps=warps, enable_fp_fusion=False),
        )
        if kernel is walk_kernel:
            lanes = lanes_of_sums(made.asm["ttgir"])
            found.setdefault((fixed["K"], fixed["V"], grid), []).append(lanes)
        print(name, fixed)
    for sizes, (short, long) in found.items():
        assert short and short == long, (sizes, short, long)


if __name__ == "__main__":
    main("--quick" in sys.argv)
