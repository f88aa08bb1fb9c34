"""TurboQuant's quantizer: bytes, distortion, values that must not be lost silently, and its
assembly."""

import importlib
import itertools

import pytest
import torch

from lockstep.cache.kv import kv_spec
from lockstep.kernels.formats.kv import HadamardRotation, QuantizedKV
from lockstep.kernels.formats.kv.bit_packing import num_codes, num_words, pack_bits, unpack_bits
from lockstep.kernels.formats.kv.fp8 import Fp8, TokenFp8
from lockstep.kernels.formats.kv.hadamard import K_BLOCK, V_BLOCK
from lockstep.kernels.formats.kv.turboquant import CENTROIDS, PRESETS, TurboQuantizer, thresholds
from tests.kernels.backends import backends, same_bits

PAPER = {3: 0.03, 4: 0.009}
"""Bits -> E |x - x'|^2 of a unit vector (the paper's figures, to the digits that it gives)."""
EXACT = {3: 0.034548, 4: 0.009501}
"""Bits -> the same error for Lloyd-Max on N(0, 1)."""
BYTES = {
    "turboquant_k8v4": {64: 98, 128: 196, 256: 392},
    "turboquant_4bit_nc": {64: 68, 128: 134, 256: 266},
    "turboquant_k3v4_nc": {64: 60, 128: 118, 256: 234},
    "turboquant_3bit_nc": {64: 52, 128: 102, 256: 202},
}
"""Bytes of one token and head, keys and values together; at 128 as in vLLM."""
MIN_CAPACITY = {
    "turboquant_k8v4": 2.5,
    "turboquant_4bit_nc": 3.5,
    "turboquant_k3v4_nc": 4.0,
    "turboquant_3bit_nc": 4.6,
}
"""Minimum number of tokens in the memory of one bf16 token."""
QUANTIZERS = [TurboQuantizer(bits, block, 77) for bits in (3, 4) for block in (V_BLOCK, K_BLOCK)]


def round_trip(quantizer, x):
    """Return x quantized and dequantized, with the rotation undone."""
    return quantizer.rotation.rotate_back(quantizer.dequantize(*quantizer.quantize(x)))


def heads(dim, count=512):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(5))


def uniform_round_trip(x, bits):
    """Return x with b uniform bits between a head's smallest and largest value, both steps in fp16,
    as vLLM's values."""
    minimum, maximum = x.aminmax(dim=-1, keepdim=True)
    step = ((maximum - minimum) / (2**bits - 1)).half().float()
    return ((x - minimum) / step).round().clamp(0, 2**bits - 1) * step + minimum.half().float()


def mean_squared_error(actual, x):
    """Return the mean squared error of heads of length 1."""
    return ((actual - x).square().sum(-1) / x.square().sum(-1)).mean().item()


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("count", [16, 32, 64, 256])
def test_pack_bits_round_trip(bits, count):
    codes = torch.randint(0, 2**bits, (3, count), generator=torch.Generator().manual_seed(0))
    packed = pack_bits(codes, bits)
    assert packed.shape[-1] == num_words(count, bits) and packed.dtype == torch.int32
    assert num_codes(packed.shape[-1], bits) == count
    assert torch.equal(unpack_bits(packed, bits), codes)


def test_bit_positions():
    """The positions are those that bits.py documents."""
    one = torch.zeros(32, dtype=torch.int64)
    for code, value, word, bits in ((9, 5, 1, 5 << 4), (24, 4, 2, 1 << 3), (25, 3, 0, 1 << 7)):
        assert pack_bits(one.index_fill(0, torch.tensor(code), value), 3)[word] == bits
    one = one[:8]
    for code, bits in ((0, 1 << 7), (1, 1 << 15), (6, 1 << 19)):
        assert pack_bits(one.index_fill(0, torch.tensor(code), 8), 4)[0] == bits
    assert pack_bits(one.index_fill(0, torch.tensor(3), 8), 4)[0] == -(1 << 31)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))
def test_bytes_and_capacity(preset):
    for dim, expected in BYTES[preset.name].items():
        spec = kv_spec(1, dim, torch.bfloat16, preset)
        assert sum(part.nbytes for part in spec.parts) == expected
        assert 4 * dim / expected >= MIN_CAPACITY[preset.name]
        assert all(part.nbytes % 4 == 0 for part in spec.parts if "scales" not in part.name)
        for quantizer in (preset.k, preset.v):
            codes, *numbers = quantizer.quantize(heads(dim, 4))
            assert codes.shape[-1] == quantizer.row_width(dim) and codes.dtype == quantizer.dtype
            assert sum(n.shape[-1] for n in numbers) == quantizer.num_scales(dim)


