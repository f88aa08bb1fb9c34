"""Discovery of ops, their backends, cases and benchmarks in the packages of lockstep.kernels.

An op's folder has the contract and the reference in `contract.py` (or `__init__.py`), a module
per backend, `cases.py` and, if `lockstep bench kernels` measures its ops, `bench.py`.
"""

import logging
import platform
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules, walk_packages
from threading import Lock
from types import ModuleType
from typing import Any

import torch

import lockstep.kernels
from lockstep.kernels import architecture
from lockstep.kernels.registry import Op

CONTRACT = ".contract"
NO_BACKENDS = ("contract", "reference", "cases", "bench")
"""Modules of an op's folder that register no backend.

Modules whose names begin with _ register none either.
"""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Activation dtypes of the Triton and Numba backends."""
COMPILERS = ("triton", "numba", "llvmlite")
"""Optional packages that compile kernels."""
MIN_CPU = ("AVX2", "AVX512", "NEON", "SVE")
"""Beginnings of the capabilities of CPUs that convert fp16 and multiply and add in one
instruction."""
LOADING = Lock()
"""Lock of the threads that import backends."""
Cases = Callable[[torch.dtype], Iterator[tuple[str, dict[str, Any]]]]
"""Generator of test cases of an op: dtype -> (name, arguments on the CPU)."""


def op_packages() -> list[ModuleType]:
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


def all_ops() -> dict[str, Op]:
    """Return the ops of all packages, by name."""
    return {op.name: op for folder in op_packages() for op in ops_of(folder)}


def load_cases(op: Op) -> Cases:
    """Import an op's generator of test cases: `<op>_cases` of its folder's cases.py."""
    module = import_module(f"{folder_of(op)}.cases")
    cases: Cases = getattr(module, f"{op.name}_cases")
    return cases


def layer_traits(op: Op, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the traits with which a layer of these arguments would choose a backend.

    Device and dtype are not among them. The folder's cases.py may define `<op>_traits`; without
    that function there are no traits.
    """
    module = import_module(f"{folder_of(op)}.cases")
    traits: dict[str, Any] = getattr(module, f"{op.name}_traits", lambda **_: {})(**arguments)
    return traits


def benchmark_modules() -> list[ModuleType]:
    """Import the bench.py of each folder that has one."""
    names = (f"{folder.__name__}.bench" for folder in op_packages())
    return [import_module(name) for name in names if find_spec(name)]


def load() -> None:
    """Import every op's backends, those in Triton or Numba only if it can be imported. Idempotent.

    Backends that are registered later are preferred. A backend that falls back on another one
    imports it, so it is registered after it.
    """
    # Without its compiler, a module is imported anew by every call and fails halfway. Another
    # thread's import would find such a half.
    with LOADING:
        for name in _modules_of(tuple(lockstep.kernels.__path__)):
            _load(name)


@cache
def _modules_of(path: tuple[str, ...]) -> list[str]:
    """Return the names of all backend modules. path: of the package; the key of the cache."""
    return [
        f"{folder.__name__}.{module.name}"
        for folder in op_packages()
        for module in iter_modules(folder.__path__)
        if module.name not in NO_BACKENDS and not module.name.startswith("_")
    ]


def _load(name: str) -> None:
    """Import a module of backends, unless its compiler is not installed or cannot be imported."""
    try:
        import_module(name)
    except ImportError as error:
        compiler = (error.name or "").partition(".")[0]
        missing = compiler in COMPILERS and find_spec(compiler) is None
        if not missing and str(error) != numba_error():
            raise


def cpu_trait(**traits: Any) -> str | None:
    """Return None if a CPU backend can run with these traits, else the reason why not."""
    if str(traits.get("device", "cpu")).partition(":")[0] == "cpu":
        return None
    return "it reads lengths on the host and its bits depend on the CPU's BLAS library"


def numba_trait(**traits: Any) -> str | None:
    """Return None if a Numba kernel can run with these traits, else the reason why not."""
    if str(traits.get("device", "cpu")).partition(":")[0] != "cpu":
        return "Numba kernels run on a CPU"
    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith(MIN_CPU) and platform.machine() not in ("arm64", "aarch64"):
        return f"the CPU's capability {capability} has no fp16 conversion and no FMA"
    dtype = traits.get("dtype", torch.float32)
    return None if dtype in FLOATS else f"dtype {dtype} is not bf16, fp16 or fp32"


@cache
def numba_error() -> str | None:
    """Return why the installed Numba cannot be imported, e.g. next to a newer NumPy, and log it.

    None if it can be imported, or is not installed.
    """
    if find_spec("numba") is None:
        return None
    try:
        import_module("numba")
    except ImportError as error:
        logging.getLogger("lockstep.kernels").warning(
            "Numba cannot be imported (%s), so torch's CPU kernels serve: they are slower and have "
            "other bits. Install versions that fit: pip install --upgrade numba numpy",
            error,
        )
        return str(error)
    return None


def uses_numba(dtype: torch.dtype) -> bool:
    """Return whether the ops of a model in dtype on this CPU have Numba kernels."""
    installed = find_spec("numba") is not None and numba_error() is None
    return installed and numba_trait(dtype=dtype) is None


def resolve_architecture(**traits: Any) -> int:
    """Return the architecture number of traits, e.g. 86.

    It is the trait `arch` (of a GPU that need not be present) or that of the trait `device`.
    """
    number: int | None = traits.get("arch")
    return architecture.sm_number(traits["device"]) if number is None else number


def gpu_trait(**traits: Any) -> str | None:
    """Return None if a Triton kernel can run with these traits, else the reason why not."""
    if str(traits.get("device", "cpu")).partition(":")[0] != "cuda":
        return "Triton kernels need a CUDA device"
    dtype = traits.get("dtype", torch.float32)
    return None if dtype in FLOATS else f"dtype {dtype} is not bf16, fp16 or fp32"
