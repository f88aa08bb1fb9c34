"""TurboQuant's codec: bytes, distortion, what must not be lost silently, and its assembly."""

import importlib
import itertools

import pytest
import torch

from lockstep.cache.kv import kv_spec
from lockstep.kernels.formats.kv import PackedKV, Turn
from lockstep.kernels.formats.kv.bit_packing import codes_in, pack_bits, packed_words, unpack_bits
from lockstep.kernels.formats.kv.fp8 import Fp8, TokenFp8
from lockstep.kernels.formats.kv.hadamard import OF_VALUES, WHOLE_HEAD
from lockstep.kernels.formats.kv.turboquant import POINTS, PRESETS, Rotated, thresholds
from tests.kernels.backends import backends, same_bits

PAPER = {3: 0.03, 4: 0.009}
"""E |x - x'|^2 of a unit vector, by bits (the paper's figures, to the digits that it gives)."""
EXACT = {3: 0.034548, 4: 0.009501}
"""The same of Lloyd-Max on N(0, 1)."""
BYTES = {
    "turboquant_k8v4": {64: 98, 128: 196, 256: 392},
    "turboquant_4bit_nc": {64: 68, 128: 134, 256: 266},
    "turboquant_k3v4_nc": {64: 60, 128: 118, 256: 234},
    "turboquant_3bit_nc": {64: 52, 128: 102, 256: 202},
}
"""Of one token and head, keys and values together; at 128 as in vLLM."""
CAPACITY = {
    "turboquant_k8v4": 2.5,
    "turboquant_4bit_nc": 3.5,
    "turboquant_k3v4_nc": 4.0,
    "turboquant_3bit_nc": 4.6,
}
"""Tokens in the memory of one in bf16, at least."""
CODECS = [Rotated(bits, block, 77) for bits in (3, 4) for block in (OF_VALUES, WHOLE_HEAD)]


def back(codec, x):
    """What comes back of x, out of its rotation."""
    return codec.turn.back(codec.decode(*codec.encode(x)))


def heads(dim, count=512):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(5))


def uniform(x, bits):
    """b bits between a head's least and largest number, both steps in fp16: vLLM's values."""
    least, most = x.aminmax(dim=-1, keepdim=True)
    step = ((most - least) / (2**bits - 1)).half().float()
    return ((x - least) / step).round().clamp(0, 2**bits - 1) * step + least.half().float()


def lost(found, x):
    """The mean squared error of heads of length 1."""
    return ((found - x).square().sum(-1) / x.square().sum(-1)).mean().item()


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("count", [16, 32, 64, 256])
def test_bits_come_back(bits, count):
    codes = torch.randint(0, 2**bits, (3, count), generator=torch.Generator().manual_seed(0))
    packed = pack_bits(codes, bits)
    assert packed.shape[-1] == packed_words(count, bits) and packed.dtype == torch.int32
    assert codes_in(packed.shape[-1], bits) == count
    assert torch.equal(unpack_bits(packed, bits), codes)


def test_places_of_bits():
    """As bits.py draws them."""
    one = torch.zeros(32, dtype=torch.int64)
    for code, value, word, bits in ((9, 5, 1, 5 << 4), (24, 4, 2, 1 << 3), (25, 3, 0, 1 << 7)):
        assert pack_bits(one.index_fill(0, torch.tensor(code), value), 3)[word] == bits
    one = one[:8]
    for code, bits in ((0, 1 << 7), (1, 1 << 15), (6, 1 << 19)):
        assert pack_bits(one.index_fill(0, torch.tensor(code), 8), 4)[0] == bits
    assert pack_bits(one.index_fill(0, torch.tensor(3), 8), 4)[0] == -(1 << 31)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))
def test_bytes_and_capacity(preset):
    for dim, wanted in BYTES[preset.name].items():
        spec = kv_spec(1, dim, torch.bfloat16, preset)
        assert sum(part.nbytes for part in spec.parts) == wanted
        assert 4 * dim / wanted >= CAPACITY[preset.name]
        assert all(part.nbytes % 4 == 0 for part in spec.parts if "numbers" not in part.name)
        for codec in (preset.k, preset.v):
            codes, *numbers = codec.encode(heads(dim, 4))
            assert codes.shape[-1] == codec.width(dim) and codes.dtype == codec.dtype
            assert sum(n.shape[-1] for n in numbers) == codec.count(dim)


