"""Discovery of ops, their backends, cases and benchmarks in the folders of lockstep.kernels.

An op's folder holds the contract and the reference in `contract.py` (or `__init__.py`), a module
per backend, `cases.py` and, if `lockstep bench kernels` measures its ops, `bench.py`.
"""

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules, walk_packages
from types import ModuleType
from typing import Any

import torch

import lockstep.kernels
from lockstep.kernels import architecture
from lockstep.kernels.registry import Op

CONTRACT = ".contract"
NO_BACKENDS = ("contract", "reference", "cases", "bench")
"""Modules of an op's folder that register no backend. Modules whose names begin with _ register
none either."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
Cases = Callable[[torch.dtype], Iterator[tuple[str, dict[str, Any]]]]
"""A dtype -> (name, arguments on the CPU) of each of an op's cases."""


def folders() -> list[ModuleType]:
    """Return every package below lockstep.kernels, in order of name."""
    return [
        import_module(module.name)
        for module in walk_packages(lockstep.kernels.__path__, f"{lockstep.kernels.__name__}.")
        if module.ispkg
    ]


def folder_of(op: Op) -> str:
    """Return the name of the package that defines an op."""
    return op.reference.__module__.removesuffix(CONTRACT)


def ops_of(folder: ModuleType) -> list[Op]:
    """Return the ops that a folder defines, in the order in which it names them."""
    exported = (value for value in vars(folder).values() if isinstance(value, Op))
    return [op for op in exported if folder_of(op) == folder.__name__]


def every_op() -> dict[str, Op]:
    """The ops of all folders, by name."""
    return {op.name: op for folder in folders() for op in ops_of(folder)}


def cases_of(op: Op) -> Cases:
    """`<op>_cases` of the op's cases.py."""
    module = import_module(f"{folder_of(op)}.cases")
    found: Cases = getattr(module, f"{op.name}_cases")
    return found


def traits_of(op: Op, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a layer says when it asks for the op, besides device and dtype, as these arguments have
    it: `<op>_traits` of the op's cases.py; none where there is no such function."""
    module = import_module(f"{folder_of(op)}.cases")
    found: dict[str, Any] = getattr(module, f"{op.name}_traits", lambda **_: {})(**arguments)
    return found


def benches() -> list[ModuleType]:
    """The bench.py of each folder that has one."""
    names = (f"{folder.__name__}.bench" for folder in folders())
    return [import_module(name) for name in names if find_spec(name)]


def load() -> None:
    """Imports every op's backends; those that need Triton only where it is installed. Idempotent.

    A backend that falls back on another imports it, hence is added after it and preferred to it.
    """
    for name in _modules_of(tuple(lockstep.kernels.__path__)):
        _load(name)


@cache
def _modules_of(path: tuple[str, ...]) -> list[str]:
    """The modules of backends in the folders of ops, which lie on this path: looked for once."""
    return [
        f"{folder.__name__}.{module.name}"
        for folder in folders()
        for module in iter_modules(folder.__path__)
        if module.name not in NO_BACKENDS and not module.name.startswith("_")
    ]


def _load(name: str) -> None:
    """Imports a module of backends, unless it needs Triton and that is not installed."""
    try:
        import_module(name)
    except ModuleNotFoundError as missing:
        needs_triton = (missing.name or "").partition(".")[0] == "triton"
        if not needs_triton or find_spec("triton") is not None:
            raise


def cpu_trait(**traits: Any) -> str | None:
    """None where a CPU backend can run: on a CPU."""
    if str(traits.get("device", "cpu")).partition(":")[0] == "cpu":
        return None
    return "it reads lengths on the host, and its bits are those of a CPU's libraries"


def arch_of(**traits: Any) -> int:
    """The architecture of the traits, e.g. 86: `arch`, of a GPU that is not there, or their
    device's own."""
    named: int | None = traits.get("arch")
    return architecture.number_of(traits["device"]) if named is None else named


def gpu_trait(**traits: Any) -> str | None:
    """None where a Triton kernel can run: a CUDA device, and a dtype of FLOATS if one is named."""
    if str(traits.get("device", "cpu")).partition(":")[0] != "cuda":
        return "Triton kernels need a CUDA device"
    dtype = traits.get("dtype", torch.float32)
    return None if dtype in FLOATS else f"dtype {dtype} is none of bf16, fp16 and fp32"
