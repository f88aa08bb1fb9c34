"""Runs inline assembly of kernels on the CPU: the few PTX instructions that they hold.

Stands for tl.inline_asm_elementwise under Triton's interpreter, which runs none. Every operand is
an array with one element per thread, as in kernels of one element per thread (quantized_gemv.py);
mma.sync.m16n8k16 follows the fragments of the PTX ISA.
"""

import ctypes
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import TensorHandle

Numbers = NDArray[Any]
NUMPY = {"int32": np.int32, "float32": np.float32}


def halves(word: Numbers, kind: torch.dtype) -> Numbers:
    """Words of two numbers of 16 bits -> [threads, 2] fp64."""
    pairs = np.ascontiguousarray(word, np.uint32).view(np.int16).reshape(-1, 2)
    return torch.from_numpy(pairs.copy()).view(kind).double().numpy()


def odd(numbers: Numbers) -> Numbers:
    """fp64 -> fp32, rounded so that what is rounded again is rounded right: towards 0, with the
    last bit set where anything is lost."""
    found = numbers.astype(np.float32)
    lost = np.isfinite(found) & (found.astype(np.float64) != numbers)
    above = lost & (np.abs(found.astype(np.float64)) > np.abs(numbers))
    bits = found.view(np.uint32) - above.astype(np.uint32)
    return (bits | lost.astype(np.uint32)).view(np.float32)


def joined(pairs: Numbers, kind: torch.dtype) -> Numbers:
    """[threads, 2] of fp64 -> words, each number rounded once."""
    rounded = torch.from_numpy(odd(np.ascontiguousarray(pairs, np.float64))).to(kind)
    return rounded.view(torch.int16).numpy().view(np.uint32).reshape(-1)


def lop3(a: Numbers, b: Numbers, c: Numbers, table: int) -> Numbers:
    """Any function of three bits, by its table."""
    found = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for case in range(8):
        if table >> case & 1:
            own = [part if case >> bit & 1 else ~part for part, bit in ((a, 2), (b, 1), (c, 0))]
            found |= own[0] & own[1] & own[2]
    return found


