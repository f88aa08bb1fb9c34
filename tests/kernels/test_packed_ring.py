"""Unpacking in the ring's assembly: every code, with every kind of scale, by the CPU."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.kernels.linear import _packed_ring as ring
from tests.kernels import ptx

KINDS = {torch.bfloat16: "BF16", torch.float16: "FP16"}


def text(name: str, dtype: torch.dtype) -> str:
    """The assembly of a layout for weights of this dtype."""
    return str(getattr(ring, f"{name}_{KINDS[dtype]}").value)


def run(assembly: str, results: int, given: list[Any]) -> list[Tensor]:
    """What assembly leaves in its first operands: words."""
    thread = ptx.Thread([np.ascontiguousarray(part) for part in given], results)
    for line in assembly.strip().strip("{}").split(";"):
        if line.strip():
            thread.run(" ".join(line.split()))
    return [torch.from_numpy(thread.registers[f"${i}"].view(np.int32).copy()) for i in range(results)]


def pairs(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Words -> the two numbers of each, last."""
    return words[:, None].contiguous().view(dtype)


def doubled(numbers: Tensor) -> Any:
    """Numbers of 16 bits -> words that hold them twice."""
    return numbers[:, None].repeat(1, 2).contiguous().view(torch.int32)[:, 0].numpy().view(np.uint32)


def scales(dtype: torch.dtype, count: int) -> Tensor:
    """Of 16 bits: random ones of either sign, subnormal ones, the ends, none, infinite, NaN."""
    bits = torch.randint(-(2**15), 2**15, (count,), generator=torch.Generator().manual_seed(0))
    found = bits.to(torch.int16).view(dtype)
    ends = torch.finfo(dtype)
    fixed = [0.0, -0.0, 1.0, ends.max, ends.min, ends.tiny, ends.smallest_normal / 2]
    fixed += [float("inf"), float("-inf"), float("nan")]
    return torch.cat([found, torch.tensor(fixed, dtype=dtype)])


def same(found: Tensor, want: Tensor) -> bool:
    """Equal numbers, NaN where there is one. A sum that begins at 0 does not see a zero's sign."""
    return bool(((found == want) | (found.isnan() & want.isnan())).all())


def all_codes(bits: int, zeros: int, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, zeros, scales) of all combinations, flat."""
    grid = torch.meshgrid(
        torch.arange(1 << bits), torch.arange(zeros), torch.arange(len(scale)), indexing="ij"
    )
    code, zero, place = (part.flatten() for part in grid)
    return code, zero, scale[place]


def placed(code: Tensor, bit: int, other: int) -> Any:
    """Words with a code at a bit, and `other` in all others' bits."""
    mask = 15 << bit
    return ((other & ~mask & 0xFFFFFFFF) | (code << bit)).numpy().astype(np.uint32)


INT4 = [
    ("INT4", torch.bfloat16, torch.bfloat16),
    ("INT4", torch.float16, torch.float16),
    ("SPLIT", torch.float16, torch.bfloat16),
    ("MIXED", torch.float16, torch.bfloat16),
    ("WIDE", torch.float32, torch.bfloat16),
    ("WIDE", torch.bfloat16, torch.float16),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "scale_dtype", "dtype"), INT4)
def test_every_code_zero_and_scale_of_int4(
    name: str, scale_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """16 codes x 17 zeros x scales, at each of the eight places of both words."""
    some = scales(torch.bfloat16 if scale_dtype == torch.float32 else scale_dtype, 300)
    if scale_dtype == torch.float32:
        some = some.float() * torch.linspace(1, 1.5, len(some))
    code, zero, scale = all_codes(4, 17, some)
    want = ((code - zero).float() * scale.float()).to(dtype)
    assembly = text(name, dtype)
    wide = name == "WIDE"
    first = scale.float().numpy() if wide else doubled(scale.to(dtype))
    least = 8388608.0 if wide else 128.0 if dtype == torch.bfloat16 else 1024.0
    second = (least + zero).float().numpy() if wide else doubled((-least - zero).to(dtype))
    given = [first, first, second, second]
    if name in ("SPLIT", "MIXED"):
        found = run(str(ring.PARTS.value), 2, [scale.view(torch.int16).numpy().view(np.uint16)])
        given[:2] = [found[0].numpy().view(np.uint32)] * 2
        given += [found[1].numpy().view(np.uint32)] * 2
        given += [scale.float().numpy()] * 2
    for word, pair, half in product(range(2), range(4), range(2)):
        words = [np.full(len(code), 0x5A3C9600, np.uint32)] * 2
        words[word] = placed(code, 4 * pair + 16 * half, 0x5A3C9600)
        got = run(assembly, 8, [*words, *given])[4 * word + pair]
        assert same(pairs(got, dtype)[:, half], want), (word, pair, half)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", list(KINDS))
@pytest.mark.parametrize("name", ["FP8", "INT8"])
def test_every_code_and_scale_of_8_bits(name: str, dtype: torch.dtype) -> None:
    """256 codes x scales, at each of the four places of both words."""
    some = scales(torch.bfloat16, 200).float() * torch.linspace(1, 1.5, 210)
    code, zero, scale = all_codes(8, 1 if name == "FP8" else 3, some)
    zero = zero * 100
    if name == "FP8":
        values = code.to(torch.uint8).view(torch.float8_e4m3fn).float()
    else:
        values = (code - zero).float()
    want = (values * scale).to(dtype)
    given = [scale.numpy(), scale.numpy()]
    if name == "INT8":
        given += [(8388608.0 + zero).float().numpy()] * 2
    for word, byte in product(range(2), range(4)):
        words = [np.zeros(len(code), np.uint32)] * 2
        words[word] = (code << (8 * byte)).numpy().astype(np.uint32)
        got = run(text(name, dtype), 4, [*words, *given])[2 * word + byte % 2]
        assert same(pairs(got, dtype)[:, byte // 2], want), (word, byte)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", list(KINDS))
def test_every_code_and_scale_of_nvfp4(dtype: torch.dtype) -> None:
    """16 codes x 256 scales x factors, at each of the eight places of both words."""
    from lockstep.kernels.packed._device import E4M3_PAIRS
    from lockstep.kernels.packed._weights import FP4_VALUES

    factors = torch.tensor([1.0, 0.0123, -3.7e-5, 5.1e4, 1e-30])
    code, scale, factor = all_codes(4, 256, factors)
    wide = scale.to(torch.uint8).view(torch.float8_e4m3fn).float()
    values = torch.cat([torch.tensor(FP4_VALUES), -torch.tensor(FP4_VALUES)])
    want = ((values[code] * wide) * factor).to(dtype)
    others = run(str(E4M3_PAIRS.value), 4, [(scale * 0x01010101).numpy().astype(np.uint32)])
    prepared = [part.numpy().view(np.uint32) for part in others for _ in range(2)]
    given = [*prepared, (factor * 128).numpy(), (factor * 128).numpy()]
    for word, pair, half in product(range(2), range(4), range(2)):
        words = [np.zeros(len(code), np.uint32)] * 2
        words[word] = placed(code, 4 * pair + 16 * half, 0)
        got = run(text("FP4", dtype), 8, [*words, *given])[4 * word + pair]
        assert same(pairs(got, dtype)[:, half], want), (word, pair, half)
