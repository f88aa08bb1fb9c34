"""Latents in KV formats: their quantizers, the writes to caches, and attention over quantized
latents."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.cache.kv import latent_caches, latent_spec
from lockstep.errors import ConfigError
from lockstep.kernels.formats.kv import KVQuantizer, dequantize, read_pages
from lockstep.kernels.formats.kv.cases import LATENT_QUANTIZERS, dequantized_copy
from lockstep.kernels.formats.kv.fp8 import TokenFp8
from lockstep.kernels.formats.kv.table import KV_FORMATS, latent_quantizer
from lockstep.kernels.latent_attention import latent_attention, latent_rope_and_cache
from lockstep.kernels.latent_attention.cases import latent_rope, paged_latents
from tests.kernels.backends import Backend, backends, same_bits

BACKENDS = backends(op=latent_attention)
WRITERS = backends(op=latent_rope_and_cache)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
QUANTIZERS = pytest.mark.parametrize(
    "quantizer", LATENT_QUANTIZERS.values(), ids=list(LATENT_QUANTIZERS)
)
BYTES = {
    "auto": 1152,
    "bfloat16": 1152,
    "fp8": 644,
    "fp8_e4m3": 644,
    "int8_per_token_head": 644,
    "turboquant_4bit_nc": 386,
    "turboquant_3bit_nc": 322,
}
"""Bytes of one token in one layer of DeepSeek-V3: 512 values, their scales, and 64 bf16 values."""
MAX_ERROR = {
    "bfloat16": 3e-6,
    "fp8_e4m3": 7.1e-4,
    "int8_per_token_head": 2.5e-4,
    "turboquant_4bit_nc": 0.0097,
    "turboquant_3bit_nc": 0.0352,
}
"""Maximum mean squared error of a normed latent of length 1."""
ROWS = ((5, 4), (0, 0), (254, 3))
SIZES = ((3, 64, 16, 64), (2, 32, 8, 16), (1, 512, 64, 64))
"""(heads, latent, rope, page size)."""
GROUPED = ("latents", "ropes", "page_table", "cu_seqlens", "starts")
"""The arguments that are processed group by group."""
HEADS = 16
"""Heads of the case with DeepSeek-V3's sizes on a GPU."""


def round_trip(quantizer: KVQuantizer, x: Tensor) -> Tensor:
    """Return x quantized and dequantized, with any rotation undone."""
    codes, *numbers = quantizer.quantize(x)
    actual = quantizer.dequantize(codes, *(numbers or [None]))
    return actual if quantizer.rotation is None else quantizer.rotation.rotate_back(actual)


def latents(dim: int = 512, count: int = 256) -> Tensor:
    """Return latents [count, D] of all magnitudes, with an eight times larger 7th value."""
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(count, dim, generator=draw)
    x[:, 7] *= 8
    return x * torch.exp2(torch.randint(-20, 20, (count, 1), generator=draw).float())


@pytest.mark.parametrize("name", BYTES)
def test_bytes_per_token(name: str) -> None:
    quantizer = latent_quantizer(KV_FORMATS.get(name), 512)
    spec = latent_spec(512, 64, torch.bfloat16, quantizer)
    assert sum(part.nbytes for part in spec.parts) == BYTES[name]
    cache, ropes = latent_caches(spec.allocate(3, 64, "cpu"), 512, quantizer)
    assert cache.shape == (3, 64, 512) and ropes.shape == (3, 64, 64)
    assert ropes.dtype == torch.bfloat16


def test_formats_with_different_keys_and_values_are_refused() -> None:
    for name in ("turboquant_k8v4", "turboquant_k3v4_nc", "fp8_e5m2"):
        with pytest.raises(ConfigError) as error:
            latent_quantizer(KV_FORMATS[name], 512)
        allowed = ", ".join(BYTES)
        assert f"kv_cache_dtype='{name}' is not allowed; allowed: {allowed}, since" in str(
            error.value
        )
    with pytest.raises(ConfigError, match="int8_per_token_head, since TurboQuant .* has 40"):
        latent_quantizer(KV_FORMATS["turboquant_4bit_nc"], 40)
    assert latent_quantizer(None, 40) is None


