"""W8A8: quantization of rows, and products whose sums of 128 columns are exact."""

from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.kernels.activations import silu_mul
from lockstep.kernels.architecture import HOPPER
from lockstep.kernels.arguments import place
from lockstep.kernels.formats.weights import K_BLOCK, Fp8Weight, unpack_codes
from lockstep.kernels.formats.weights.fp8 import e4m3_values
from lockstep.kernels.fp8_linear import (
    MIN_SCALE,
    QuantizedRows,
    cpu,
    fp8_linear,
    quantize_add_rms_norm,
    quantize_rows,
    quantize_silu_mul,
)
from lockstep.kernels.fp8_linear.cases import (
    quantize_add_rms_norm_cases,
    quantize_silu_mul_cases,
    rows_of,
)
from lockstep.kernels.fp8_linear.cpu import PrepackedFp8Weight
from lockstep.kernels.norm import add_rms_norm
from tests.kernels.backends import Backend, backends, same_bits

QUANTIZERS = [*backends(op=quantize_rows)]
PRODUCTS = [*backends(op=fp8_linear)]
GROUPS = pytest.mark.parametrize("block_k", [128, 300])
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def values_of(backend: Backend, x: Tensor, block_k: int) -> tuple[Tensor, Tensor]:
    """Quantize x and return (values of the codes [T, K] with padding, scales)."""
    words, scales = backend.run(quantize_rows, dict(x=x, block_k=block_k))
    return e4m3_values(unpack_codes(words.cpu(), 8, 4 * words.shape[1])), scales.cpu()


def random_weight(n: int, k: int, block_n: int, block_k: int) -> Fp8Weight:
    weight = Fp8Weight.empty(n, k, block_n, block_k)
    weight.fill_dummy(torch.Generator().manual_seed(5))
    return weight


@GROUPS
@pytest.mark.parametrize("backend", QUANTIZERS)
def test_codes_are_nearest_to_scaled_values(backend: Backend, block_k: int) -> None:
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).to(backend.dtype)
    values, scales = values_of(backend, x, block_k)
    every = e4m3_values(torch.arange(256, dtype=torch.uint8))
    every = every[every.isfinite()]
    columns = torch.arange(300) // block_k
    scaled = x.float() / scales[:, columns]
    nearest = (scaled[..., None] - every).abs().amin(-1)
    assert torch.equal((scaled - values[:, :300]).abs(), nearest)
    assert not values[:, 300:].any()


@GROUPS
@pytest.mark.parametrize("backend", QUANTIZERS)
def test_scale_maps_largest_magnitude_to_448(backend: Backend, block_k: int) -> None:
    """For every mantissa of a bf16 number, so that rounding of the scale overflows no code."""
    amax = torch.arange(0x3F80, 0x4000).to(torch.int16).view(torch.bfloat16)
    x = torch.zeros(len(amax), 300, dtype=backend.dtype)
    x[:, 7] = -amax.to(backend.dtype)
    values, scales = values_of(backend, x, block_k)
    assert (values[:, 7] == -448).all() and torch.equal(scales[:, 0], amax.float() / 448)


@GROUPS
@pytest.mark.parametrize("backend", QUANTIZERS)
def test_zeros_and_subnormal_groups_have_smallest_scale(backend: Backend, block_k: int) -> None:
    x = torch.zeros(2, 300, dtype=backend.dtype)
    x[1, 3] = 2.0**-24 if backend.dtype == torch.float16 else 2.0**-133
    values, scales = values_of(backend, x, block_k)
    assert not values[0].any() and (scales[0] == MIN_SCALE).all()
    if backend.dtype != torch.float16:
        assert scales[1, 0] == MIN_SCALE and values[1, 3] == 2.0**-7


@GROUPS
@pytest.mark.parametrize("backend", QUANTIZERS)
def test_infinity_and_nan_reach_the_product(backend: Backend, block_k: int) -> None:
    """A NaN makes its group NaN, an infinity becomes NaN; other groups and rows do not change."""
    x = torch.ones(4, 300, dtype=backend.dtype)
    clean, _ = values_of(backend, x, block_k)
    x[0, 5] = float("nan")
    x[1, 5] = float("inf")
    x[2, 5] = -float("inf")
    values, scales = values_of(backend, x, block_k)
    columns = torch.arange(values.shape[1])
    in_group = columns < min(block_k, 300)
    assert values[0][in_group].isnan().all() and scales[0, 0].isnan()
    for row in (1, 2):
        assert values[row, 5].isnan() and not values[row][in_group & (columns != 5)].any()
    for row in range(3):
        assert torch.equal(values[row][~in_group], clean[row][~in_group])
    assert torch.equal(values[3], clean[3])