@pytest.mark.parametrize("dim", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("block", [V_BLOCK, K_BLOCK])
def test_rotation_is_invertible(dim, block):
    rotation = HadamardRotation(1234, block)
    x = heads(dim, 64)
    torch.testing.assert_close(rotation.rotate_back(rotation.rotate(x)), x, atol=2e-6, rtol=0)
    torch.testing.assert_close(rotation.rotate(x).norm(dim=-1), x.norm(dim=-1))
    size = min(dim, block)
    columns = rotation.rotate(torch.eye(dim))
    assert ((columns.abs() > 0).sum(0) == size).all()
    torch.testing.assert_close(columns @ columns.t(), torch.eye(dim), atol=1e-6, rtol=0)
    assert not torch.equal(HadamardRotation(1235, block).rotate(x), rotation.rotate(x))


def test_layer_seeds_are_distinct_and_stable():
    formats = [PRESETS["turboquant_3bit_nc"].for_layer(f"layers.{i}") for i in (0, 1, 0)]
    assert formats[0] == formats[2] != formats[1]
    assert formats[0].k.seed == formats[0].v.seed < 2**31
    assert PRESETS["turboquant_k8v4"].for_layer("layers.0").k.rotation is None


@pytest.mark.parametrize("bits", [3, 4])
def test_centroids_and_thresholds_are_exact(bits):
    """Centroids are exact in bf16, and thresholds are half-way between neighbours in fp32."""
    points = torch.tensor(CENTROIDS[bits], dtype=torch.float64)
    assert torch.equal(points.bfloat16().double(), points)
    steps = torch.tensor(thresholds(bits), dtype=torch.float64)
    assert torch.equal(steps.float().double(), (points[1:] + points[:-1]) / 2)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_distortion_equals_paper(quantizer, dim):
    """For random directions, and with outliers; lengths are preserved."""
    x = heads(dim, 4096)
    actual = round_trip(quantizer, x)
    assert (
        mean_squared_error(actual, x) < 1.02 * EXACT[quantizer.bits] < 1.2 * PAPER[quantizer.bits]
    )
    ratio = actual.norm(dim=-1) / x.norm(dim=-1)
    assert (ratio - 1).abs().max() < 2**-8
    x = x * torch.where(torch.arange(dim) % 32 == 5, 8.0, 1.0)
    assert mean_squared_error(round_trip(quantizer, x), x) < 1.02 * EXACT[quantizer.bits]


@pytest.mark.parametrize("bits", [3, 4])
def test_rotated_error_is_below_uniform_error(bits):
    """At the same bytes for a head of 128 (docs/cache.md has the figures)."""
    quantizer = TurboQuantizer(bits, 64, 77)
    assert quantizer.num_scales(128) * 2 == 4  # bytes, as of a step and a least number in fp16
    x = heads(128, 4096)
    assert mean_squared_error(round_trip(quantizer, x), x) < 0.9 * mean_squared_error(
        uniform_round_trip(x, bits), x
    )
    x = x * torch.where(torch.arange(128) % 32 == 5, 8.0, 1.0)
    assert mean_squared_error(round_trip(quantizer, x), x) < 0.25 * mean_squared_error(
        uniform_round_trip(x, bits), x
    )


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_quantization_is_nearly_idempotent(quantizer):
    """Except for a few in a hundred heads, whose dequantized norm differs most."""
    x = heads(128)
    codes, numbers = quantizer.quantize(round_trip(quantizer, x))
    once = quantizer.quantize(x)
    assert (codes == once[0]).all(-1).float().mean() > 0.95
    assert (numbers == once[1]).float().mean() > 0.97


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_zeros_quantize_to_zeros(quantizer):
    codes, numbers = quantizer.quantize(torch.zeros(3, 64))
    assert not codes.any() and not numbers.any()
    assert not round_trip(quantizer, torch.zeros(3, 64)).any()


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_codes_are_scale_invariant(quantizer):
    """From 2^-98 to 2^118 every power of two gives the same codes; smaller values become zeros."""
    x = heads(128)
    codes, numbers = quantizer.quantize(x)
    for power in (-96, -6, 10, 117):
        actual = quantizer.quantize(x * 2.0**power)
        assert torch.equal(actual[0], codes)
        assert torch.equal(actual[1].float(), numbers.float() * 2.0**power)
    for small in (1e-32, 1e-45):
        assert not round_trip(quantizer, torch.full((1, 64), small)).any()
    x[:, 7] = 1e30
    actual = round_trip(quantizer, x)
    assert mean_squared_error(actual.double(), x.double()) < 1.02 * EXACT[quantizer.bits]


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf, 3e36])
def test_unrepresentable_values_dequantize_to_nan(quantizer, wrong):
    x = heads(64, 3)
    x[1, 7] = wrong
    actual = round_trip(quantizer, x)
    assert actual[1].isnan().all()
    assert actual[[0, 2]].isfinite().all()


