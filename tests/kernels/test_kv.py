"""KV formats: their quantizers, and the ops that read and write quantized caches.

Attention over a quantized cache equals attention over the dequantized one bit for bit, and what is
written depends only on the token and the head.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from lockstep.kernels.attention import paged_attention
from lockstep.kernels.attention.cases import paged
from lockstep.kernels.formats.kv import (
    HadamardRotation,
    KVFormat,
    QuantizedKV,
    dequantize,
    read_pages,
    rotate_queries,
)
from lockstep.kernels.formats.kv.cases import KERNEL_FORMATS, dequantized_copy, fits
from lockstep.kernels.formats.kv.fp8 import TYPES, Fp8
from lockstep.kernels.formats.kv.int8 import Int8
from lockstep.kernels.formats.kv.unquantized import Unquantized
from lockstep.kernels.rotary import rope_and_cache
from lockstep.kernels.rotary.cases import LAYERS, WITHOUT, rope
from tests.kernels.backends import backends, same_bits

BACKENDS = backends()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FORMATS = pytest.mark.parametrize("format", KERNEL_FORMATS.values(), ids=list(KERNEL_FORMATS))
ROTATE = {name: format for name, format in KERNEL_FORMATS.items() if format.v.rotation}


def supported_params(sizes: Any, at: int) -> Any:
    """Return params (format, size) of every format and each size whose dim, element `at`, it
    supports."""
    pairs = [(n, f, size) for n, f in KERNEL_FORMATS.items() for size in sizes if fits(f, size[at])]
    return [pytest.param(f, size, id=f"{name}-{size}") for name, f, size in pairs]


CACHES = ("k_cache", "v_cache")
SIZES = ((4, 1, 64, 64), (3, 1, 80, 32), (2, 2, 32, 16), (2, 1, 16, 16))
"""(heads, KV heads, dim, page size)."""
SMALL = (4, 3, 3, 128, 64, False, 1.0)
"""A layer of rope_and_cache with two blocks of values."""
WRITE_CASES = [
    pytest.param(absent, *of.values, id=f"{absent}-{of.id}")
    for absent, layers in (
        ((), (*LAYERS[:3], LAYERS[7], LAYERS[4], SMALL)),
        *((names, (LAYERS[0], SMALL)) for _, names in WITHOUT[:3:2]),
    )
    for of in supported_params(layers, 3)
]
"""Cases of rope_and_cache: every layer; without norms and without positions, the first layers that
fit."""
ROWS = ((5, 1), (0, 0), (254, 3))


def hard_numbers(dim: int, heads: int = 64) -> torch.Tensor:
    """Return heads [heads, D] over all exponents, with ties between codes, zeros, and the smallest
    and largest numbers."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(heads, dim, generator=generator)
    x *= torch.exp2(torch.randint(-30, 12, (heads, 1), generator=generator).float())
    x[0] = 0.0
    x[1] = torch.arange(dim) - dim / 2.0
    x[2] = torch.linspace(-600.0, 600.0, dim)
    x[3] = torch.linspace(-1.0, 1.0, dim) * 2.0**-9
    x[4] = 1.4e-45
    x[5] = torch.finfo(torch.bfloat16).max
    x[6, 1] = -0.0
    return x