@pytest.mark.parametrize("backend", backends(op=quantize_rows)[1:])
def test_division_of_kernels_is_that_of_fp32(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divide numbers of all magnitudes, zeros of both signs, infinities and NaN."""
    from tests.kernels.divide import divide_kernel

    if backend.interpreted:
        from triton.runtime import interpreter

        def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
            a, b, c = (operand.data.astype("float64") for operand in (x, y, z))
            return interpreter.TensorHandle((a * b + c).astype("float32"), z.dtype.scalar)

        # The interpreter rounds the product and the sum.
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
    size = 1 << 12
    generator = torch.Generator().manual_seed(13)
    amax = torch.exp2(torch.rand(size, generator=generator) * 270 - 142).clamp(max=3e38)
    scales = (amax / 448).clamp(min=MIN_SCALE)
    smaller = torch.exp2(-torch.rand(size, generator=generator) * 40)
    x = amax * smaller * (torch.randint(0, 2, (size,), generator=generator) * 2 - 1)
    x[:4] = torch.tensor([0.0, -0.0, 0.0, -0.0])
    scales[2:4] = MIN_SCALE
    scales[4:8] = float("inf")
    x[4:7] = torch.tensor([float("inf"), 1.0, -1.0])
    x[7] = scales[7] = float("nan")
    x, scales = x.to(backend.device), scales.to(backend.device)
    out = torch.empty_like(x)
    divide_kernel[(1,)](x, scales, out, size)
    expected = x.cpu() / scales.cpu()
    kept = (expected.abs() >= 2.0**-40) | (expected == 0) | expected.isnan()
    assert kept.sum() > 0.9 * size
    assert same_bits(out.cpu()[kept], expected[kept])
    signed = kept & ~expected.isnan()  # the sign of a zero is a bit of its code
    assert torch.equal(out.cpu().signbit()[signed], expected.signbit()[signed])


@pytest.mark.parametrize("backend", PRODUCTS)
def test_rows_with_infinity_or_nan_are_nan_and_others_unchanged(backend: Backend) -> None:
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(2)).to(backend.dtype)
    weight = random_weight(40, 300, 128, 128)
    clean = backend.run(fp8_linear, dict(x=x, weight=weight))
    x[1, 200] = float("inf")
    x[2, 0] = float("nan")
    y = backend.run(fp8_linear, dict(x=x, weight=weight))
    assert y[1:3].isnan().all()
    assert same_bits(y[::3], clean[::3])


@pytest.mark.parametrize("backend", backends(op=quantize_silu_mul))
def test_activation_that_quantizes_has_the_bits_of_two_ops(backend: Backend) -> None:
    """Compare with silu_mul and quantize_rows of the same backend."""
    for name, arguments in quantize_silu_mul_cases(backend.dtype):
        activated = backend.run(silu_mul, arguments)
        words, scales = backend.run(quantize_rows, dict(x=activated, block_k=K_BLOCK))
        fused_words, fused_scales = backend.run(quantize_silu_mul, arguments)
        assert same_bits(fused_words, words), name
        assert same_bits(fused_scales, scales), name


@pytest.mark.parametrize("backend", backends(op=quantize_add_rms_norm))
def test_norm_that_quantizes_has_the_bits_of_two_ops(backend: Backend) -> None:
    """Compare with add_rms_norm and quantize_rows of the same backend, with a delta or partials."""
    for name, arguments in quantize_add_rms_norm_cases(backend.dtype):
        keeps_norm = arguments["keeps_norm"]
        plain = {key: value for key, value in arguments.items() if key != "keeps_norm"}
        total, norm = backend.run(add_rms_norm, plain)
        words, scales = backend.run(quantize_rows, dict(x=norm, block_k=K_BLOCK))
        fused = backend.run(quantize_add_rms_norm, arguments)
        assert same_bits(fused[0], total), name
        assert same_bits(fused[1], norm) if keeps_norm else fused[1] is None, name
        assert same_bits(fused[2], words), name
        assert same_bits(fused[3], scales), name


@pytest.mark.parametrize("backend", [b for b in PRODUCTS if b.values[0].name != "cpu"])
def test_product_of_quantized_rows_is_that_of_their_values(backend: Backend) -> None:
    """Also with a tile of several tokens and with partitions."""
    quantizer = replace(backend, name="triton") if backend.on_gpu else backend
    weight = random_weight(40, 1152, 128, 128)
    generator = torch.Generator().manual_seed(11)
    for tokens, split_k in ((0, 1), (1, 1), (19, 2)):
        x = rows_of(tokens, 1152, backend.dtype, generator)
        words, scales = quantizer.run(quantize_rows, dict(x=x, block_k=K_BLOCK))
        rows = QuantizedRows(words, scales, 1152, backend.dtype)
        expected = backend.run(fp8_linear, dict(x=x, weight=weight, split_k=split_k))
        actual = backend.run(fp8_linear, dict(x=rows, weight=weight, split_k=split_k))
        assert same_bits(actual, expected) and actual.dtype == backend.dtype


def test_reference_multiplies_quantized_rows() -> None:
    weight = random_weight(24, 300, 128, 128)
    x = rows_of(5, 300, torch.bfloat16, torch.Generator().manual_seed(12))
    rows = QuantizedRows(*quantize_rows(x, K_BLOCK), 300, torch.bfloat16)
    assert (len(rows), rows.shape, rows.device) == (5, (5, 300), x.device)
    assert same_bits(fp8_linear(rows, weight), fp8_linear(x, weight))


def exact_block(x: Tensor, w: Tensor) -> float:
    """Return the sum of products of two vectors, rounded once to fp32."""
    total = sum((Fraction(a) * Fraction(b) for a, b in zip(x.tolist(), w.tolist(), strict=True)))
    return float(torch.tensor(float(Fraction(total)), dtype=torch.float64).float())


@pytest.mark.parametrize("by_block", [True, False])
def test_definition_in_exact_arithmetic(by_block: bool) -> None:
    """Codes of all magnitudes: a block is rounded once, and scales have fixed places."""
    generator = torch.Generator().manual_seed(3)
    k = 300
    codes = torch.randint(0, 256, (3, k), generator=generator).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scales = torch.rand(3, 3 if by_block else 1, generator=generator)
    weight = Fp8Weight.of(codes, scales, 1, 128 if by_block else k)
    x = torch.randn(2, k, generator=generator) * 2.0 ** torch.randint(-9, 9, (2, k)).float()
    words, x_scales = quantize_rows(x, weight.block_k)
    x_values = e4m3_values(unpack_codes(words, 8, k))
    w_values = e4m3_values(codes)
    expected = torch.zeros(2, 3)
    for row in range(2):
        for out in range(3):
            total = torch.tensor(0.0)
            for block in range(3):
                columns = slice(K_BLOCK * block, K_BLOCK * (block + 1))
                d = torch.tensor(exact_block(x_values[row, columns], w_values[out, columns]))
                if by_block:
                    scale = x_scales[row, block] * scales[out, block]
                    exact = Fraction(d.item()) * Fraction(scale.item()) + Fraction(total.item())
                    total = torch.tensor(float(exact), dtype=torch.float64).float()
                else:
                    total = total + d
            scale = x_scales[row, 0] * scales[out, 0]
            expected[row, out] = total if by_block else total * scale
    assert same_bits(fp8_linear(x, weight), expected)


@pytest.mark.parametrize("block_k", [128, 384])
def test_order_within_a_block_changes_no_bit_on_a_cpu(block_k: int) -> None:
    x = torch.randn(3, 384, generator=torch.Generator().manual_seed(4))
    weight = random_weight(24, 384, 1, block_k)
    order = torch.cat([torch.randperm(K_BLOCK) + begin for begin in (0, 128, 256)])
    codes = weight.codes()[:, order]
    other = Fp8Weight.of(codes, weight.scales, 1, block_k)
    assert same_bits(fp8_linear(x, weight), fp8_linear(x[:, order], other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tile", [cpu.TILE_OUTPUTS, 16])
def test_prepacked_weight_has_the_bits_of_its_definition(
    dtype: torch.dtype, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weight is one tile, or several of which the last one has one output."""
    monkeypatch.setattr(cpu, "TILE_OUTPUTS", tile)
    x = torch.randn(9, 300, generator=torch.Generator().manual_seed(6)).to(dtype)
    weight = random_weight(33, 300, 128, 128)
    prepacked = PrepackedFp8Weight(weight, dtype)
    out = torch.zeros(9, 40, dtype=dtype)
    prepacked.multiply(x, out[:, 3:36])
    assert same_bits(prepacked.define(x), prepacked.multiply(x))
    assert same_bits(out[:, 3:36], prepacked.multiply(x))
    assert len(prepacked.tiles) == -(-33 // tile)
    assert prepacked.nbytes == PrepackedFp8Weight.bytes_of(weight)
    assert same_bits(prepacked.plain(), weight.dequantize(dtype))
    assert same_bits(prepacked.rows(3, 7), weight.dequantize(dtype)[3:7])


@pytest.mark.parametrize("backend", PRODUCTS)
@pytest.mark.parametrize("split_k", [1, 2])
def test_partials_add_up_to_the_result(backend: Backend, split_k: int) -> None:
    """Compare several tiles of tokens, with and without `out`, whose CTAs add all partitions."""
    k = 1024
    weight = random_weight(40, k, 128, 128)
    for tokens in (1, 17, 70):
        x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(tokens))
        arguments: dict[str, Any] = dict(x=x.to(backend.dtype), weight=weight, split_k=split_k)
        expected = backend.run(fp8_linear, arguments)
        partials = backend.run(fp8_linear, arguments | dict(allow_partials=True))
        if partials.dim() == 3:
            assert len(partials) == split_k
            partials = (partials[0] + partials[1]).to(backend.dtype)
        assert same_bits(partials, expected)
        wide = torch.zeros(tokens, 50, dtype=backend.dtype, device=expected.device)
        backend.run(fp8_linear, arguments | dict(out=wide[:, 5:45]))
        assert same_bits(wide[:, 5:45], expected) and not wide[:, 45:].any()


def test_error_of_activations_is_that_of_three_mantissa_bits() -> None:
    """2.6 % of the result's norm for normal numbers: an error that a wrong scale would exceed."""
    x = torch.randn(64, 2048, generator=torch.Generator().manual_seed(8))
    for block_k in (128, 2048):
        weight = random_weight(256, 2048, 1, block_k)
        exact = x.double() @ weight.dequantize(torch.float32).double().t()
        error = (fp8_linear(x, weight).double() - exact).norm() / exact.norm()
        assert 0.015 < error < 0.035


@pytest.mark.gpu
@pytest.mark.parametrize("block_n", [1, 64, 128])
@pytest.mark.parametrize("block_k", [128, 2048])
@pytest.mark.parametrize("split_k", [1, 2, 4])
def test_every_tile_gives_the_same_bits(split_k: int, block_k: int, block_n: int) -> None:
    """Operands of all magnitudes, whose sums round differently in any other order."""
    from lockstep.kernels.compile_target import compile_target
    from lockstep.kernels.fp8_linear.triton import LARGE, LARGE_TREE, SMALL, launch
    from lockstep.kernels.linear.triton import reduce_partials

    generator = torch.Generator().manual_seed(9)
    codes = torch.randint(0, 256, (520, 2048), generator=generator).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scales = torch.rand(-(-520 // block_n), 2048 // block_k, generator=generator)
    weight = place(Fp8Weight.of(codes, scales, block_n, block_k), "cuda")
    spread = 2.0 ** torch.randint(-9, 9, (300, 2048), generator=generator)
    x = (torch.randn(300, 2048, generator=generator) * spread).bfloat16().cuda()
    expected = fp8_linear.backends["triton"].run(x, weight, split_k)
    target = compile_target(x.device)
    for tile in (*SMALL, LARGE_TREE, *([LARGE] if split_k == 1 else [])):
        parts = (split_k,) if tile.splits and split_k > 1 else ()
        dtype = torch.float32 if parts else x.dtype
        y = torch.empty(*parts, 300, 520, dtype=dtype, device="cuda")
        launch(x, weight, split_k, tile, target, y)
        assert same_bits(reduce_partials(y, x.dtype) if parts else y, expected), tile
    if target.arch != HOPPER:
        return
    from lockstep.kernels.fp8_linear.hopper import (
        CTA_ROWS,
        STAGES,
        HopperTile,
        fits,
        launch_hopper,
        shares_scale,
    )

    if not fits(weight, split_k):
        return
    # With 3 CTAs each computes many tiles, and its barriers go through many phases between them.
    targets = (target, replace(target, num_sms=3))
    for size, splits, gpu in product(STAGES, (True, False), targets):
        hopper_tile = HopperTile(*size, splits)
        if hopper_tile.tokens == CTA_ROWS and not shares_scale(weight, hopper_tile.outputs):
            continue
        parts = (split_k,) if splits and split_k > 1 else ()
        y = torch.empty(*parts, 300, 520, dtype=torch.float32 if parts else x.dtype, device="cuda")
        launch_hopper(x, weight, split_k, hopper_tile, gpu, y)
        assert same_bits(reduce_partials(y, x.dtype) if parts else y, expected), (hopper_tile, gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("block_k", [128, 17408])
def test_long_sums_on_a_gpu_are_near_the_exact_ones(block_k: int) -> None:
    """A chain over all columns in an accumulator of 14 bits would be off by more than 2^-9."""
    weight = place(random_weight(256, 17408, 1, block_k), "cuda")
    x = torch.rand(64, 17408, generator=torch.Generator().manual_seed(10)).bfloat16()
    y = fp8_linear.backends["triton"].run(x.cuda(), weight, 4, allow_partials=True).sum(0).cpu()
    exact = fp8_linear(x.float(), random_weight(256, 17408, 1, block_k), 4)
    assert (y - exact).norm() < 2**-11 * exact.norm()
