"""Quantized weights: their word order, their values, and linear(quantized) equal to
linear(dequantized)."""

from dataclasses import replace

import pytest
import torch

from lockstep.kernels.formats.weights import (
    Fp4Weight,
    Fp8Weight,
    GgufWeight,
    IntWeight,
    dequantize_weight,
    pack_codes,
    quantize_fp8,
    quantize_int,
    unpack_codes,
    words_per_row,
)
from lockstep.kernels.formats.weights.cases import random_weights
from lockstep.kernels.formats.weights.fp4 import FP4_VALUES
from lockstep.kernels.formats.weights.fp8 import e4m3_values
from lockstep.kernels.linear import choose_split_k, linear
from tests.kernels.backends import Backend, backends, same_bits
from tests.kernels.test_linear import graded

TRITON = [backend for backend in backends() if backend.values[0].name == "triton"]
NAMES = [name for name, _ in random_weights(8, 128)]
EVERY_M = (1, 2, 7, 16, 64, 200)
MANY = 2048
"""Tokens of a long prompt, on a GPU."""
ODD = ((33, 200, 1), (40, 512, 2), (24, 1152, 2))
"""(outputs, inputs, split_k): no multiples of a tile, of a block of columns or of a group; and 9
blocks in two splits."""


def random_codes(shape, high, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("k", [1, 16, 40, 128, 200, 1000])
def test_pack_codes_round_trip(bits, k):
    codes = random_codes((5, k), 2**bits)
    words = pack_codes(codes, bits)
    assert words.shape == (5, words_per_row(k, bits)) and words.dtype == torch.int32
    assert torch.equal(unpack_codes(words, bits, k), codes)
    padding = unpack_codes(words, bits, words.shape[1] * 32 // bits)[:, k:]
    assert not padding.any()


def test_word_order_of_codes():
    """A lane's four columns of 16 are in one word, two of them under one mask."""
    for bits, spans in ((4, 4), (8, 8)):
        for k in range(128):
            row = torch.zeros(1, 128, dtype=torch.uint8)
            row[0, k] = 1
            words = pack_codes(row, bits)[0]
            (at,) = words.nonzero().flatten().tolist()
            bit = (int(words[at]) & 0xFFFFFFFF).bit_length() - 1
            span, inside = divmod(k, 128 // spans)
            half, column = divmod(inside, 16)
            assert at == spans * (column // 2 % 4) + span
            assert bit == 16 * (column % 2) + bits * (2 * half + column // 8)


def test_int_weight_values():
    """Asymmetric, with a partial last group, by group and by g_idx."""
    codes = random_codes((3, 10), 16)
    scales = torch.tensor([[0.5, 2.0, 0.25]] * 3, dtype=torch.float16)
    zeros = torch.tensor([[8, 1, 15], [0, 7, 3], [4, 4, 4]], dtype=torch.uint8)
    for g_idx in (None, torch.tensor([2, 0, 1, 1, 2, 0, 0, 1, 2, 2], dtype=torch.int32)):
        weight = IntWeight.of(codes, scales, zeros, g_idx, group=4)
        groups = [k // 4 for k in range(10)] if g_idx is None else g_idx.tolist()
        got = weight.dequantize(torch.float32)
        for n in range(3):
            for k, g in enumerate(groups):
                number = int(codes[n, k]) - int(zeros[n, g])
                assert got[n, k] == number * float(scales[n, g])
    plain = IntWeight.of(codes, scales[:, :1], group=-1)
    assert plain.group == 10
    assert torch.equal(plain.dequantize(torch.float32), (codes.float() - 8) * 0.5)


def test_fp8_weight_values():
    """Partial blocks; rows sliced inside a block; row scales of the same blocks."""
    codes = random_codes((300, 200), 126)
    scales = torch.rand(3, 2)
    weight = Fp8Weight.of(codes, scales, 128, 128)
    full = weight.dequantize(torch.float32)
    for n, k in ((0, 0), (127, 128), (128, 127), (299, 199)):
        assert full[n, k] == e4m3_values(codes)[n, k] * scales[n // 128, k // 128]
    part = weight.rows(100, 290).rows(50, 190)
    assert torch.equal(part.dequantize(torch.float32), full[150:290])
    assert torch.equal(part.with_row_scales().dequantize(torch.float32), full[150:290])


def test_fp4_weight_values():
    """NVFP4 in compressed-tensors' byte order, low nibble first, with the factor as a
    multiplier."""
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0xA9, 0xCB, 0xED, 0x0F]], dtype=torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    scales = torch.tensor([[1.5]]).to(torch.float8_e4m3fn)
    weight = Fp4Weight.of(codes, scales, torch.tensor([2.0]))
    want = [*FP4_VALUES, -0.5, -1, -1.5, -2, -3, -4, -6, 0]
    assert (weight.dequantize(torch.float32)[0] / 3).tolist() == want


@pytest.mark.parametrize("name", NAMES)
def test_weight_slices_bytes_and_dummy_scale(name):
    weight = dict(random_weights(96, 400))[name]
    full = weight.dequantize(torch.bfloat16)
    assert torch.equal(weight.rows(13, 90).dequantize(torch.bfloat16), full[13:90])
    assert weight.rows(13, 90).words.data_ptr() == weight.words[13].data_ptr()
    assert weight.nbytes == sum(tensor.nbytes for tensor in weight.tensors().values())
    assert 0.5 < float(full.float().std()) * 400**0.5 < 0.9
    other = dict(random_weights(96, 400, seed=1))[name]
    assert not torch.equal(other.dequantize(torch.bfloat16), full)
    other.copy_(weight)
    assert torch.equal(other.dequantize(torch.bfloat16), full)
    with pytest.raises(ValueError, match="words has shape .*expected"):
        other.rows(0, 7).copy_(weight)


def test_quantizers_round_to_nearest():
    weight = torch.randn(40, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    for packed, error in (
        (quantize_int(weight), 0.13),
        (quantize_int(weight, bits=8, group=-1), 0.01),
        (quantize_fp8(weight), 0.03),
    ):
        got = packed.dequantize(torch.float32)
        assert float((got - weight.float()).norm() / weight.float().norm()) < error
    step = quantize_int(weight, bits=8, group=-1)
    worst = (step.dequantize(torch.float32) - weight.float()).abs() / step.scales.float()
    assert float(worst.max()) < 0.6  # half a step, and what the scale's rounding moves the largest
    zero = quantize_int(torch.zeros(2, 130)).dequantize(torch.float32)
    assert not zero.any()


def test_quantize_fp8_of_subnormal_rows():
    random_codes = torch.rand(4, 128, generator=torch.Generator().manual_seed(0)) * 2 - 1
    weight = (random_codes * 1e-36 * 0.1 ** torch.arange(4)[:, None]).bfloat16()
    error = (quantize_fp8(weight).dequantize(torch.float32) - weight.float()).abs().amax(1)
    assert bool((error <= weight.float().abs().amax(1) / 16).all())


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_use_the_stored_subnormal_scale(bits):
    """fp16 rows below 127 * 2^-14 = 0.0078 have a subnormal scale with 8 bits."""
    maximum = 2 ** (bits - 1) - 1
    random_codes = torch.rand(5, 128, generator=torch.Generator().manual_seed(0)) * 2 - 1
    weight = (random_codes * maximum * 2.0**-14 * 0.25 ** torch.arange(5)[:, None]).half()
    packed = quantize_int(weight, bits, -1)
    scales = packed.scales.float()
    assert bool(((0 < scales) & (scales < torch.finfo(torch.float16).tiny)).all())
    steps = (packed.dequantize(torch.float32) - weight.float()).abs() / scales
    inside = weight.float().abs() <= scales * maximum
    assert float(steps[inside].max()) <= 0.5


def test_exact_scale_products():
    """For every 16-bit scale, (code - zero) * scale is exact in fp32, and an fp16 scale is the sum
    of two bf16 numbers, the second with exact bf16 products."""
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        scales = words.view(dtype)
        scales = scales[scales.isfinite()]
        for number in range(-15, 16):
            product = scales.double() * number
            inside = product.abs() <= torch.finfo(torch.float32).max
            assert torch.equal((scales.float() * number).double()[inside], product[inside])
        if dtype == torch.float16:
            high = scales.float().bfloat16()
            rest = (scales.float() - high.float()).bfloat16()
            assert torch.equal(high.double() + rest.double(), scales.double())
            for number in range(-15, 16):
                exact = rest.double() * number
                assert torch.equal(exact.bfloat16().double(), exact)


def exact_weight(name, n, k, seed=0):
    """Return a weight of this layout with values that are small powers of two times small integers.

    An interpreter's dot has no fixed order, so sums must be exact.
    """
    weight = dict(random_weights(n, k, seed))[name]
    generator = torch.Generator().manual_seed(seed)
    if isinstance(weight, Fp8Weight):
        numbers = torch.randint(-8, 9, (n, k), generator=generator).float()
        weight.words.copy_(pack_codes(numbers.to(torch.float8_e4m3fn).view(torch.uint8), 8))
        scales = weight.scales
    elif isinstance(weight, Fp4Weight):
        weight.scales.copy_(0x38 + 8 * random_codes(weight.scales.shape, 2))  # 1 and 2
        scales = weight.factors
    elif isinstance(weight, GgufWeight) and weight.bases is not None:
        scales = weight.bases
        weight.scales.random_(-3, 4, generator=generator)
    else:
        scales = weight.scales
    if isinstance(weight, GgufWeight) and weight.minima is not None:
        weight.minima.copy_(torch.randint(0, 4, weight.minima.shape, generator=generator))
    if isinstance(weight, GgufWeight) and weight.min_bases is not None:
        weight.min_bases.fill_(0.5)
    scales.copy_(torch.exp2(-torch.randint(1, 4, scales.shape, generator=generator).float()))
    return weight


def assert_equals_dequantized(backend, name, tokens, n, k, count, out=False):
    weight = exact_weight(name, n, k)
    x = graded(tokens, k, count, 3).to(backend.dtype)
    defined = linear(x, weight, count)
    weight = backend.place(weight)
    x = backend.place(x)
    dense = torch.empty(n, k, dtype=x.dtype, device=x.device)
    dequantize_weight.backends["triton"].run(weight, dense)
    assert same_bits(dense, weight.dequantize(x.dtype)), name
    want = linear.backends["triton"].run(x, dense, count)
    got = linear.backends["quantized"].run(x, weight, count)
    assert same_bits(got, want), (name, tokens)
    assert same_bits(got, defined), (name, tokens)
    if out:
        wider = torch.zeros(tokens, n + 16, dtype=x.dtype, device=x.device)
        for chosen, operand in (("quantized", weight), ("triton", dense)):
            wider.zero_()
            run = linear.backends[chosen].run
            result = run(x, operand, count, True, wider[:, 8 : n + 8])
            assert result.data_ptr() == wider[:, 8:].data_ptr()
            assert same_bits(wider[:, 8 : n + 8], want)
            assert not wider[:, :8].any() and not wider[:, n + 8 :].any()


@pytest.mark.covering(strength=1)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("backend", TRITON)
@pytest.mark.parametrize("name", NAMES)
def test_quantized_linear_equals_dequantized(backend, name, first):
    """Quantized, dequantized and reference products have the same bits for every number of
    tokens. first: the first of every third number."""
    if backend.interpreted:
        backend = replace(backend, dtype=torch.float16)
    numbers = (*EVERY_M, MANY) if backend.on_gpu else EVERY_M
    for i, tokens in list(enumerate(numbers))[first::3]:
        for n, k, count in ODD if backend.on_gpu else ODD[i % len(ODD) :][:1]:
            assert_equals_dequantized(
                backend, name, tokens, n, k, count, out=tokens == 7 and name == "int4"
            )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", TRITON)
@pytest.mark.parametrize("tokens", EVERY_M)
def test_splits_are_added_as_a_tree(backend, tokens):
    """0.5 + (B - B): a single chain over K would lose the half. Integers hide the order if a 16-bit
    result is rounded."""
    backend = replace(backend, dtype=torch.float16)
    weight = IntWeight.of(torch.full((33, 1024), 12, dtype=torch.uint8), torch.ones(33, 8))
    row = torch.zeros(1024)
    row[3] = 0.125
    row[512:768] = 2.0**15
    row[768:] = -(2.0**15)
    x = row.expand(tokens, 1024).to(backend.dtype).contiguous()
    for count, expected in ((1, 0.0), (2, 0.5)):
        got = linear.backends["quantized"].run(backend.place(x), backend.place(weight), count)
        assert got.unique().tolist() == [expected], count


@pytest.mark.default_cases("int4", "int4 desc_act", "fp8 by blocks", "nvfp4", "Q4_K", "MXFP4")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", TRITON)
@pytest.mark.parametrize("name", NAMES)
def test_row_slice_inside_a_scale_block(backend, name):
    """A slice of a fused weight uses the scales of its rows in the kernels."""
    backend = replace(backend, dtype=torch.float16)
    full = exact_weight(name, 300, 200)
    x = graded(2, 200, 1, 3).to(backend.dtype)
    defined = linear(x, full)
    for begin, end in ((100, 133), (250, 290)):
        part = backend.place(full).rows(begin, end)
        dense = torch.empty(end - begin, 200, dtype=x.dtype, device=part.device)
        dequantize_weight.backends["triton"].run(part, dense)
        assert same_bits(dense, full.dequantize(x.dtype)[begin:end])
        got = linear.backends["quantized"].run(backend.place(x), part)
        assert same_bits(got, defined[:, begin:end])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_quantized_linear_equals_dequantized_at_real_sizes(name, dtype):
    """Random numbers, every number of tokens, against the dense backend on the dequantized
    weight."""
    for n, k in ((5120, 6144), (1024, 5120), (1000, 2000)):
        weight = Backend("quantized", "cuda", dtype).place(dict(random_weights(n, k))[name])
        dense = torch.empty(n, k, dtype=dtype, device="cuda")
        dequantize_weight.backends["triton"].run(weight, dense)
        assert same_bits(dense, weight.dequantize(dtype))
        count = choose_split_k(n, k, "cuda")
        for tokens in (*EVERY_M, MANY):
            x = torch.randn(tokens, k, dtype=dtype, device="cuda")
            want = linear.backends["triton"].run(x, dense, count)
            got = linear.backends["quantized"].run(x, weight, count)
            assert same_bits(got, want), (name, n, k, tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_identity_product_equals_dequantized(name, dtype):
    """Rows of the identity extract a weight's columns one by one, so no sum hides a wrong bit."""
    weight = Backend("quantized", "cuda", dtype).place(dict(random_weights(300, 256))[name])
    eye = torch.eye(256, dtype=dtype, device="cuda")
    for part in eye.split(64):
        got = linear.backends["quantized"].run(part.contiguous(), weight)
        want = weight.dequantize(dtype).t()[part.argmax(1)]
        assert same_bits(got, want)