@pytest.mark.parametrize("dim", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("block", [OF_VALUES, WHOLE_HEAD])
def test_the_rotation_goes_back(dim, block):
    turn = Turn(1234, block)
    x = heads(dim, 64)
    torch.testing.assert_close(turn.back(turn.forward(x)), x, atol=2e-6, rtol=0)
    torch.testing.assert_close(turn.forward(x).norm(dim=-1), x.norm(dim=-1))
    size = min(dim, block)
    columns = turn.forward(torch.eye(dim))
    assert ((columns.abs() > 0).sum(0) == size).all()
    torch.testing.assert_close(columns @ columns.t(), torch.eye(dim), atol=1e-6, rtol=0)
    assert not torch.equal(Turn(1235, block).forward(x), turn.forward(x))


def test_layers_differ_and_stay():
    formats = [PRESETS["turboquant_3bit_nc"].of_layer(f"layers.{i}") for i in (0, 1, 0)]
    assert formats[0] == formats[2] != formats[1]
    assert formats[0].k.seed == formats[0].v.seed < 2**31
    assert PRESETS["turboquant_k8v4"].of_layer("layers.0").k.turn is None


@pytest.mark.parametrize("bits", [3, 4])
def test_points_are_exact(bits):
    """In bf16, and half-way between neighbours in fp32."""
    points = torch.tensor(POINTS[bits], dtype=torch.float64)
    assert torch.equal(points.bfloat16().double(), points)
    steps = torch.tensor(thresholds(bits), dtype=torch.float64)
    assert torch.equal(steps.float().double(), (points[1:] + points[:-1]) / 2)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_distortion_is_the_papers(codec, dim):
    """Of random directions, and of what has outliers; lengths come back."""
    x = heads(dim, 4096)
    found = back(codec, x)
    assert lost(found, x) < 1.02 * EXACT[codec.bits] < 1.2 * PAPER[codec.bits]
    ratio = found.norm(dim=-1) / x.norm(dim=-1)
    assert (ratio - 1).abs().max() < 2**-8
    x = x * torch.where(torch.arange(dim) % 32 == 5, 8.0, 1.0)
    assert lost(back(codec, x), x) < 1.02 * EXACT[codec.bits]


@pytest.mark.parametrize("bits", [3, 4])
def test_rotated_values_lose_less_than_uniform_ones(bits):
    """At the same bytes where the head is 128 wide (docs/cache.md has the figures)."""
    codec = Rotated(bits, 64, 77)
    assert codec.count(128) * 2 == 4  # bytes, as of a step and a least number in fp16
    x = heads(128, 4096)
    assert lost(back(codec, x), x) < 0.9 * lost(uniform(x, bits), x)
    x = x * torch.where(torch.arange(128) % 32 == 5, 8.0, 1.0)
    assert lost(back(codec, x), x) < 0.25 * lost(uniform(x, bits), x)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_twice_is_once(codec):
    """But for heads whose points are much longer or shorter than others': a few in a hundred."""
    x = heads(128)
    codes, numbers = codec.encode(back(codec, x))
    once = codec.encode(x)
    assert (codes == once[0]).all(-1).float().mean() > 0.95
    assert (numbers == once[1]).float().mean() > 0.97


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_zeros_stay_zeros(codec):
    codes, numbers = codec.encode(torch.zeros(3, 64))
    assert not codes.any() and not numbers.any()
    assert not back(codec, torch.zeros(3, 64)).any()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_sizes_do_not_matter(codec):
    """From 2^-98 to 2^118 every power of two gives the same codes; below are zeros."""
    x = heads(128)
    codes, numbers = codec.encode(x)
    for power in (-96, -6, 10, 117):
        found = codec.encode(x * 2.0**power)
        assert torch.equal(found[0], codes)
        assert torch.equal(found[1].float(), numbers.float() * 2.0**power)
    for small in (1e-32, 1e-45):
        assert not back(codec, torch.full((1, 64), small)).any()
    x[:, 7] = 1e30
    found = back(codec, x)
    assert lost(found.double(), x.double()) < 1.02 * EXACT[codec.bits]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf, 3e36])
