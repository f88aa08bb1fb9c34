"""The assembly that dequantizes words of GGUF types, run on the CPU for every code and any
scale."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.kernels.compile_target import CompileTarget
from lockstep.kernels.formats.weights import GGUF_TYPES, GgufWeight
from lockstep.kernels.formats.weights.gguf_ptx import steps_ptx, widen_ptx, word_ptx
from lockstep.kernels.formats.weights.operand import quantized_operand
from tests.kernels import ptx

NAMES = [name for name, kind in GGUF_TYPES.items() if kind.bits <= 6 and name != "Q4_0"]
WORDS = 4000


def run(text: str, results: int, arguments: list[Any]) -> list[Any]:
    """Return the output operands of assembly."""
    thread = ptx.Thread([np.ascontiguousarray(part) for part in arguments], results)
    for line in text.strip().strip("{}").split(";"):
        if line.strip():
            thread.run(" ".join(line.split()))
    return [thread.registers[f"${i}"] for i in range(results)]


def random_words(seed: int) -> Tensor:
    """Return words of random bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (WORDS,), generator=generator, dtype=torch.int32)


def random_scales(name: str, seed: int) -> Tensor:
    """Return fp32 scales with the type's structure: base * step, fp16 or a power of two."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(WORDS, generator=generator).half().float()
    kind = GGUF_TYPES[name]
    if kind.exponents:
        return torch.exp2(torch.randint(-126, 120, (WORDS,), generator=generator).float())
    if not kind.two_level_scales:
        return base
    # Steps next to a minimum have six bits; the product with the code must be exact there.
    low, high = (0, 64) if kind.minima else (-128, 128)
    return base * torch.randint(low, high, (WORDS,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_words_are_dequantized_by_type(name: str, dtype: torch.dtype) -> None:
    kind = GGUF_TYPES[name]
    weight = GgufWeight.empty(16, 256, name)
    form = quantized_operand(weight, dtype, 0, CompileTarget(90, True))[1]
    word, high = random_words(1), random_words(2)
    scales = [random_scales(name, 3), random_scales(name, 4)]
    minima = [random_scales(name, 5), random_scales(name, 6)]
    text = word_ptx(
        form.bits, form.high_bits, form.zero_point, form.table_low, form.table_high, kind.minima,
        dtype == torch.bfloat16,
    )  # fmt: skip
    arguments = [
        part.numpy().view(np.uint32) for part in ([word, high] if form.high_bits else [word])
    ]
    arguments += [part.numpy() for part in scales]
    arguments += [(-part).numpy() for part in minima] if kind.minima else []
    result = run(text, 4, arguments)
    for pair in range(4):
        halves = torch.from_numpy(result[pair].view(np.int16).reshape(-1, 2).copy()).view(dtype)
        for j in range(2):
            low = word >> (16 * j + form.bits * pair) & (2**form.bits - 1)
            upper = high >> (16 * j + form.high_bits * pair) & (2**form.high_bits - 1)
            values = kind.values((low | upper << form.bits).byte())
            want = values * scales[pair // 2]
            want = (want - minima[pair // 2] if kind.minima else want).to(dtype)
            assert torch.equal(halves[:, j].view(torch.int16), want.view(torch.int16)), (pair, j)


def test_scale_steps_and_halves_are_widened() -> None:
    word = random_words(7)
    bases = random_scales("Q4_1", 8)
    result = run(steps_ptx(), 4, [word.numpy().view(np.uint32), bases.numpy()])
    steps = word.view(torch.int8).view(-1, 4).float()
    for i in range(4):
        assert torch.equal(torch.from_numpy(result[i]), steps[:, i] * bases)
    for dtype in (torch.bfloat16, torch.float16):
        text = widen_ptx(dtype == torch.bfloat16)
        result = run(text, 2, [word.numpy().view(np.uint32)])
        for i in range(2):
            actual = torch.from_numpy(result[i].view(np.float32).copy())
            want = word.view(dtype).view(-1, 2)[:, i].float()
            torch.testing.assert_close(actual, want, rtol=0, atol=0, equal_nan=True)
