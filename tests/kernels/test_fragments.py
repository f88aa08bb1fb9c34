"""Dequantization into mma.sync register operands gives the reference's values at their
positions."""

import pytest
import torch

from lockstep.kernels.formats.kv import KVQuantizer
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


def quantized_tile(
    quantizer: KVQuantizer, dim: int, kv: int
) -> tuple[Shared, Shared, torch.Tensor]:
    """Return a tile of 64 tokens as copied to shared memory, and its values [64, D] in bf16."""
    x = torch.randn(64, HEADS, dim, generator=torch.Generator().manual_seed(dim)).bfloat16()
    qdata, *scales = quantizer.quantize(x)
    expected = quantizer.dequantize(qdata, scales[0] if scales else None)[:, kv].bfloat16()
    functions = quantizer.mma_functions()
    words = qdata[:, kv].contiguous().view(torch.int32).unflatten(-1, (functions.num_planes, -1))
    scale_words = torch.zeros(1, 64, dtype=torch.int32)
    count = quantizer.num_scales(dim)
    if count:
        flat = scales[0].flatten().view(torch.int32)
        first = (torch.arange(64) * HEADS + kv) * count // 2
        scale_words = torch.stack([flat[first + i] for i in range(max(count // 2, 1))])
    return Shared(words.transpose(0, 1)), Shared(scale_words), expected


@pytest.mark.covering(strength=2)
@pytest.mark.parametrize("kv", range(HEADS))
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("case", CASES)
def test_fragments_equal_reference_dequantization(case: str, dim: int, kv: int) -> None:
    (keys, values) = CASES[case]
    order = torch.tensor([column_of.fn(s) for s in range(dim)])
    for i in range(4):
        tokens = slice(16 * i, 16 * i + 16)
        qdata, scale_words, expected = quantized_tile(keys, dim, kv)
        with fragments.patch_gluon():
            actual = keys.mma_functions().load_k.fn(qdata, scale_words, i, kv, HEADS, dim)
        assert same_bits(actual, expected[tokens][:, order])
        qdata, scale_words, expected = quantized_tile(values, dim, kv)
        functions = values.mma_functions()
        with fragments.patch_gluon():
            actual = functions.load_v.fn(qdata, scale_words, i, kv, HEADS, dim)
        columns = torch.tensor([functions.v_column.fn(s, dim) for s in range(dim)])
        assert sorted(columns.tolist()) == list(range(dim))
        assert same_bits(actual, expected[tokens].t()[columns])
