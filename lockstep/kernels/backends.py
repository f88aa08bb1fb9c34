"""Discovery of ops by folder: each op's backends, test cases and benchmarks.

An op's folder holds the contract and the reference in `contract.py` (or `__init__.py`), the
backends in modules, `cases.py` and, if `lockstep bench kernels` measures its ops, `bench.py`.
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

NO_BACKENDS = ("cases", "bench")
"""Modules of an op's folder without a backend. Modules whose names begin with _ have none either.
"""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
Cases = Callable[[torch.dtype], Iterator[tuple[str, dict[str, Any]]]]
"""A dtype -> (name, arguments on the CPU) of each of an op's cases."""


def folders() -> list[ModuleType]:
    """Return the packages under lockstep.kernels at any depth, sorted by path."""
    return [
        import_module(module.name)
        for module in walk_packages(lockstep.kernels.__path__, "lockstep.kernels.")
        if module.ispkg
    ]


def ops_of(folder: ModuleType) -> list[Op]:
    """Return the ops that a folder defines, in the order of their definition."""
    own = (value for value in vars(folder).values() if isinstance(value, Op))
    return [op for op in own if op.package == folder.__name__]


def every_op() -> dict[str, Op]:
    """Return the ops of all folders, by name."""
    return {op.name: op for folder in folders() for op in ops_of(folder)}


def cases_of(op: Op) -> Cases:
    """Return the op's generator of test cases: `<op>_cases` of the cases.py of its folder."""
    module = import_module(f"{op.package}.cases")
    cases: Cases = getattr(module, f"{op.name}_cases")
    return cases


def traits_of(op: Op, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the traits by which a layer with these arguments chooses a backend of the op.

    Device and dtype are not among them. They come from `<op>_traits` of the cases.py of the op's
    folder; without that function there are none.
    """
    module = import_module(f"{op.package}.cases")
    traits: dict[str, Any] = getattr(module, f"{op.name}_traits", lambda **_: {})(**arguments)
    return traits


def benches() -> list[ModuleType]:
    """Import the bench.py of each folder that has one."""
    names = (f"{folder.__name__}.bench" for folder in folders())
    return [import_module(name) for name in names if find_spec(name)]


def load() -> None:
    """Import every op's backends; those that need Triton only if it is installed. Idempotent.

    A backend that falls back on another imports it, hence is added after it and preferred to it.
    """
    for name in _modules_of(tuple(lockstep.kernels.__path__)):
        _load(name)


@cache
def _modules_of(path: tuple[str, ...]) -> list[str]:
    """Return the names of the backend modules in the folders of ops. path: the cache's key."""
    return [
        f"{folder.__name__}.{module.name}"
        for folder in folders()
        if ops_of(folder)
        for module in iter_modules(folder.__path__)
        if module.name not in NO_BACKENDS and not module.name.startswith("_")
    ]


def _load(name: str) -> None:
    """Import a module of backends, unless it needs Triton and Triton is not installed."""
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
