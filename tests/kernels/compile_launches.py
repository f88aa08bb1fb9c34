"""Compile what every op's Triton backend launches for a Hopper GPU, without one.

The compiler rejects what the interpreter accepts, such as a variable with two shapes in the
branches of an `if`. Launches are recorded, not executed, in bf16: of each op's first case, of the
first case of each combination of absent arguments, and of the first of each kind of quantized
weight, quantized cache and state.

    python -m tests.kernels.compile_launches [--quick] [op ...]

--quick: only each backend's first case.

Also checks that each kernel waits for the previous one before its first access to global memory
(device/dependent_launch.py).
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from lockstep.kernels.backends import all_ops, layer_traits, load, load_cases
from lockstep.kernels.exchange.device_push import Peers
from lockstep.kernels.formats.kv import QuantizedKV
from lockstep.kernels.formats.weights import QuantizedWeight
from tests.kernels.layouts import compile_checked

HOPPER = GPUTarget("cuda", 90, 32)
COMPILED = ("triton", "quantized", "push")
"""Backends whose launches are compiled here."""
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
"""Keywords of a launch that are compiler options."""
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
}
WAIT = "griddepcontrol.wait"
ACCESS = re.compile(r"\b(ld|st|atom|red)\.(\w+\.)*global|\bcp\.async(?!\.bulk\.prefetch)")
"""Access to global memory in PTX, except for prefetches."""
NON_COHERENT = "ld.global.nc"
"""Load that may return what was in the cache before the wait."""
NO_WAIT = {
    "stream_k_kernel": "CTAs that start early are placed unevenly, and these wait for each other",
    "push_packets_kernel": "waits for other GPUs",
    "push_kernel": "waits for other GPUs",
    "push_add_rms_norm_kernel": "waits for other GPUs",
    "propose_kernel": "waits for other GPUs",
    "choose_proposed_kernel": "waits for other GPUs",
}
"""Kernels that start when the previous one has ended, and why."""
EARLY_WEIGHT = {"pipeline_kernel", "fp8_gemm_hopper_kernel"}
"""Kernels whose producer warp may copy tiles of w_desc before it waits."""
RELEASE = "griddepcontrol.launch_dependents"
TMA_COPY = re.compile(r"cp\.async\.bulk\.tensor\S+ \[%r\d+\], \[(%rd\d+)")
"""TMA copy into shared memory; the group is the register with the descriptor's address."""