@QUANTIZERS
def test_quantization_error(quantizer: KVQuantizer, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    x = latents()
    off = (round_trip(quantizer, x) - x).square().sum(-1) / x.square().sum(-1)
    assert MAX_ERROR[name] / 3 < off.mean() < MAX_ERROR[name]


@QUANTIZERS
def test_quantization_is_idempotent_and_keeps_zeros(quantizer: KVQuantizer) -> None:
    x = latents()
    once = round_trip(quantizer, x)
    close = 1e-6 * once.abs().amax(-1, keepdim=True)
    equal = ((round_trip(quantizer, once) - once).abs() <= close).all(-1)
    assert equal.float().mean() > 0.95
    assert quantizer.rotation is not None or equal.all()
    assert not round_trip(quantizer, torch.zeros(3, 64)).any()


@QUANTIZERS
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_stay_non_finite(quantizer: KVQuantizer, wrong: float) -> None:
    x = torch.ones(3, 64)
    x[1, 5] = wrong
    actual = round_trip(quantizer, x)
    assert not actual[1].isfinite().all()
    assert actual[[0, 2]].isfinite().all()


def test_token_fp8_scale_is_smallest_power_of_two() -> None:
    """No value exceeds 448 times the scale, and one would exceed half of that; each is rounded to
    nearest."""
    quantizer = TokenFp8()
    x = latents()
    codes, scales = quantizer.quantize(x)
    (mantissas, _) = torch.frexp(scales)
    assert (mantissas == 0.5).all()
    maximum = x.abs().amax(-1, keepdim=True)
    assert (maximum <= 448 * scales).all() and (maximum > 224 * scales).all()
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].unique()
    wide = (x[:16] / scales[:16]).double()
    nearest = (wide[..., None] - every.double()).abs().min(-1).values
    assert torch.equal((wide - codes[:16].view(torch.float8_e4m3fn).double()).abs(), nearest)
    for exact in (448.0, 449.0, 2.0**-100, 2.0**-130, 2.0**120 * 1.9):
        assert round_trip(quantizer, torch.tensor([[exact]])) == pytest.approx(
            exact, rel=0.07, abs=2.0**-110
        )
    assert round_trip(quantizer, torch.tensor([[2.0**121, 1.0]])).isnan().all()


def sizes_on(backend: Backend) -> tuple[tuple[int, ...], ...]:
    """Return the sizes for a backend: small ones under the interpreter, DeepSeek-V3's heads on a
    GPU, and only those for the Hopper kernel."""
    if backend.interpreted:
        return SIZES[:2]
    sizes = (*SIZES, (HEADS, 512, 64, 64)) if backend.on_gpu else SIZES
    return sizes[2:] if backend.name == "hopper" else sizes


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("backend", BACKENDS)
@QUANTIZERS
def test_attention_over_quantized_equals_dequantized(
    backend: Backend, quantizer: KVQuantizer
) -> None:
    for size in sizes_on(backend):
        packed = paged_latents(ROWS, *size, backend.dtype, quantizer=quantizer)
        arguments = dequantize(packed["latents"], backend.dtype)
        actual = backend.run(latent_attention, packed)
        assert actual.isfinite().all()
        assert same_bits(actual, backend.run(latent_attention, packed | {"latents": arguments})), (
            size
        )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_e4m3", "turboquant_4bit_nc"])
@pytest.mark.parametrize("rows", [((32765, 4),), ((8200, 32),), ((100, 300),)], ids=str)
def test_quantized_equals_dequantized_in_every_partition(name: str, rows: Any) -> None:
    """Partials of splits and of spans, and whole rows, at DeepSeek-V3's sizes, on any backend."""
    quantizer = LATENT_QUANTIZERS[name]
    (triton, hopper) = (Backend(name, "cuda", torch.bfloat16) for name in ("triton", "hopper"))
    packed = triton.place(paged_latents(rows, 128, 512, 64, 64, triton.dtype, quantizer=quantizer))
    arguments = dequantize(packed["latents"], triton.dtype)
    actual = triton.run(latent_attention, packed)
    assert actual.isfinite().all()
    assert same_bits(actual, triton.run(latent_attention, packed | {"latents": arguments}))
    if hopper.serves(latent_attention, packed):
        assert same_bits(actual, hopper.run(latent_attention, packed))