def permuted(a: Numbers, b: Numbers, order: Numbers) -> Numbers:
    """prmt.b32: by the lower 16 bits of order; 8 beside a byte's place asks for its sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    wide = order.astype(np.uint64)
    found = np.zeros(np.broadcast_shapes(both.shape, wide.shape), np.uint64)
    for place in range(4):
        which = wide >> np.uint64(4 * place)
        chosen = both >> (which & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
        signs = (chosen >> np.uint64(7)) * np.uint64(0xFF)
        chosen = np.where(which & np.uint64(8), signs, chosen)
        found |= chosen << np.uint64(8 * place)
    return found.astype(np.uint32)


def product(a: list[Numbers], b: list[Numbers], c: list[Numbers], kind: torch.dtype) -> Any:
    """mma.sync.m16n8k16 of each warp: fragments a (4), b (2), c (4), and c's like -> the sums."""
    lane = np.arange(32)
    (g, q) = np.divmod(lane, 4)
    found = [part.copy() for part in c]
    for first in range(0, a[0].size, 32):
        own = slice(first, first + 32)
        left = np.zeros((16, 16))
        right = np.zeros((16, 8))
        total = np.zeros((16, 8))
        for j in range(2):
            for i in range(4):
                left[g + i % 2 * 8, 2 * q + i // 2 * 8 + j] = halves(a[i][own], kind)[:, j]
            for i in range(2):
                right[2 * q + 8 * i + j, g] = halves(b[i][own], kind)[:, j]
        for i in range(4):
            total[g + i // 2 * 8, 2 * q + i % 2] = c[i][own]
        total += left @ right
        for i in range(4):
            found[i][own] = total[g + i // 2 * 8, 2 * q + i % 2]
    return found


def loaded(addresses: Numbers, words: int) -> Numbers:
    """The words at these addresses: [words, threads]."""
    assert not (addresses % (4 * words)).any(), "not aligned"
    least = int(addresses.min())
    extent = int(addresses.max()) - least + 4 * words
    found = np.frombuffer((ctypes.c_char * extent).from_address(least), np.uint32)
    return found[(addresses - least) // 4 + np.arange(words)[:, None]]


def fused(a: Numbers, b: Numbers, c: Numbers) -> Numbers:
    """fma.rn.f32, of products that fp32 holds exactly."""
    product = a.astype(np.float32) * b.astype(np.float32)
    exact = a.astype(np.float64) * b.astype(np.float64)
    assert np.array_equal(product.astype(np.float64), exact, equal_nan=True), "it is rounded"
    return product + c.astype(np.float32)


ARITHMETIC: dict[str, Callable[..., Numbers]] = {
    "mul.rn.f32": lambda a, b: a.astype(np.float32) * b.astype(np.float32),
    "sub.rn.f32": lambda a, b: a.astype(np.float32) - b.astype(np.float32),
    "cvt.f32.f16": lambda a: halves(a, torch.float16)[:, 0].astype(np.float32),
    "fma.rn.f32": fused,
}


class Thread:
    """The registers of all threads, and what each instruction does to them."""

    def __init__(self, given: list[Numbers], results: int) -> None:
        self.registers = {f"${results + i}": value for i, value in enumerate(given)}
        self.floats: set[str] = set()

    def read(self, name: str) -> Numbers:
        """A register's bits, or a constant's; fp32 stays as it is."""
        if name in self.registers:
            return self.registers[name]
        if name.startswith("0f"):
            return np.full(1, int(name[2:], 16), np.uint32).view(np.float32)
        return np.full(1, int(name, 0), np.uint32)

    def run(self, line: str) -> None:
        """One instruction."""
        live = np.ones(1, bool)
        if line.startswith("@"):
            (guard, line) = line[1:].split(None, 1)
            live = self.read(guard) != 0
        (name, rest) = line.split(None, 1)
        groups = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        operands = [re.findall(r"[^{},\s\[\]]+", group) for group in groups]
        if name.startswith("ld."):
            if live.all():
                words = loaded(self.read(operands[1][0]), len(operands[0]))
                self.registers.update(zip(operands[0], words, strict=True))
        elif name.startswith("mma."):
            kind = torch.bfloat16 if ".bf16." in name else torch.float16
            (a, b, c) = ([self.read(part) for part in group] for group in operands[1:])
            self.registers.update(zip(operands[0], product(a, b, c, kind), strict=True))
        elif name == "mov.b32":
            self.move(operands)
        elif name == ".reg":
            (kind, *names) = [part for group in operands for part in group]
            self.floats |= set(names) if kind == ".f32" else set()
        elif name != "bar.warp.sync":
            given = [self.read(group[0]) for group in operands[1:]]
            self.registers[operands[0][0]] = self.made(name, given)

    def move(self, operands: list[list[str]]) -> None:
        """mov.b32, also from and to halves."""
        (to, source) = operands
        if len(to) == 2:
            word = self.read(source[0]).astype(np.uint32)
            self.registers[to[0]] = word & np.uint32(0xFFFF)
            self.registers[to[1]] = word >> np.uint32(16)
        elif len(source) == 2:
            (low, high) = (self.read(part).astype(np.uint32) for part in source)
            self.registers[to[0]] = low | high << np.uint32(16)
        else:
            found = self.read(source[0])
            wanted = np.float32 if to[0] in self.floats else np.uint32
            self.registers[to[0]] = found if found.dtype == wanted else found.view(wanted)

    def made(self, name: str, given: list[Numbers]) -> Numbers:
        """What an instruction without side effects makes."""
        (base, *kinds) = name.split(".")
        kind = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}.get(kinds[1] if kinds[1:] else "")
        if name in ARITHMETIC:
            return ARITHMETIC[name](*given)
        if name == "setp.eq.f32":
            return given[0] == given[1]
        if name == "selp.f32":
            return np.where(given[2], given[0], given[1])
        if name == "cvt.rn.f16x2.e4m3x2":
            return self.from_e4m3(given[0])
        if base == "cvt":
            assert kind is not None, name
            return joined(np.stack(np.broadcast_arrays(given[1], given[0]), -1), kind)
        if kind is not None:
            parts = [halves(part, kind) for part in given]
            if base == "mul":
                return joined(parts[0] * parts[1], kind)
            if base == "add":
                return joined(parts[0] + parts[1], kind)
            assert base == "fma", name
            return joined(parts[0] * parts[1] + parts[2], kind)
        plain: dict[str, Callable[..., Numbers]] = {
            "shr": lambda a, b: a >> b,
            "shl": lambda a, b: a << b,
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "add": lambda a, b: a + b,
            "setp": lambda a, b: a != b,
            "min": np.fmin,
            "lop3": lambda a, b, c, table: lop3(a, b, c, int(table[0])),
            "prmt": permuted,
        }
        return plain[base](*given)

    @staticmethod
    def from_e4m3(codes: Numbers) -> Numbers:
        """Two codes in 16 bits -> a word of fp16."""
        pairs = codes.astype(np.uint16).view(np.uint8).reshape(-1, 2).copy()
        values = torch.from_numpy(pairs).view(torch.float8_e4m3fn).double().numpy()
        return joined(values, torch.float16)


def inline_asm_elementwise(
    asm: Any, constraints: Any, args: Any, dtype: Any, is_pure: bool, pack: int
) -> Any:
    """tl.inline_asm_elementwise, of one element at a time."""
    assert pack == 1
    text = getattr(asm, "value", asm)
    several = isinstance(dtype, tuple | list | tl.tuple)
    kinds = list(dtype) if several else [dtype]
    arrays = np.broadcast_arrays(*(np.atleast_1d(arg.handle.data) for arg in args))
    shape = arrays[0].shape
    given = [part.view(np.uint32) if part.dtype.kind in "iu" and part.itemsize == 4 else part
             for part in (np.ascontiguousarray(part).reshape(-1) for part in arrays)]  # fmt: skip
    thread = Thread(given, len(kinds))
    for line in re.split(r";", text.strip().strip("{}") if ".reg" in text else text):
        if line.strip():
            thread.run(" ".join(line.split()))
    found = []
    for i, kind in enumerate(kinds):
        bits = thread.registers.get(f"${i}", np.zeros(1, np.uint32))
        plain = np.broadcast_to(bits, arrays[0].size).reshape(shape)
        wanted = NUMPY[str(getattr(kind, "name", kind)).replace("fp32", "float32")]
        data = plain.astype(wanted) if plain.dtype.kind == "f" else plain.view(wanted)
        found.append(tl.tensor(TensorHandle(data.copy(), kind), tl.block_type(kind, data.shape)))
    return tuple(found) if several else found[0]
