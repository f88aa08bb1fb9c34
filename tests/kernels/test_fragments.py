"""Codecs unpacked in the registers of mma.sync give the reference's numbers, each in its place."""

import pytest
import torch

from lockstep.kernels.formats.kv import Codec
from lockstep.kernels.formats.kv.fp8 import Fp8
from lockstep.kernels.formats.kv.turboquant import KEYS_3, KEYS_4, VALUES_3, VALUES_4

pytest.importorskip("triton")

from lockstep.kernels.device.mma_layouts import column_of
from tests.kernels import fragments
from tests.kernels.backends import same_bits
from tests.kernels.fragments import Shared

HEADS = 3
CASES = {
    "fp8": (Fp8("e4m3"), Fp8("e4m3")),
    "4 bits": (KEYS_4, VALUES_4),
    "3 bits": (KEYS_3, VALUES_3),
}


def packed(codec: Codec, dim: int, kv: int) -> tuple[Shared, Shared, torch.Tensor]:
    """A tile of 64 tokens as it is copied to shared memory, and its numbers [64, D] in bf16."""
    x = torch.randn(64, HEADS, dim, generator=torch.Generator().manual_seed(dim)).bfloat16()
    codes, *beside = codec.encode(x)
    wanted = codec.decode(codes, beside[0] if beside else None)[:, kv].bfloat16()
    part = codec.fragments()
    words = codes[:, kv].contiguous().view(torch.int32).unflatten(-1, (part.planes, -1))
    numbers = torch.zeros(1, 64, dtype=torch.int32)
    count = codec.count(dim)
    if count:
        flat = beside[0].flatten().view(torch.int32)
        first = (torch.arange(64) * HEADS + kv) * count // 2
        numbers = torch.stack([flat[first + i] for i in range(max(count // 2, 1))])
    return Shared(words.transpose(0, 1)), Shared(numbers), wanted


@pytest.mark.parametrize("kv", range(HEADS))
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("case", CASES)
def test_fragments_hold_the_references_numbers(case: str, dim: int, kv: int) -> None:
    (keys, values) = CASES[case]
    order = torch.tensor([column_of.fn(s) for s in range(dim)])
    for i in range(4):
        own = slice(16 * i, 16 * i + 16)
        codes, numbers, wanted = packed(keys, dim, kv)
        with fragments.on_torch():
            found = keys.fragments().keys.fn(codes, numbers, i, kv, HEADS, dim)
        assert same_bits(found, wanted[own][:, order])
        codes, numbers, wanted = packed(values, dim, kv)
        part = values.fragments()
        with fragments.on_torch():
            found = part.values.fn(codes, numbers, i, kv, HEADS, dim)
        places = torch.tensor([part.place.fn(s, dim) for s in range(dim)])
        assert sorted(places.tolist()) == list(range(dim))
        assert same_bits(found, wanted[own].t()[places])