class Launches:
    """Replacement of JITFunction.run that compiles each distinct launch.

    code: (kernel name, PTX) of each.
    """

    def __init__(self) -> None:
        self.seen: set[tuple[str, ...]] = set()
        self.code: list[tuple[str, str]] = []

    def compile(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Compile a launch of the kernel with these arguments."""
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        fixed: dict[tuple[int, ...], Any] = {}
        aligned: dict[tuple[int, ...], Any] = {}
        types = {
            p.name: "constexpr" if p.is_constexpr else type_of(values[p.name], (i,), fixed, aligned)
            for i, p in enumerate(kernel.params)
        }
        fixed |= {(i,): values[p.name] for i, p in enumerate(kernel.params) if p.is_constexpr}
        key = (kernel.__name__, str(types), str(fixed), str(options))
        if key not in self.seen:
            self.seen.add(key)
            kind = source_kind(kernel)
            source = kind(fn=kernel, signature=types, constexprs=fixed, attrs=aligned)
            result = compile_checked(source, target=HOPPER, options=options)
            self.record(kernel.__name__, result)
            self.code.append((kernel.__name__, result.asm["ptx"]))

    def record(self, name: str, result: Any) -> None:
        """Do nothing with a compiled kernel: for subclasses that inspect it."""


def check_wait(name: str, ptx: str) -> None:
    """Check that a kernel waits before its first access to global memory, or never waits."""
    if name in NO_WAIT:
        assert WAIT not in ptx, name
        return
    assert NON_COHERENT not in ptx, name
    if name in EARLY_WEIGHT:
        check_copies(name, ptx)
        return
    before, wait, _ = ptx.partition(WAIT)
    assert wait and not ACCESS.search(before), name


def check_copies(name: str, ptx: str) -> None:
    """Check that the producer warp copies tiles of w_desc alone before it waits, or none.

    x_desc and w_desc are the first descriptors among the kernel's parameters.
    """
    before, _, after = ptx.partition(RELEASE)
    before, wait, between = before.rpartition(WAIT)
    assert wait, name
    early, late = (
        {_parameter_number(ptx, register) for register in TMA_COPY.findall(part)}
        for part in (before, between + after)
    )
    x_desc, w_desc = sorted(early | late)[:2]
    assert early <= {w_desc} and x_desc in late, (name, early, late)


def _parameter_number(ptx: str, register: str) -> int:
    """Return the number of the parameter whose address a register has."""
    while register.startswith("%"):
        match = re.search(rf"(?:mov|cvta)\S*\s+{register}, ([^;]+);", ptx)
        assert match is not None, register
        register = match[1]
    return int(register.rpartition("_")[2])


def source_kind(kernel: Any) -> type[ASTSource]:
    """Return the source class of a kernel: Triton's or Gluon's."""
    return GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource


def type_of(
    value: Any, index: tuple[int, ...], fixed: dict[Any, Any], aligned: dict[Any, Any]
) -> Any:
    """Return the type of an argument; record the paths of constants (None) and of aligned
    tensors."""
    if value is None:
        fixed[index] = None
        return "constexpr"
    if isinstance(value, Tensor):
        aligned[index] = [["tt.divisibility", 16]]
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, TensorDescriptor):
        block = ", ".join(map(str, value.block_shape))
        return f"tensordesc<{TYPES[value.base.dtype]}[{block}],{value.layout!r}>"
    if isinstance(value, tuple):
        parts = [type_of(x, (*index, i), fixed, aligned) for i, x in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, int) and value.bit_length() > 31:
        return "i64"
    return "fp32" if isinstance(value, float) else "i32"


def main(names: list[str]) -> None:
    """Compile the launches of these ops, or of all; print each op and its kernels."""
    quick = "--quick" in names
    names = [name for name in names if name != "--quick"]
    load()
    launches = Launches()
    JITFunction.run = lambda kernel, *args, **kwargs: launches.compile(kernel, *args, **kwargs)
    for name, op in all_ops().items():
        if names and name not in names:
            continue
        absent: set[tuple[str, frozenset[str]]] = set()
        for _, kwargs in load_cases(op)(torch.bfloat16):
            if "group" in kwargs:
                kwargs["group"].peers = some_peers(kwargs["group"].size)
            missing = frozenset() if quick else frozenset(argument_kinds(kwargs))
            traits = dict(device="cuda", dtype=torch.bfloat16) | layer_traits(op, kwargs)
            for backend in [op.backends[name] for name in COMPILED if name in op.backends]:
                served = backend.supports(**traits) is None and not empty(kwargs)
                if served and (backend.run.__name__, missing) not in absent:
                    absent.add((backend.run.__name__, missing))
                    backend.run(**kwargs)
        for kernel, ptx in launches.code:
            check_wait(kernel, ptx)
        launches.code.clear()
        kernels = sorted({key[0] for key in launches.seen})
        launches.seen.clear()
        assert kernels, f"{name} launches nothing"
        print(name, *kernels, flush=True)


def some_peers(size: int) -> Peers:
    """Return addresses of memory that no launch reads, since launches are compiled only."""
    return Peers((1 << 40,) * size, torch.zeros(3, dtype=torch.int64), 1 << 40)


def argument_kinds(arguments: dict[str, Any]) -> Iterator[str]:
    """Yield the arguments that are None, the dtypes of tensors and of other arguments with parts,
    the layouts and missing parts of quantized weights, and the quantizers of caches."""
    for name, value in arguments.items():
        if value is None:
            yield name
        elif isinstance(value, Tensor):
            yield f"{name} of {value.dtype}"
        elif isinstance(value, QuantizedWeight):
            lacks = [part for part, tensor in vars(value).items() if tensor is None]
            yield f"{name} of {type(value).__name__} without {lacks}"
        elif isinstance(value, QuantizedKV):
            yield f"{name} of {value.quantizer}"
        elif is_dataclass(value):
            tensors = [part for part in vars(value).values() if isinstance(part, Tensor)]
            yield f"{name} in {[part.dtype for part in tensors]}"


def empty(arguments: dict[str, Any]) -> bool:
    """Return True if a case has no rows, for which nothing is launched."""
    first = next(iter(arguments.values()))
    return isinstance(first, Tensor) and not first.numel()


if __name__ == "__main__":
    main(sys.argv[1:])
