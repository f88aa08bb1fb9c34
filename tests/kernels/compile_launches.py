"""Compiles what every op's Triton backend launches for a Hopper GPU, which needs none: what the
interpreter lets pass, such as a name of two shapes in the branches of an `if`, is an error here.

Launches are recorded, not made: of each op's first case, of the first one in which other arguments
are None, and of the first of each kind of packed weight, packed cache and state, in bf16.

    python -m tests.kernels.compile_launches [--quick] [op ...]

--quick: of each backend's first case alone.
"""

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
from lockstep.kernels.formats.kv import QuantizedKV
from lockstep.kernels.formats.weights import QuantizedWeight
from tests.kernels.layouts import compile_held

HOPPER = GPUTarget("cuda", 90, 32)
COMPILED = ("triton", "quantized")
"""Backends whose launches are compiled here."""
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
"""Keywords of a launch that are the compiler's."""
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.bool: "i1",
}


class Launches:
    """Stands for JITFunction.run: compiles each launch that differs from those before. code: the
    PTX of each, by the kernel's name."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, ...]] = set()
        self.code: list[tuple[str, str]] = []

    def compile(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        """A launch of the kernel with these arguments."""
        options = {name: given.pop(name) for name in OPTIONS if name in given}
        values = dict(zip(kernel.arg_names, args, strict=False)) | given
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
            made = compile_held(source, target=HOPPER, options=options)
            self.code.append((kernel.__name__, made.asm["ptx"]))


def source_kind(kernel: Any) -> type[ASTSource]:
    """What compiles a kernel: of Triton, or of Gluon."""
    return GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource


def type_of(
    value: Any, place: tuple[int, ...], fixed: dict[Any, Any], aligned: dict[Any, Any]
) -> Any:
    """The type of an argument; notes the places of None, a constant, and of tensors: aligned."""
    if value is None:
        fixed[place] = None
        return "constexpr"
    if isinstance(value, Tensor):
        aligned[place] = [["tt.divisibility", 16]]
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, TensorDescriptor):
        block = ", ".join(map(str, value.block_shape))
        return f"tensordesc<{TYPES[value.base.dtype]}[{block}],{value.layout!r}>"
    if isinstance(value, tuple):
        parts = [type_of(x, (*place, i), fixed, aligned) for i, x in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return "fp32" if isinstance(value, float) else "i32"


def main(names: list[str]) -> None:
    """Compiles the launches of these ops, or of all; prints each op and its kernels."""
    quick = "--quick" in names
    names = [name for name in names if name != "--quick"]
    load()
    launches = Launches()
    JITFunction.run = lambda kernel, *args, **given: launches.compile(kernel, *args, **given)
    for name, op in all_ops().items():
        if names and name not in names:
            continue
        absent: set[tuple[str, frozenset[str]]] = set()
        for _, given in load_cases(op)(torch.bfloat16):
            missing = frozenset() if quick else frozenset(absent_of(given))
            traits = dict(device="cuda", dtype=torch.bfloat16) | layer_traits(op, given)
            for backend in [op.backends[name] for name in COMPILED if name in op.backends]:
                served = backend.supports(**traits) is None and not empty(given)
                if served and (backend.run.__name__, missing) not in absent:
                    absent.add((backend.run.__name__, missing))
                    backend.run(**given)
        kernels = sorted({key[0] for key in launches.seen})
        launches.seen.clear()
        assert kernels, f"{name} launches nothing"
        print(name, *kernels, flush=True)


def absent_of(arguments: dict[str, Any]) -> Iterator[str]:
    """The arguments that are None, the layouts of packed weights, by what they lack, the codecs of
    packed caches, and the dtypes of other arguments with parts."""
    for name, value in arguments.items():
        if value is None:
            yield name
        elif isinstance(value, QuantizedWeight):
            lacks = [part for part, tensor in vars(value).items() if tensor is None]
            yield f"{name} of {type(value).__name__} without {lacks}"
        elif isinstance(value, QuantizedKV):
            yield f"{name} of {value.quantizer}"
        elif is_dataclass(value):
            tensors = [part for part in vars(value).values() if isinstance(part, Tensor)]
            yield f"{name} in {[part.dtype for part in tensors]}"


def empty(arguments: dict[str, Any]) -> bool:
    """Whether a case holds no rows: nothing is launched for it."""
    first = next(iter(arguments.values()))
    return isinstance(first, Tensor) and not first.numel()


if __name__ == "__main__":
    main(sys.argv[1:])