def test_scales_per_key_head_and_per_value_block():
    x = torch.cat([heads(64, 5), 1000 * heads(64, 5)], -1)
    keys, values = (TurboQuantizer(4, block, 3).quantize(x)[1] for block in (K_BLOCK, V_BLOCK))
    assert keys.shape == (5, 1) and values.shape == (5, 2)
    assert (values[:, 1] > 100 * values[:, 0]).all()


def test_unsupported_head_dims_are_refused():
    for dim in (16, 64, 256):
        assert TurboQuantizer(4, 64).unsupported_reason(dim) is None
    for dim in (8, 80, 512):
        assert str(dim) in TurboQuantizer(4, V_BLOCK).unsupported_reason(dim)
    assert TurboQuantizer(4, K_BLOCK).unsupported_reason(512) is None
    assert "or 512 numbers, and one has 1024" in TurboQuantizer(4, K_BLOCK).unsupported_reason(1024)


def dequantization_params():
    """Return params (quantizer, dim, name in KVDevice) of what assembly dequantizes."""
    ways = [(quantizer, "dequantize_bf16") for quantizer in (*QUANTIZERS, Fp8("e4m3"), TokenFp8())]
    ways += [(quantizer, "dequantize_native") for quantizer in (Fp8("e4m3"), TokenFp8())]
    triples = itertools.product(ways, (16, 32, 64, 128, 256, 512))
    return [
        pytest.param(quantizer, dim, unpack, id=f"{quantizer}-{dim}-{unpack}")
        for (quantizer, unpack), dim in triples
        if quantizer.unsupported_reason(dim) is None
    ]


def assembly_backends():
    """Return the backends that dequantize to bf16: the interpreter, with instructions run one by
    one, or a GPU."""
    return [
        param
        for param in backends()
        if param.values[0].interpreted
        or (param.values[0].on_gpu and param.values[0].dtype == torch.bfloat16)
    ]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", assembly_backends())
@pytest.mark.parametrize(("quantizer", "dim", "unpack"), dequantization_params())
def test_assembly_dequantizes_to_reference_bits(quantizer, dim, unpack, backend, monkeypatch):
    """For random codes and numbers of all magnitudes."""
    if backend.interpreted:
        import triton.language as tl

        from tests.kernels import ptx

        monkeypatch.setattr(tl, "inline_asm_elementwise", ptx.inline_asm_elementwise)
    read = importlib.import_module("tests.kernels.read_tile")
    actual, expected = read.tiles(quantizer, dim, backend, unpack)
    assert same_bits(actual, expected)


def test_e4m3_assembly():
    """Every code, four at a time."""
    pytest.importorskip("triton")
    from lockstep.kernels.formats.kv.fp8_triton import E4M3_TO_BF16_PTX
    from tests.kernels import ptx

    codes = torch.arange(256, dtype=torch.uint8)
    words = codes.view(torch.int32).numpy().view("uint32")
    thread = ptx.Thread([words], 2)
    for line in E4M3_TO_BF16_PTX.value.strip().strip("{}").split(";"):
        if line.strip():
            thread.run(" ".join(line.split()))
    pairs = [ptx.halves(thread.registers[f"${i}"], torch.bfloat16) for i in range(2)]
    actual = torch.stack([torch.from_numpy(pair) for pair in pairs], 1).flatten().bfloat16()
    assert same_bits(actual, codes.view(torch.float8_e4m3fn).bfloat16())


def test_cache_of_codes_and_scales():
    codes = torch.zeros(3, 16, 2, 12, dtype=torch.int32)
    cache = QuantizedKV(
        TurboQuantizer(3, K_BLOCK), 128, codes, torch.zeros(3, 16, 2, 1, dtype=torch.bfloat16)
    )
    assert len(cache.tensors()) == 2 and cache.shape == (3, 16, 2, 128)