def round_trip(quantizer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return x quantized and dequantized, with any rotation undone."""
    codes, *numbers = quantizer.quantize(x)
    actual = quantizer.dequantize(codes, *(numbers or [None]))
    return actual if quantizer.rotation is None else quantizer.rotation.rotate_back(actual)


@FORMATS
@pytest.mark.parametrize("side", ["k", "v"])
def test_non_finite_values_dequantize_to_nan(format: Any, side: str) -> None:
    quantizer = getattr(format, side)
    for wrong in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(2, 3, 16)
        x[1, 2, 5] = wrong
        actual = round_trip(quantizer, x)
        assert actual[1, 2].isnan().any() or format.name == "bfloat16" and actual[1, 2, 5] == wrong
        assert actual[0].isfinite().all() and actual[1, :2].isfinite().all()


@FORMATS
def test_quantization_is_idempotent(format: Any) -> None:
    """Dequantized values quantize to themselves, except for the last bit of a scale."""
    x = hard_numbers(32)[:4]
    once = round_trip(format.k, x)
    maximum = once.abs().max() if format.k.rotation else 0  # turning there and back rounds
    torch.testing.assert_close(round_trip(format.k, once), once, rtol=1e-6, atol=1e-6 * maximum)


@pytest.mark.parametrize("kind", TYPES)
def test_fp8_rounds_to_nearest(kind: str) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(TYPES[kind]).float()
    every = every[every.isfinite()].unique()
    x = hard_numbers(64).flatten()
    x = x[x.abs() <= every.max()]
    actual = round_trip(Fp8(kind), x)
    nearest = (x.double()[:, None] - every.double()).abs().min(-1).values
    assert torch.equal((x.double() - actual.double()).abs(), nearest)
    assert round_trip(Fp8(kind), torch.tensor(3e38)) == every.max()


def test_int8_error_is_at_most_half_a_step() -> None:
    x = hard_numbers(64)
    x = x[(x.abs().amax(-1) > 1e-30)]
    off = (round_trip(Int8(), x) - x).abs().amax(-1)
    assert (off <= x.abs().amax(-1) / 254 * 1.0001).all()
    codes, scale = Int8().quantize(torch.zeros(3, 16))
    assert not codes.any() and not scale.any()


def test_fixed_scale_divides_then_multiplies() -> None:
    x = hard_numbers(64)[:4]
    scaled = round_trip(Fp8("e4m3", 0.25), x)
    assert torch.equal(scaled, round_trip(Fp8("e4m3"), x * 4) / 4)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("format", "layer"), supported_params(SIZES, 2))
def test_attention_over_quantized_equals_dequantized(
    backend: Any, layer: tuple[int, ...], format: Any
) -> None:
    packed = paged(ROWS, *layer, backend.dtype, format=format)
    dequantized = packed | {name: dequantized_copy(packed[name], backend.dtype) for name in CACHES}
    actual = backend.run(paged_attention, packed)
    assert actual.isfinite().all()
    assert same_bits(actual, backend.run(paged_attention, dequantized))


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", ROTATE.values(), ids=list(ROTATE))
@pytest.mark.parametrize("batch", [((254, 3),)], ids=str)
def test_values_of_two_blocks(backend: Any, batch: Any, format: Any) -> None:
    """A head of 128 and, outside the interpreter, one of 256, gated."""
    for dim in (128,) if backend.interpreted else (128, 256):
        packed = paged(batch, 3, 1, dim, 64, backend.dtype, format=format)
        packed["gates"] = torch.ones(3, 6 * dim).to(backend.dtype)
        dequantized = packed | {
            name: dequantized_copy(packed[name], backend.dtype) for name in CACHES
        }
        actual = backend.run(paged_attention, packed)
        assert same_bits(actual, backend.run(paged_attention, dequantized))


@pytest.mark.covering(strength=2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("absent", "format", "layer"), WRITE_CASES)
def test_written_cache_equals_quantized_reference(
    backend: Any, layer: Any, format: Any, absent: tuple[str, ...]
) -> None:
    """The reference quantizer is applied to the keys and values that the same backend writes
    unquantized."""
    changes = dict.fromkeys(absent)
    dequantized = backend.place(rope(*layer, backend.dtype) | changes)
    packed = backend.place(rope(*layer, backend.dtype, format) | changes)
    before = backend.fresh(packed)
    queries = backend.run(rope_and_cache, packed)
    unrotated = backend.run(rope_and_cache, dequantized).cpu()
    assert same_bits(queries, rotate_queries(unrotated, packed["k_cache"]))
    slots = dequantized["slot_mapping"].unique()
    for name in CACHES:
        expected = packed[name].quantizer.quantize(dequantized[name].flatten(0, 1)[slots].cpu())
        pairs = zip(packed[name].tensors(), before[name].tensors(), expected, strict=True)
        for tensor, old, want in pairs:
            assert same_bits(tensor.flatten(0, 1)[slots], want), name
            rest = torch.ones(tensor.shape[0] * tensor.shape[1], dtype=torch.bool)
            rest[slots.cpu()] = False
            assert same_bits(tensor.cpu().flatten(0, 1)[rest], old.cpu().flatten(0, 1)[rest])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [16, 128])
def test_rotation_without_quantization_preserves_attention(backend: Any, dim: int) -> None:
    """Keys, queries, values and outputs: rotated and unquantized against not rotated."""
    layer = (5, 4, 1, dim, dim // 2, True, 0.0)
    format = KVFormat(
        "rotated", *(Unquantized(backend.dtype, HadamardRotation(99, block)) for block in (256, 64))
    )
    actual = []
    for chosen in (None, format):
        arguments = backend.place(rope(*layer, backend.dtype, chosen))
        arguments["slot_mapping"] = arguments["slot_mapping"].new_tensor([16, 17, 18, 19, 20])
        q = backend.run(rope_and_cache, arguments)
        pages = dict(page_table=torch.tensor([[1]]), cu_seqlens=torch.tensor([0, 5]))
        rest = dict(pages, starts=torch.tensor([0]), query_len=5, scale=dim**-0.5)
        caches = {name: arguments[name] for name in CACHES}
        gates = arguments["qkv"].contiguous()
        actual.append(backend.run(paged_attention, dict(q=q, gates=gates, **caches, **rest)).cpu())
    tolerance = 2e-6 if backend.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual[1], actual[0], rtol=tolerance, atol=tolerance)


@pytest.mark.covering(strength=1)
@FORMATS
@pytest.mark.parametrize("backend", BACKENDS)
def test_hard_numbers_are_written_as_reference(backend: Any, format: Any) -> None:
    """Without norm and positions, so that k and v equal the projection's."""
    dim = 32
    numbers = hard_numbers(dim).to(backend.dtype)
    numbers[40, 3] = torch.nan
    numbers[41, 4] = -torch.inf
    tokens = len(numbers) // 2
    arguments = rope(tokens, 0, 2, dim, 8, False, 0.0, backend.dtype, format)
    arguments |= dict.fromkeys(("q_weight", "k_weight", "cos", "sin"))
    arguments["qkv"] = torch.cat([numbers.view(tokens, -1), numbers.view(tokens, -1).flip(0)], 1)
    written = backend.place(arguments)
    backend.run(rope_and_cache, written)
    slots = arguments["slot_mapping"]
    for name, x in (
        ("k_cache", numbers.view(tokens, 2, dim)),
        ("v_cache", arguments["qkv"][:, 64:]),
    ):
        quantizer = written[name].quantizer
        expected = quantizer.quantize(x.reshape(tokens, 2, dim))
        for tensor, want in zip(written[name].tensors(), expected, strict=True):
            assert same_bits(tensor.flatten(0, 1)[slots], want), name


@FORMATS
def test_read_pages_equals_dequantized_cache(format: Any) -> None:
    cache = paged(ROWS, 4, 2, 32, 16, torch.float32, format=format)["k_cache"]
    pages = torch.tensor([3, 1, 1, 0])
    assert same_bits(
        read_pages(cache, pages, torch.float32), dequantize(cache, torch.float32)[pages]
    )
    assert cache.shape == dequantize(cache, torch.float32).shape


def test_quantizer_without_device_functions_is_unsupported() -> None:
    class Other(Int8):
        device_path = None

    traits = dict(device="cuda", dtype=torch.bfloat16, head_dim=128, arch=90)
    for op, quantizer in product((paged_attention, rope_and_cache), (Other(),)):
        reasons = op.explain(**traits, quantizers=(quantizer, quantizer))
        assert reasons["triton"] == "Other has no device functions"
    served = paged_attention.explain(**traits, quantizers=(Int8(), Int8()))
    assert served["triton"] is None and "quantized" in (served["hopper"] or "")
    assert served["quantized_hopper"] is None
    served = paged_attention.explain(**traits, quantizers=None)
    assert served["hopper"] is None and "not quantized" in (served["quantized_hopper"] or "")


def test_quantized_cache_lists_its_tensors() -> None:
    codes = torch.zeros(3, 16, 2, 8, dtype=torch.int8)
    cache = QuantizedKV(Int8(), 8, codes)
    assert cache.tensors() == [codes]
    assert len(replace(cache, scales=torch.zeros(3, 16, 2, 1)).tensors()) == 2
