"""Kernels wait for the previous one before their first access to global memory."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels.compile_launches import NO_WAIT, check_wait

KERNELS = Path(__file__).parents[2] / "lockstep" / "kernels"
ENTRY = "_kernel"
"""End of the names of functions that are launched."""


def kernels() -> Iterator[ast.FunctionDef]:
    """Yield the source of every Triton kernel."""
    for path in sorted(KERNELS.rglob("*.py")):
        text = path.read_text()
        if "triton" not in text or "numba" in path.name:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith(ENTRY):
                if any("jit" in ast.unparse(one) for one in node.decorator_list):
                    yield node


@pytest.mark.parametrize("kernel", list(kernels()), ids=lambda kernel: kernel.name)
def test_kernel_waits(kernel: ast.FunctionDef) -> None:
    """Compiled kernels of all ops are checked in test_compiles.py; this includes all others."""
    called = [node.func.id for node in ast.walk(kernel) if _is_call(node)]
    assert called.count("pdl_start") == (kernel.name not in NO_WAIT)


def _is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def test_access_before_the_wait_is_found() -> None:
    atomic = "atom.global.gpu.acq_rel.add.s32"
    for before in ("ld.global.v4.b32", "st.global.b16", "cp.async.cg.shared.global", atomic):
        with pytest.raises(AssertionError):
            check_wait("", f"mov.b32; {before} [%rd1]; griddepcontrol.wait; ld.global [%rd1];")
    with pytest.raises(AssertionError):
        check_wait("", "ld.global.b32 [%rd1];")
    check_wait("", "ld.param.b64 [a]; prefetch.global.L2 [%rd1]; griddepcontrol.wait; ld.global;")
