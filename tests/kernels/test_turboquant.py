"""TurboQuant's reference codecs: bytes, distortion, and what must not be lost silently."""

import pytest
import torch

from lockstep.kernels.kv.bits import pack_bits, unpack_bits
from lockstep.kernels.kv.turboquant import PRESETS, RotatedKeys, UniformValues, hadamard

PAPER = {3: 0.03, 4: 0.009}
"""E |x - x'|^2 of a unit vector, by bits (the paper's figures, to the digits that it gives)."""
EXACT = {3: 0.034548, 4: 0.009501}
"""The same of Lloyd-Max on N(0, 1)."""
SLOT_BYTES = {
    "turboquant_k8v4": {128: 196, 256: 388},
    "turboquant_4bit_nc": {128: 134, 256: 262},
    "turboquant_k3v4_nc": {128: 118, 256: 230},
    "turboquant_3bit_nc": {128: 102, 256: 198},
}
"""Of one token and head, keys and values together, as in vLLM."""
CODECS = [RotatedKeys(3), RotatedKeys(4), UniformValues(3), UniformValues(4)]


def back(codec, x):
    """What comes back of x."""
    return codec.decode(*codec.encode(x))


def heads(dim, count=512):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("bits", [3, 4])
def test_bits_come_back(bits):
    codes = torch.randint(0, 2**bits, (3, 5, 64), generator=torch.Generator().manual_seed(0))
    packed = pack_bits(codes, bits)
    assert packed.shape[-1] == 64 * bits // 8
    assert torch.equal(unpack_bits(packed, bits, 64), codes)
    assert pack_bits(torch.tensor([1, 2]), 4).tolist() == [0x21]
    assert pack_bits(torch.tensor([1, 2, 4]), 3).tolist() == [0b00010001, 1]


@pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))
def test_bytes_are_those_of_vllm(preset):
    for dim, wanted in SLOT_BYTES[preset.name].items():
        sides = (preset.k, preset.v)
        found = sum(c.width(dim) * c.dtype.itemsize for c in sides)
        found += sum(c.count * c.number_dtype.itemsize for c in sides if c.count)
        assert found == wanted
        for codec in sides:
            codes, *numbers = codec.encode(heads(dim, 4))
            assert codes.shape[-1] == codec.width(dim) and codes.dtype == codec.dtype
            assert sum(n.shape[-1] for n in numbers) == codec.count


@pytest.mark.parametrize("dim", [16, 128, 256])
def test_the_rotation_is_its_own_inverse(dim):
    matrix = hadamard(dim)
    torch.testing.assert_close(matrix @ matrix, torch.eye(dim), atol=1e-6, rtol=0)
    assert torch.equal(matrix, matrix.t())


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("dim", [128, 256])
def test_distortion_is_the_papers(bits, dim):
    """Of random directions; corrected norms are exact, so that what is lost is an angle."""
    x = torch.nn.functional.normalize(heads(dim, 4096), dim=-1)
    lost = (back(RotatedKeys(bits, corrected=False), x) - x).square().sum(-1).mean().item()
    assert abs(lost - EXACT[bits]) < 0.03 * EXACT[bits]
    assert lost < 1.2 * PAPER[bits]
    corrected = back(RotatedKeys(bits), x)
    torch.testing.assert_close(corrected.norm(dim=-1), torch.ones(4096), atol=1e-3, rtol=0)
    assert (corrected - x).square().sum(-1).mean().item() < 1.05 * EXACT[bits]


@pytest.mark.parametrize("bits", [3, 4])
def test_values_are_off_by_half_a_step(bits):
    x = heads(128)
    least, most = x.aminmax(dim=-1)
    step = (most - least) / (2**bits - 1)
    off = (back(UniformValues(bits), x) - x).abs().amax(-1)
    assert (off <= step * 0.52).all()  # step and least are rounded to fp16


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_twice_is_nearly_once(codec):
    """Values pack to the same codes again; keys, whose rotation is rounded, nearly all."""
    once = back(codec, heads(128))
    again = back(codec, once)
    same = ((again - once).abs() <= 2e-3 * once.abs().amax(-1, keepdim=True)).float().mean()
    assert same > 0.99


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_zeros_stay_zeros(codec):
    assert not back(codec, torch.zeros(3, 64)).any()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_sizes_do_not_matter(codec):
    """Within fp16's range of norms and steps."""
    x = heads(128)
    wanted = back(codec, x)
    for size in (2.0**-6, 2.0**10):
        found = back(codec, x * size) / size
        relative = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert relative.max() < 0.02


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf, 1e6])
def test_what_cannot_be_stored_comes_back_as_nan(codec, wrong):
    x = heads(64, 3)
    x[1, 7] = wrong
    found = back(codec, x)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_heads_that_cannot_be_rotated_are_refused():
    assert RotatedKeys(4).refusal(128) is None and "80" in RotatedKeys(4).refusal(80)
    assert UniformValues(3).refusal(80) is None and UniformValues(3).refusal(20)