def test_what_cannot_be_stored_comes_back_as_nan(codec, wrong):
    x = heads(64, 3)
    x[1, 7] = wrong
    found = back(codec, x)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_a_head_has_one_number_and_a_block_of_values_each_has():
    x = torch.cat([heads(64, 5), 1000 * heads(64, 5)], -1)
    keys, values = (Rotated(4, block, 3).encode(x)[1] for block in (WHOLE_HEAD, OF_VALUES))
    assert keys.shape == (5, 1) and values.shape == (5, 2)
    assert (values[:, 1] > 100 * values[:, 0]).all()


def test_heads_that_cannot_be_rotated_are_refused():
    for dim in (16, 64, 256):
        assert Rotated(4, 64).refusal(dim) is None
    for dim in (8, 80, 512):
        assert str(dim) in Rotated(4, OF_VALUES).refusal(dim)
    assert Rotated(4, WHOLE_HEAD).refusal(512) is None
    assert "or 512 numbers, and one has 1024" in Rotated(4, WHOLE_HEAD).refusal(1024)


def unpacked_by_assembly():
    """Params (codec, dim, name in KVDevice) of what is unpacked by assembly."""
    ways = [(codec, "unpack_bf16") for codec in (*CODECS, Fp8("e4m3"), TokenFp8())]
    ways += [(codec, "unpack_native") for codec in (Fp8("e4m3"), TokenFp8())]
    triples = itertools.product(ways, (16, 32, 64, 128, 256, 512))
    return [
        pytest.param(codec, dim, unpack, id=f"{codec}-{dim}-{unpack}")
        for (codec, unpack), dim in triples
        if codec.refusal(dim) is None
    ]


def running_assembly():
    """Backends that unpack to bf16: instructions run one by one under the interpreter, or a GPU."""
    return [
        param
        for param in backends()
        if param.values[0].interpreted or param.values[0].dtype == torch.bfloat16
    ]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", running_assembly())
@pytest.mark.parametrize(("codec", "dim", "unpack"), unpacked_by_assembly())
def test_assembly_unpacks_to_the_references_bits(codec, dim, unpack, backend, monkeypatch):
    """Over random codes and numbers of all sizes."""
    if backend.interpreted:
        import triton.language as tl

        from tests.kernels import ptx

        monkeypatch.setattr(tl, "inline_asm_elementwise", ptx.inline_asm_elementwise)
    read = importlib.import_module("tests.kernels.read_tile")
    found, wanted = read.tiles(codec, dim, backend, unpack)
    assert same_bits(found, wanted)


def test_assembly_unpacks_e4m3():
    """Every code, four at a time."""
    pytest.importorskip("triton")
    from lockstep.kernels.formats.kv.fp8_triton import FOUR_E4M3
    from tests.kernels import ptx

    codes = torch.arange(256, dtype=torch.uint8)
    words = codes.view(torch.int32).numpy().view("uint32")
    thread = ptx.Thread([words], 2)
    for line in FOUR_E4M3.value.strip().strip("{}").split(";"):
        if line.strip():
            thread.run(" ".join(line.split()))
    pairs = [ptx.halves(thread.registers[f"${i}"], torch.bfloat16) for i in range(2)]
    found = torch.stack([torch.from_numpy(pair) for pair in pairs], 1).flatten().bfloat16()
    assert same_bits(found, codes.view(torch.float8_e4m3fn).bfloat16())


def test_a_cache_of_two_parts():
    codes = torch.zeros(3, 16, 2, 12, dtype=torch.int32)
    cache = PackedKV(
        Rotated(3, WHOLE_HEAD), 128, codes, torch.zeros(3, 16, 2, 1, dtype=torch.bfloat16)
    )
    assert len(cache.tensors()) == 2 and cache.shape == (3, 16, 2, 128)
