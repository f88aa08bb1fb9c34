"""Kernels wait for the previous one before their first access to global memory."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels.compile_launches import EARLY_WEIGHT, NO_WAIT, RELEASE, WAIT, check_wait

KERNELS = Path(__file__).parents[2] / "lockstep" / "kernels"
ENTRY = "_kernel"
"""End of the names of functions that are launched."""
BEFORE_WAIT = {"dense_gemm_kernel", "up_pipeline_kernel", "down_pipeline_kernel"}
"""Kernels that prefetch, or initialize barriers in shared memory, before they wait."""


def kernels() -> Iterator[tuple[ast.FunctionDef, ast.Module]]:
    """Yield the source of every Triton kernel, and of its module."""
    for path in sorted(KERNELS.rglob("*.py")):
        text = path.read_text()
        if "triton" not in text or "numba" in path.name:
            continue
        module = ast.parse(text)
        for node in module.body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith(ENTRY):
                if any("jit" in ast.unparse(one) for one in node.decorator_list):
                    yield node, module


@pytest.mark.parametrize(
    ("kernel", "module"), [pytest.param(*one, id=one[0].name) for one in kernels()]
)
def test_kernel_waits(kernel: ast.FunctionDef, module: ast.Module) -> None:
    """Compiled kernels of all ops are checked in test_compiles.py; this includes all others.

    A kernel that copies its weight early waits in its producer, a function of the same module.
    """
    code = module if kernel.name in EARLY_WEIGHT else kernel
    called = [node.func.id for node in ast.walk(code) if _is_call(node)]
    assert called.count("pdl_start") == (kernel.name not in NO_WAIT)
    if kernel.name not in {*NO_WAIT, *EARLY_WEIGHT, *BEFORE_WAIT}:
        _docstring, first, *_ = kernel.body
        assert ast.unparse(first) == "pdl_start()"


def test_cache_keys_have_the_order_of_wait_and_release() -> None:
    """Triton's cache keys have the source of JIT functions only."""
    module = ast.parse((KERNELS / "device" / "dependent_launch.py").read_text())
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    (start,) = (node for node in functions if node.name == "pdl_start")
    assert [ast.unparse(one) for one in start.decorator_list] == ["triton.jit"]


def _is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def test_access_before_the_wait_is_found() -> None:
    atomic = "atom.global.gpu.acq_rel.add.s32"
    for before in ("ld.global.v4.b32", "st.global.b16", "cp.async.cg.shared.global", atomic):
        with pytest.raises(AssertionError):
            check_wait("", f"mov.b32; {before} [%rd1]; griddepcontrol.wait; ld.global [%rd1];")
    for code in ("ld.global.b32 [%rd1];", f"{WAIT}; ld.global.nc.b32 [%rd1];"):
        with pytest.raises(AssertionError):
            check_wait("", code)
    check_wait("", "ld.param.b64 [a]; prefetch.global.L2 [%rd1]; griddepcontrol.wait; ld.global;")


def test_early_copy_of_x_is_found() -> None:
    """Parameter 0 is the descriptor of x, parameter 5 the one of the weight."""
    addresses = "mov.b64 %rd1, kernel_param_0; mov.b64 %rd2, kernel_param_5;"
    x, weight = (
        f"cp.async.bulk.tensor.2d.shared [%r1], [{desc}, {{%r2, %r3}}], [%r4];"
        for desc in ("%rd1", "%rd2")
    )
    start = f"{WAIT}; {RELEASE};"
    for code in (f"{weight} {start} {x} {weight}", f"{start} {weight} {x}"):
        check_wait("pipeline_kernel", f"{addresses} {code}")
    for code in (f"{weight} {x} {start} {x}", f"{x} {start} {weight}", f"{weight} {x}"):
        with pytest.raises(AssertionError):
            check_wait("pipeline_kernel", f"{addresses} {code}")
