"""Compile the kernels of the recurrent form for Hopper, without a GPU.

The compiler rejects what the interpreter accepts, such as a variable with two shapes in the
branches of an `if`. recurrent_step_kernel has binaries for short, long and committed windows: the
lanes of K must have the same layout in all.

    python -m tests.kernels.compiles [--quick]

--quick: only a layer with odd widths, and only to the layouts. compile_launches compiles each
kernel to machine code once.
"""

import re
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

from triton import knobs, next_power_of_2
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lockstep.kernels.gated_delta_rule import triton as delta
from lockstep.kernels.gated_delta_rule.step_kernels import gated_norm_kernel, step_inputs_kernel
from lockstep.kernels.recurrent import step
from lockstep.kernels.recurrent.history import ROUNDING_INTERVAL
from lockstep.kernels.recurrent.step_kernel import recurrent_step_kernel, save_tokens_kernel
from tests.kernels.layouts import compile_checked, stop_after

ODD = dict(HK=1, HV=3, K=24, V=40)
LAYERS = (dict(HK=2, HV=4, K=64, V=16), ODD, dict(HK=16, HV=48, K=128, V=128))
"""K larger than V, K smaller than V, and the layer of Qwen3.6-27B."""
MAMBA = (dict(HK=8, HV=64, K=128, V=64), dict(HK=8, HV=128, K=128, V=80))
"""Layers of Nemotron 3 Nano and Nemotron Nano 9B."""
LONGS = {"slots_ptr"}
INTS = {"starts_ptr", "folded_ptr", "committed_ptr"}
FLOATS = {"eps"}
HALVES = {"mixed_ptr", "z_ptr", "b_ptr", "a_ptr", "conv_weight_ptr", "norm_ptr", "conv_history_ptr"}
NUMBERS = {
    "length",
    "conv_len",
    "history_len",
    "flush",
    "stride",
    "z_stride",
    "b_stride",
    "a_stride",
    "b_partial_stride",
    "a_partial_stride",
}
UNALIGNED = {"b_ptr", "a_ptr", "slots_ptr", "starts_ptr", "folded_ptr", "committed_ptr"}
"""Pointers that are not specialised on alignment."""
SUM = re.compile(
    r'"tt.reduce"\(%\S+\) <\{axis = 0 : i32\}> \(\{.*?\}\) : \(tensor<((?:\d+x)+)\w+, (#\w+)>',
    re.DOTALL,
)
"""A sum over axis 0 in ttgir: shape and layout of its operand."""


def type_of(name: str, kernel: str, grid: int) -> str:
    """Return the type of a kernel's argument for a bf16 model; grid > 1: with a 16-bit state."""
    if name in NUMBERS or (name == "heads" and kernel == "gated_norm_kernel"):
        return "i32"
    if name in FLOATS:
        return "fp32"
    halves = HALVES | ({"state_ptr"} if grid > 1 else set())
    halves |= {"out_ptr"} if kernel == "gated_norm_kernel" else set()
    kinds = ((LONGS, "*i64"), (INTS, "*i32"), (halves, "*bf16"))
    return next((kind for names, kind in kinds if name in names), "*fp32")


def kernels(quick: bool) -> Iterator[tuple[Any, int, dict[str, Any]]]:
    """Yield (kernel, warps, constants) of each layer."""
    for sizes in (ODD,) if quick else LAYERS:
        same = dict(**sizes, R=3, L2_EPS=1e-6, **step.block_sizes(sizes, 128))
        yield from step_kernels(sizes, dict(DELTA_RULE=True, d_ptr=None))
        for omitted in (dict(committed_ptr=None, length=None), {}):
            yield gated_norm_kernel, delta.NORM_WARPS, dict(**same, HEADS=delta.HEADS) | omitted
        for omitted in (dict(committed_ptr=None), {}):
            yield step_inputs_kernel, 1, dict(**same, TOKENS=delta.MAX_TOKENS, PARTS=1) | omitted
        extra = dict(BLOCK_K=next_power_of_2(sizes["HK"] * sizes["K"]), STATE_GRID=16)
        yield save_tokens_kernel, 4, {**sizes, **extra, "BLOCK_HV": next_power_of_2(sizes["HV"])}
    for sizes in () if quick else MAMBA:
        yield from step_kernels(sizes, dict(DELTA_RULE=False))


def step_kernels(
    sizes: dict[str, int], rule: dict[str, Any]
) -> Iterator[tuple[Any, int, dict[str, Any]]]:
    """Yield recurrent_step_kernel for fp32 and 16-bit states, short, long and committed windows."""
    layout = step.register_layout(sizes)
    warps = layout["WARPS"] // step.CTAS_PER_HEAD or 1
    same = {**sizes, **layout, **rule, "WARPS": warps, "SECTOR": step.SECTOR}
    columns = warps * layout["COLUMNS"]
    states = ((1, 4), (ROUNDING_INTERVAL, 2))
    windows: tuple[dict[str, Any], ...] = (
        {"PREFETCH": step.PREFETCH, "committed_ptr": None},
        {"PREFETCH": 2 * step.PREFETCH, "committed_ptr": None},
        {"PREFETCH": 2 * step.PREFETCH},
    )
    for (grid, size), window in product(states, windows):
        adjacent = step.adjacent_ctas(sizes["V"], columns, size)
        constants = {"STATE_GRID": grid, "ADJACENT_CTAS": adjacent}
        yield recurrent_step_kernel, warps, same | constants | window


def lanes_of_sums(code: str) -> set[tuple[bool, int]]:
    """Return, for each 3-D sum over axis 0, whether one warp has all of it, and its lanes."""
    result = set()
    for sizes, layout in SUM.findall(code):
        rows, *rest = sizes.split("x")[:-1]
        match = re.search(rf"{layout} = .*?threadsPerWarp = \[(\d+).*?warpsPerCTA = \[(\d+)", code)
        if len(rest) == 2:
            assert match, layout
            result.add((match[1] == rows and match[2] == "1", int(rows)))
    return result


def main(quick: bool) -> None:
    """Compile all kernels, down to machine code unless quick."""
    knobs.runtime.add_stages_inspection_hook = stop_after("ttgir") if quick else None
    result: dict[tuple[int, int, int], list[set[tuple[bool, int]]]] = {}
    for kernel, warps, constants in kernels(quick):
        name = kernel.__name__
        names = kernel.arg_names
        fixed = {n: constants[n] for n in names if n in constants}
        grid = constants.get("STATE_GRID", 1)
        types = {n: "constexpr" if n in fixed else type_of(n, name, grid) for n in names}
        aligned = [
            i for i, n in enumerate(names) if types[n].startswith("*") and n not in UNALIGNED
        ]
        created = compile_checked(
            ASTSource(
                fn=kernel,
                signature=types,
                constexprs=fixed,
                attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
            ),
            target=GPUTarget("cuda", 90, 32),
            options=dict(num_warps=warps, enable_fp_fusion=False),
        )
        if kernel is recurrent_step_kernel:
            lanes = lanes_of_sums(created.asm["ttgir"])
            result.setdefault((fixed["K"], fixed["V"], grid), []).append(lanes)
        print(name, fixed)
    for sizes, layouts in result.items():
        short, *rest = layouts
        assert short and len(rest) == 2 and rest == [short] * 2, (sizes, layouts)


if __name__ == "__main__":
    main("--quick" in sys.argv)
