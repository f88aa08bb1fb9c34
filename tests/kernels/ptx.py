"""Run the few PTX instructions of the kernels' inline assembly on the CPU.

It replaces tl.inline_asm_elementwise under Triton's interpreter, which runs none. Every operand is
an array with one element per thread, as in kernels of one element per thread (quantized_gemv.py).
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
    """Convert words of two 16-bit numbers to [threads, 2] fp64."""
    pairs = np.ascontiguousarray(word, np.uint32).view(np.int16).reshape(-1, 2)
    return torch.from_numpy(pairs.copy()).view(kind).double().numpy()


def round_to_odd(numbers: Numbers) -> Numbers:
    """Round fp64 to fp32 to odd (toward 0, with the last bit set if inexact), so that a second
    rounding is correct."""
    result = numbers.astype(np.float32)
    lost = np.isfinite(result) & (result.astype(np.float64) != numbers)
    above = lost & (np.abs(result.astype(np.float64)) > np.abs(numbers))
    bits = result.view(np.uint32) - above.astype(np.uint32)
    return (bits | lost.astype(np.uint32)).view(np.float32)


def pack_halves(pairs: Numbers, kind: torch.dtype) -> Numbers:
    """Convert [threads, 2] fp64 to words, with each number rounded once."""
    rounded = torch.from_numpy(round_to_odd(np.ascontiguousarray(pairs, np.float64))).to(kind)
    return rounded.view(torch.int16).numpy().view(np.uint32).reshape(-1)


def lop3(a: Numbers, b: Numbers, c: Numbers, table: int) -> Numbers:
    """Compute any function of three bits, by its table."""
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for case in range(8):
        if table >> case & 1:
            mine = [part if case >> bit & 1 else ~part for part, bit in ((a, 2), (b, 1), (c, 0))]
            result |= mine[0] & mine[1] & mine[2]
    return result


def prmt(a: Numbers, b: Numbers, order: Numbers) -> Numbers:
    """Run prmt.b32 by the lower 16 bits of order; bit 3 of a selector replicates the byte's
    sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    wide = order.astype(np.uint64)
    result = np.zeros(np.broadcast_shapes(both.shape, wide.shape), np.uint64)
    for index in range(4):
        which = wide >> np.uint64(4 * index)
        chosen = both >> (which & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
        signs = (chosen >> np.uint64(7)) * np.uint64(0xFF)
        chosen = np.where(which & np.uint64(8), signs, chosen)
        result |= chosen << np.uint64(8 * index)
    return result.astype(np.uint32)


def mma(a: list[Numbers], b: list[Numbers], c: list[Numbers], kind: torch.dtype) -> Any:
    """Run mma.sync.m16n8k16 of each warp: fragments a (4), b (2), c (4) -> sums, like c."""
    lane = np.arange(32)
    (g, q) = np.divmod(lane, 4)
    results = [part.copy() for part in c]
    for first in range(0, a[0].size, 32):
        mine = slice(first, first + 32)
        left = np.zeros((16, 16))
        right = np.zeros((16, 8))
        total = np.zeros((16, 8))
        for j in range(2):
            for i in range(4):
                left[g + i % 2 * 8, 2 * q + i // 2 * 8 + j] = halves(a[i][mine], kind)[:, j]
            for i in range(2):
                right[2 * q + 8 * i + j, g] = halves(b[i][mine], kind)[:, j]
        for i in range(4):
            total[g + i // 2 * 8, 2 * q + i % 2] = c[i][mine]
        total += left @ right
        for i in range(4):
            results[i][mine] = total[g + i // 2 * 8, 2 * q + i % 2]
    return results


def load_words(addresses: Numbers, words: int) -> Numbers:
    """Return the words at these addresses: [words, threads]."""
    assert not (addresses % (4 * words)).any(), "not aligned"
    minimum = int(addresses.min())
    extent = int(addresses.max()) - minimum + 4 * words
    result = np.frombuffer((ctypes.c_char * extent).from_address(minimum), np.uint32)
    return result[(addresses - minimum) // 4 + np.arange(words)[:, None]]


def fma(a: Numbers, b: Numbers, c: Numbers) -> Numbers:
    """Run fma.rn.f32 for products that are exact in fp32."""
    mma = a.astype(np.float32) * b.astype(np.float32)
    exact = a.astype(np.float64) * b.astype(np.float64)
    assert np.array_equal(mma.astype(np.float64), exact, equal_nan=True), "it is rounded"
    return mma + c.astype(np.float32)


ARITHMETIC: dict[str, Callable[..., Numbers]] = {
    "mul.rn.f32": lambda a, b: a.astype(np.float32) * b.astype(np.float32),
    "sub.rn.f32": lambda a, b: a.astype(np.float32) - b.astype(np.float32),
    "cvt.f32.f16": lambda a: halves(a, torch.float16)[:, 0].astype(np.float32),
    "fma.rn.f32": fma,
}


class Thread:
    """Registers of all threads, and the effect of each instruction on them."""

    def __init__(self, arguments: list[Numbers], results: int) -> None:
        self.registers = {f"${results + i}": value for i, value in enumerate(arguments)}
        self.floats: set[str] = set()

    def read(self, name: str) -> Numbers:
        """Return a register's or a constant's bits; fp32 stays as it is."""
        if name in self.registers:
            return self.registers[name]
        if name.startswith("0f"):
            return np.full(1, int(name[2:], 16), np.uint32).view(np.float32)
        return np.full(1, int(name, 0), np.uint32)

    def run(self, line: str) -> None:
        """Run one instruction."""
        live = np.ones(1, bool)
        if line.startswith("@"):
            (guard, line) = line[1:].split(None, 1)
            live = self.read(guard) != 0
        (name, rest) = line.split(None, 1)
        groups = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        operands = [re.findall(r"[^{},\s\[\]]+", group) for group in groups]
        if name.startswith("ld."):
            if live.all():
                words = load_words(self.read(operands[1][0]), len(operands[0]))
                self.registers.update(zip(operands[0], words, strict=True))
        elif name.startswith("mma."):
            kind = torch.bfloat16 if ".bf16." in name else torch.float16
            (a, b, c) = ([self.read(part) for part in group] for group in operands[1:])
            self.registers.update(zip(operands[0], mma(a, b, c, kind), strict=True))
        elif name == "mov.b32":
            self.move(operands)
        elif name == ".reg":
            (kind, *names) = [part for group in operands for part in group]
            self.floats |= set(names) if kind == ".f32" else set()
        elif name != "bar.warp.sync":
            arguments = [self.read(group[0]) for group in operands[1:]]
            self.registers[operands[0][0]] = self.compute(name, arguments)

    def move(self, operands: list[list[str]]) -> None:
        """Run mov.b32, also from and to halves."""
        (to, source) = operands
        if len(to) == 2:
            word = self.read(source[0]).astype(np.uint32)
            self.registers[to[0]] = word & np.uint32(0xFFFF)
            self.registers[to[1]] = word >> np.uint32(16)
        elif len(source) == 2:
            (low, high) = (self.read(part).astype(np.uint32) for part in source)
            self.registers[to[0]] = low | high << np.uint32(16)
        else:
            result = self.read(source[0])
            expected = np.float32 if to[0] in self.floats else np.uint32
            self.registers[to[0]] = result if result.dtype == expected else result.view(expected)

    def compute(self, name: str, arguments: list[Numbers]) -> Numbers:
        """Return the result of an instruction without side effects."""
        (base, *kinds) = name.split(".")
        kind = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}.get(kinds[1] if kinds[1:] else "")
        if name in ARITHMETIC:
            return ARITHMETIC[name](*arguments)
        if name == "setp.eq.f32":
            return arguments[0] == arguments[1]
        if name == "selp.f32":
            return np.where(arguments[2], arguments[0], arguments[1])
        if name == "cvt.rn.f16x2.e4m3x2":
            return self.from_e4m3(arguments[0])
        if base == "cvt":
            assert kind is not None, name
            return pack_halves(np.stack(np.broadcast_arrays(arguments[1], arguments[0]), -1), kind)
        if kind is not None:
            parts = [halves(part, kind) for part in arguments]
            if base == "mul":
                return pack_halves(parts[0] * parts[1], kind)
            if base == "add":
                return pack_halves(parts[0] + parts[1], kind)
            assert base == "fma", name
            return pack_halves(parts[0] * parts[1] + parts[2], kind)
        plain: dict[str, Callable[..., Numbers]] = {
            "shr": lambda a, b: a >> b,
            "shl": lambda a, b: a << b,
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "add": lambda a, b: a + b,
            "setp": lambda a, b: a != b,
            "min": np.fmin,
            "lop3": lambda a, b, c, table: lop3(a, b, c, int(table[0])),
            "prmt": prmt,
        }
        return plain[base](*arguments)

    @staticmethod
    def from_e4m3(codes: Numbers) -> Numbers:
        """Convert two e4m3 codes in 16 bits to a word of fp16."""
        pairs = codes.astype(np.uint16).view(np.uint8).reshape(-1, 2).copy()
        values = torch.from_numpy(pairs).view(torch.float8_e4m3fn).double().numpy()
        return pack_halves(values, torch.float16)


def inline_asm_elementwise(
    asm: Any, constraints: Any, args: Any, dtype: Any, is_pure: bool, pack: int
) -> Any:
    """Run tl.inline_asm_elementwise on one element per thread."""
    assert pack == 1
    text = getattr(asm, "value", asm)
    multiple = isinstance(dtype, tuple | list | tl.tuple)
    kinds = list(dtype) if multiple else [dtype]
    arrays = np.broadcast_arrays(*(np.atleast_1d(arg.handle.data) for arg in args))
    shape = arrays[0].shape
    arguments = [part.view(np.uint32) if part.dtype.kind in "iu" and part.itemsize == 4 else part
             for part in (np.ascontiguousarray(part).reshape(-1) for part in arrays)]  # fmt: skip
    thread = Thread(arguments, len(kinds))
    for line in re.split(r";", text.strip().strip("{}") if ".reg" in text else text):
        if line.strip():
            thread.run(" ".join(line.split()))
    results = []
    for i, kind in enumerate(kinds):
        bits = thread.registers.get(f"${i}", np.zeros(1, np.uint32))
        plain = np.broadcast_to(bits, arrays[0].size).reshape(shape)
        expected = NUMPY[str(getattr(kind, "name", kind)).replace("fp32", "float32")]
        data = plain.astype(expected) if plain.dtype.kind == "f" else plain.view(expected)
        results.append(tl.tensor(TensorHandle(data.copy(), kind), tl.block_type(kind, data.shape)))
    return tuple(results) if multiple else results[0]
