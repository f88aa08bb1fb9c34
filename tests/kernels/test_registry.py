"""Every op there is, is tested: with cases, in every face, interpreted where there is no GPU."""

import importlib
import pkgutil

import lockstep.kernels
from lockstep.kernels import Op
from tests.kernels.adversarial import ROWS
from tests.kernels.faces import CASES


def ops() -> set[Op]:
    """Every op that some module of lockstep.kernels defines."""
    found: set[Op] = set()
    for module in pkgutil.walk_packages(lockstep.kernels.__path__, "lockstep.kernels."):
        values = vars(importlib.import_module(module.name)).values()
        found |= {value for value in values if isinstance(value, Op)}
    return found


def test_every_op_has_cases() -> None:
    """The tests of this folder run what CASES holds."""
    names = {op.name for op in ops()}
    assert len(names) >= 11
    assert names == {op.name for op in CASES}
    assert set(ROWS) <= set(CASES)


def test_every_op_has_a_triton_face() -> None:
    """So a kernel of it runs under the interpreter: test_backends and test_bounds take all."""
    assert all("triton" in op.backends for op in ops())