@pytest.mark.default_cases("bfloat16", "fp8_e4m3", "turboquant_3bit_nc")
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize(
    "quantizer", [None, *LATENT_QUANTIZERS.values()], ids=["auto", *LATENT_QUANTIZERS]
)
def test_groups_are_dequantized_before_attention(
    backend: Backend, quantizer: KVQuantizer | None
) -> None:
    """Two rows at once, then the third: attention over each group equals attention over all."""
    kernel = import_module("lockstep.kernels.latent_attention.dequantize")
    size = sizes_on(backend)[-1]
    packed = backend.place(
        paged_latents(ROWS, *size, backend.dtype, quantizer=quantizer, min_columns=40)
    )
    arguments = {name: packed[name] for name in GROUPED}
    row_bytes = 40 * size[3] * (size[1] + size[2]) * backend.dtype.itemsize
    expected = backend.run(latent_attention, packed)
    actual = torch.zeros_like(expected)
    counts = []
    for group in kernel.dequantized_groups(**arguments, max_bytes=3 * row_bytes - 1):
        part = dict(zip(GROUPED, group, strict=True))
        assert all(part[name].dtype == backend.dtype for name in ("latents", "ropes"))
        mine = slice(int(part["cu_seqlens"][0]), int(part["cu_seqlens"][-1]))
        actual[mine] = backend.run(latent_attention, packed | part)[mine]
        counts.append(len(part["starts"]))
    assert counts == ([2, 1] if quantizer else [3])
    assert same_bits(actual, expected)


def hard_arguments(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the same call with weights of all magnitudes, a token of zeros and one that is not
    finite."""
    width = len(arguments["weight"])
    exponents = torch.arange(width).float() % 24 - 12
    weight = (arguments["weight"].float() * torch.exp2(exponents)).to(dtype)
    kv = arguments["kv"].clone()
    kv[0, :width] = 0.0
    kv[1, 3] = torch.nan
    kv[2, :width] *= 1e-3
    return arguments | {"weight": weight, "kv": kv}


@pytest.mark.covering(strength=2)
@pytest.mark.parametrize("backend", WRITERS)
@QUANTIZERS
@pytest.mark.parametrize("size", [(7, 2, 12, 32, 8), (5, 0, 16, 512, 64)], ids=str)
def test_written_cache_equals_quantized_reference(
    backend: Backend, quantizer: KVQuantizer, size: tuple[int, ...]
) -> None:
    """The reference quantizer is applied to the latents that the same backend writes unquantized.
    The rotated key and queries are equal, and nothing else is written."""
    (full, packed) = (
        backend.place(hard_arguments(latent_rope(*size, backend.dtype, kind), backend.dtype))
        for kind in (None, quantizer)
    )
    before = backend.fresh(packed)
    queries = backend.run(latent_rope_and_cache, packed)
    assert same_bits(queries, backend.run(latent_rope_and_cache, full))
    assert same_bits(packed["ropes"], full["ropes"])
    slots = full["slot_mapping"].unique()
    expected = quantizer.quantize(full["latents"].flatten(0, 1)[slots].cpu())
    rest = torch.ones(packed["latents"].shape[:2].numel(), dtype=torch.bool)
    rest[slots.cpu()] = False
    tensors = packed["latents"].tensors()
    for tensor, old, want in zip(tensors, before["latents"].tensors(), expected, strict=True):
        assert same_bits(tensor.flatten(0, 1)[slots], want)
        assert same_bits(tensor.cpu().flatten(0, 1)[rest], old.cpu().flatten(0, 1)[rest])


@QUANTIZERS
def test_read_pages_equals_dequantized_cache(quantizer: KVQuantizer) -> None:
    cache = paged_latents(ROWS, 2, 32, 8, 16, torch.float32, quantizer=quantizer)["latents"]
    pages = torch.tensor([3, 1, 1, 0])
    assert same_bits(
        read_pages(cache, pages, torch.float32), dequantize(cache, torch.float32)[pages]
    )
    assert (
        dequantized_copy(cache, torch.float32).shape
        == cache.shape
        == dequantize(cache, torch.float32).shape
    )


def test_explain_reports_supported_latents() -> None:
    traits = dict(device="cuda", dtype=torch.bfloat16, arch=90, heads=128, latent=512, rope=64)
    for op in (latent_attention, latent_rope_and_cache):
        for quantizer in (None, *LATENT_QUANTIZERS.values()):
            assert op.explain(**traits, quantizers=quantizer and (quantizer,))["triton"] is None

        class Other(TokenFp8):
            device_path = None  # type: ignore[assignment]

        assert (
            op.explain(**traits, quantizers=(Other(),))["triton"] == "Other has no device functions"
        )
