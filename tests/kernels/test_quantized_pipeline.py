"""The pipeline kernels' dequantization assembly, run on the CPU for every code and every kind of
scale."""

from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import frexp
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.kernels.architecture import HOPPER
from lockstep.kernels.compile_target import CompileTarget
from lockstep.kernels.formats.weights import FMA_SCALE_BOUND, Fp4Weight, GgufWeight, IntWeight
from lockstep.kernels.formats.weights.cases import random_weights
from lockstep.kernels.formats.weights.operand import (
    FMA_INT4,
    INT4_DECODERS,
    choose_fma_decoder,
    quantized_operand,
)
from lockstep.kernels.linear import quantized_ptx as texts
from lockstep.kernels.linear.quantized_tuning import (
    QuantizedTile,
    candidates,
    compiler_tile,
    fit_tile,
    pipeline_supports,
)
from tests.kernels import ptx
from tests.kernels.backends import Backend, same_bits

PAIRED_INT4 = INT4_DECODERS[torch.bfloat16, torch.bfloat16]
KINDS = {torch.bfloat16: "BF16", torch.float16: "FP16"}


def assembly_of(name: str, dtype: torch.dtype) -> str:
    """Return the assembly of a layout for weights of this dtype."""
    return str(getattr(texts, f"{name}_{KINDS[dtype]}").value)


def run(assembly: str, results: int, arguments: list[Any]) -> list[Tensor]:
    """Return the output words of assembly."""
    thread = ptx.Thread([np.ascontiguousarray(part) for part in arguments], results)
    for line in assembly.strip().strip("{}").split(";"):
        if line.strip():
            thread.run(" ".join(line.split()))
    actual = [thread.registers[f"${i}"].view(np.int32) for i in range(results)]
    return [torch.from_numpy(words.copy()) for words in actual]


def pairs(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the two 16-bit numbers of each word, in the last dimension."""
    return words[:, None].contiguous().view(dtype)


def doubled(numbers: Tensor) -> Any:
    """Return words that hold each 16-bit number twice."""
    words = numbers[:, None].repeat(1, 2).contiguous().view(torch.int32)
    return words[:, 0].numpy().view(np.uint32)


def scales(dtype: torch.dtype, count: int) -> Tensor:
    """Return 16-bit scales: random ones of either sign, subnormal ones, extremes, zeros, infinities
    and NaN."""
    bits = torch.randint(-(2**15), 2**15, (count,), generator=torch.Generator().manual_seed(0))
    result = bits.to(torch.int16).view(dtype)
    ends = torch.finfo(dtype)
    fixed = [0.0, -0.0, 1.0, ends.max, ends.min, ends.tiny, ends.smallest_normal / 2]
    fixed += [float("inf"), float("-inf"), float("nan")]
    return torch.cat([result, torch.tensor(fixed, dtype=dtype)])


def equal_numbers(result: Tensor, want: Tensor) -> bool:
    """Return True if numbers are equal, NaN included; the sign of a zero does not matter, since a
    sum that begins at 0 loses it."""
    return bool(((result == want) | (result.isnan() & want.isnan())).all())


def all_codes(bits: int, zeros: int, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, zeros, scales) of all combinations, flattened."""
    grid = torch.meshgrid(
        torch.arange(1 << bits), torch.arange(zeros), torch.arange(len(scale)), indexing="ij"
    )
    code, zero, index = (part.flatten() for part in grid)
    return code, zero, scale[index]


def words_with_code(code: Tensor, bit: int, other: int) -> Any:
    """Return words with a code at a bit position, and `other` in all other bits."""
    mask = 15 << bit
    return ((other & ~mask & 0xFFFFFFFF) | (code << bit)).numpy().astype(np.uint32)


INT4 = [
    ("INT4", torch.bfloat16, torch.bfloat16),
    ("INT4", torch.float16, torch.float16),
    ("SPLIT_SCALE", torch.float16, torch.bfloat16),
    ("GENERIC_INT4", torch.float32, torch.bfloat16),
    ("GENERIC_INT4", torch.bfloat16, torch.float16),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "scale_dtype", "dtype"), INT4)
def test_int4_dequantization_of_every_code_zero_and_scale(
    name: str, scale_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """16 codes x 17 zeros x scales, at each of the eight positions of both words."""
    some = scales(torch.bfloat16 if scale_dtype == torch.float32 else scale_dtype, 100)
    if scale_dtype == torch.float32:
        some = some.float() * torch.linspace(1, 1.5, len(some))
    code, zero, scale = all_codes(4, 17, some)
    want = ((code - zero).float() * scale.float()).to(dtype)
    assembly = assembly_of(name, dtype)
    wide = name == "GENERIC_INT4"
    first = scale.float().numpy() if wide else doubled(scale.to(dtype))
    minimum = 8388608.0 if wide else 128.0 if dtype == torch.bfloat16 else 1024.0
    second = (minimum + zero).float().numpy() if wide else doubled((-minimum - zero).to(dtype))
    arguments = [first, first, second, second]
    if name == "SPLIT_SCALE":
        actual = run(
            str(texts.SPLIT_SCALE.value), 2, [scale.view(torch.int16).numpy().view(np.uint16)]
        )
        offset = doubled((zero / -64).to(dtype))
        arguments = [part for part in (actual[0].numpy().view(np.uint32), offset) for _ in range(2)]
        arguments += [actual[1].numpy().view(np.uint32)] * 2
    for word, pair, half in product(range(2), range(4), range(2)):
        words = [np.full(len(code), 0x5A3C9600, np.uint32)] * 2
        words[word] = words_with_code(code, 4 * pair + 16 * half, 0x5A3C9600)
        got = run(assembly, 8, [*words, *arguments])[4 * word + pair]
        assert equal_numbers(pairs(got, dtype)[:, half], want), (word, pair, half)


LARGEST_SCALE = FMA_SCALE_BOUND * (1 - 2.0**-8)
"""Largest bf16 number below the bound."""


def fma_scales() -> Tensor:
    """Return all bf16 numbers whose magnitude is below the bound: 0 and -0, subnormal ones too."""
    numbers = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    return numbers[numbers.abs() < FMA_SCALE_BOUND]


def fma_operands(scale: Tensor) -> list[Any]:
    """Return the operands that the pipeline kernel prepares, in the order of the assembly."""
    bits = scale.view(torch.int16).numpy().view(np.uint16)
    ready = run(str(texts.FMA_SCALES.value), 2, [bits])
    return [part.numpy().view(np.uint32) for part in ready]


def run_fma_decoder(words: list[Any], scale: Tensor) -> list[Tensor]:
    """Return the eight pairs of two words with these scales."""
    operands = [part for part in fma_operands(scale) for _ in range(2)]
    return run(str(texts.FMA_INT4_BF16.value), 8, [*words, *operands])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fma_operands_are_exact_below_the_bound() -> None:
    """-8 and 2^129 times every scale below the bound. At the bound the last one is infinite."""
    scale = fma_scales()
    assert float(scale.abs().max()) == LARGEST_SCALE
    for factor, words in zip((-8.0, 2.0**129), fma_operands(scale), strict=True):
        got = pairs(torch.from_numpy(words.view(np.int32)), torch.bfloat16).double()
        assert torch.equal(got, scale.double()[:, None].expand(-1, 2) * factor)
    above = fma_operands(torch.tensor([FMA_SCALE_BOUND], dtype=torch.bfloat16))[1]
    assert pairs(torch.from_numpy(above.view(np.int32)), torch.bfloat16).isinf().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fma_dequantization_of_every_code_and_scale() -> None:
    """16 codes x all scales below the bound, with the same code at all positions of both words."""
    code, _, scale = all_codes(4, 1, fma_scales())
    want = ((code - 8).float() * scale.float()).bfloat16()
    word = (code * 0x11111111).numpy().astype(np.uint32)
    for words in run_fma_decoder([word, word], scale):
        for got in pairs(words, torch.bfloat16).unbind(1):
            assert torch.equal(got, want), "torch.equal ignores the signs of zeros"
            assert not got[got == 0].signbit().any(), "the docstring says that zeros are positive"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fma_dequantization_at_every_position() -> None:
    """16 codes x some scales, at each of the eight positions of both words, among other bits."""
    fixed = [0.0, -0.0, LARGEST_SCALE, -LARGEST_SCALE, 2.0**-133, -(2.0**-130), 0.01]
    some = torch.cat([fma_scales()[::997], torch.tensor(fixed, dtype=torch.bfloat16)])
    code, _, scale = all_codes(4, 1, some)
    want = ((code - 8).float() * scale.float()).bfloat16()
    for word, pair, half in product(range(2), range(4), range(2)):
        words = [np.full(len(code), 0x5A3C9600, np.uint32)] * 2
        words[word] = words_with_code(code, 4 * pair + 16 * half, 0x5A3C9600)
        got = run_fma_decoder(words, scale)[4 * word + pair]
        assert equal_numbers(pairs(got, torch.bfloat16)[:, half], want), (word, pair, half)


def nearest_bf16(number: Fraction) -> Fraction:
    """Round to 8 significant bits, ties to even; for results that are not subnormal."""
    exponent = frexp(number)[1]
    unit = Fraction(2) ** (exponent - 8)
    return round(number / unit) * unit


def test_fma_rounds_exact_sums_once() -> None:
    """Results on the CPU against fractions: (code - 8) * scale has more bits than bf16."""
    scale = fma_scales()[::131]
    code, _, scale = all_codes(4, 1, scale[scale.abs() > 2.0**-100])
    word = (code * 0x11111111).numpy().astype(np.uint32)
    got = pairs(run_fma_decoder([word, word], scale)[0], torch.bfloat16)[:, 0]
    for c, s, value in zip(
        code.tolist(), scale.double().tolist(), got.double().tolist(), strict=True
    ):
        assert Fraction(value) == nearest_bf16((c - 8) * Fraction(s))


@pytest.mark.parametrize(
    ("scale", "decoder"),
    [
        (0.01, FMA_INT4),
        (0.0, FMA_INT4),
        (LARGEST_SCALE, FMA_INT4),
        (-LARGEST_SCALE, FMA_INT4),
        (FMA_SCALE_BOUND, PAIRED_INT4),
        (-3e38, PAIRED_INT4),
        (float("inf"), PAIRED_INT4),
        (float("nan"), PAIRED_INT4),
    ],
)
def test_largest_scale_chooses_the_decoder(scale: float, decoder: int) -> None:
    """One scale of a whole weight decides, also for launches of other rows."""
    weight = IntWeight.empty(4, 256)
    weight.scales.fill_(0.001)
    weight.scales[3, 1] = scale
    target = CompileTarget(HOPPER, inline_ptx=True)
    for part in (weight, weight.rows(0, 2), weight.rows(1, 4).rows(0, 1)):
        (_, form) = quantized_operand(part, torch.bfloat16, 0, target)
        assert form.decoder == PAIRED_INT4
        assert choose_fma_decoder(form, part, torch.bfloat16) == form._replace(decoder=decoder)
    assert weight.gather(torch.tensor([0])).max_scale == float(torch.tensor(0.001).bfloat16())


def test_other_layouts_keep_their_decoder() -> None:
    """Zero points, 8 bits, other dtypes of scales or of the model, and no inline PTX."""
    half = torch.float16
    ptx_target = CompileTarget(HOPPER, inline_ptx=True)
    for weight, dtype, target in (
        (IntWeight.empty(4, 256, zeros=True), torch.bfloat16, ptx_target),
        (IntWeight.empty(4, 256, bits=8), torch.bfloat16, ptx_target),
        (IntWeight.empty(4, 256, scale_dtype=half), torch.bfloat16, ptx_target),
        (IntWeight.empty(4, 256, scale_dtype=torch.float32), torch.bfloat16, ptx_target),
        (IntWeight.empty(4, 256), half, ptx_target),
        (IntWeight.empty(4, 256, scale_dtype=half), half, ptx_target),
        (IntWeight.empty(4, 256), torch.bfloat16, CompileTarget(HOPPER, inline_ptx=False)),
        (Fp4Weight.empty(4, 256), torch.bfloat16, ptx_target),
    ):
        weight.fill_dummy(torch.Generator().manual_seed(0))
        (_, form) = quantized_operand(weight, dtype, 0, target)
        assert choose_fma_decoder(form, weight, dtype) == form
    weight = IntWeight.empty(4, 256, zeros=True)
    weight.finalize()
    assert "max_scale" not in vars(weight), "no launch asks for it"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", list(KINDS))
@pytest.mark.parametrize("name", ["FP8", "INT8"])
def test_8_bit_dequantization_of_every_code_and_scale(name: str, dtype: torch.dtype) -> None:
    """256 codes x scales, at each of the four positions of both words."""
    some = scales(torch.bfloat16, 200).float() * torch.linspace(1, 1.5, 210)
    code, zero, scale = all_codes(8, 1 if name == "FP8" else 3, some)
    zero = zero * 100
    if name == "FP8":
        values = code.to(torch.uint8).view(torch.float8_e4m3fn).float()
    else:
        values = (code - zero).float()
    want = (values * scale).to(dtype)
    arguments = [scale.numpy(), scale.numpy()]
    if name == "INT8":
        arguments += [(8388608.0 + zero).float().numpy()] * 2
    for word, byte in product(range(2), range(4)):
        words = [np.zeros(len(code), np.uint32)] * 2
        words[word] = (code << (8 * byte)).numpy().astype(np.uint32)
        got = run(assembly_of(name, dtype), 4, [*words, *arguments])[2 * word + byte % 2]
        assert equal_numbers(pairs(got, dtype)[:, byte // 2], want), (word, byte)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", list(KINDS))
def test_nvfp4_dequantization_of_every_code_and_scale(dtype: torch.dtype) -> None:
    """16 codes x 256 scales x factors, at each of the eight positions of both words."""
    from lockstep.kernels.formats.weights.fp4 import FP4_VALUES

    factors = torch.tensor([1.0, 0.0123, -3.7e-5, 5.1e4, 1e-30])
    code, scale, factor = all_codes(4, 256, factors)
    wide = scale.to(torch.uint8).view(torch.float8_e4m3fn).float()
    values = torch.cat([torch.tensor(FP4_VALUES), -torch.tensor(FP4_VALUES)])
    want = ((values[code] * wide) * factor).to(dtype)
    rest = run(str(texts.E4M3_TO_FP16.value), 2, [(scale * 0x01010101).numpy().astype(np.uint32)])
    prepared = [part.numpy().view(np.uint32) for part in rest for _ in range(2)]
    arguments = [*prepared, (factor * 64).numpy(), (factor * 64).numpy()]
    for word, pair, half in product(range(2), range(4), range(2)):
        words = [np.zeros(len(code), np.uint32)] * 2
        words[word] = words_with_code(code, 4 * pair + 16 * half, 0)
        got = run(assembly_of("FP4", dtype), 8, [*words, *arguments])[4 * word + pair]
        assert equal_numbers(pairs(got, dtype)[:, half], want), (word, pair, half)


def split_factors(factors: Tensor) -> tuple[Any, Any]:
    """Return 2^119 times fp32 factors as two bf16 parts, found as the pipeline kernel does."""
    wide = factors * 2.0**119
    hi = wide.bfloat16()
    lo = (wide - hi.float()).bfloat16()
    result = doubled(lo)
    served = np.zeros(len(factors), bool)
    for steps in (0, 1, -1, 2, -2):
        tried = doubled((lo.view(torch.int16) + steps).view(torch.bfloat16))
        wrong = (
            run(str(texts.FACTOR_MISMATCH.value), 1, [wide.numpy(), doubled(hi), tried])[0].numpy()
            != 0
        )
        result = np.where(served | wrong, result, tried)
        served |= ~wrong
    assert served.all()
    return doubled(hi), result


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nvfp4_dequantization_with_split_factors() -> None:
    """16 codes x 127 scales x factors, at each of the eight positions: the fp32 product rounded to
    bf16. Some factors need parts other than the nearest."""
    from lockstep.kernels.formats.weights.fp4 import FP4_VALUES

    some = torch.rand(25, generator=torch.Generator().manual_seed(1)) + 1e-3
    nudged = torch.tensor([0x3F80A000, 0x3F81AA55]).int().view(torch.float32)
    factors = torch.cat([torch.tensor([0.0, 1.0, -3.7e-5, 63.9, 2.0**-80]), nudged, some])
    code, scale, index = all_codes(4, 127, torch.arange(len(factors)))
    values = torch.cat([torch.tensor(FP4_VALUES), -torch.tensor(FP4_VALUES)])
    wide = scale.to(torch.uint8).view(torch.float8_e4m3fn).float()
    want = ((values[code] * wide) * factors[index]).bfloat16()
    (hi, lo) = split_factors(factors)
    for word, pair in product(range(2), range(4)):
        both = (scale << 8 * (2 * word + pair // 2)).numpy().astype(np.uint32)
        ready = [
            part.numpy().view(np.uint32)
            for part in run(str(texts.E4M3_TO_BF16_BY_PARITY.value), 2, [both])
        ]
        arguments = [part for part in (*ready, hi[index], lo[index]) for _ in range(2)]
        for half in range(2):
            words = [np.zeros(len(code), np.uint32)] * 2
            words[word] = words_with_code(code, 4 * pair + 16 * half, 0x5A3C9600)
            got = run(str(texts.SPLIT_FACTOR_FP4_BF16.value), 8, [*words, *arguments])[
                4 * word + pair
            ]
            assert equal_numbers(pairs(got, torch.bfloat16)[:, half], want), (word, pair, half)


@pytest.mark.parametrize(
    ("factor", "scale", "served"),
    [
        (1e-4, 0x38, True),
        (0.0, 0x38, True),
        (1e-30, 0x38, False),
        (100.0, 0x38, False),
        (1.7083332538604736, 0x38, False),
        (1e-4, 0x7F, False),
        (1e-4, 0xB8, False),
    ],
)
def test_has_split_factors(factor: float, scale: int, served: bool) -> None:
    weight = Fp4Weight.empty(4, 128)
    weight.factors.fill_(1e-3)
    weight.scales.fill_(0x30)
    weight.factors[2] = factor
    weight.scales[3, 5] = scale
    assert weight.has_split_factors == served
    assert weight.rows(0, 2).has_split_factors == served, "rows are read as the whole weight is"


TILE = QuantizedTile(8, 64, 128, 4, 6, 1, 48, pipeline=True, mma_sync=True)


def test_unsupported_weights_use_compiler_tile() -> None:
    """On other GPUs, if K is not in whole blocks in every split, and if a block has several
    scales."""
    full = IntWeight.empty(64, 1024, device="meta")
    assert pipeline_supports(full, 2, HOPPER)
    assert fit_tile(TILE, full, 2, HOPPER).ctas_k == 2
    assert pipeline_supports(IntWeight.empty(64, 1152, device="meta"), 2, HOPPER)
    for weight, split_k, arch in (
        (full, 1, 80),
        (full, 1, 100),
        (IntWeight.empty(64, 1000, device="meta"), 1, HOPPER),
        (IntWeight.empty(64, 1152, device="meta"), 4, HOPPER),
        (Fp4Weight.empty(64, 1000, device="meta"), 1, HOPPER),
    ):
        assert not pipeline_supports(weight, split_k, arch)
        other = fit_tile(TILE, weight, split_k, arch)
        assert other == compiler_tile(TILE, weight, split_k, arch)
        assert other.laid_out


def test_gemv_replaces_pipeline_for_few_tokens() -> None:
    """If a block has several scales, for up to eight tokens."""
    wide = replace(TILE, m=16)
    for weight in (
        IntWeight.empty(64, 1024, group=32, device="meta"),
        GgufWeight.empty(64, 1024, "Q4_K", device="meta"),
        GgufWeight.empty(64, 1024, "Q6_K", device="meta"),
        GgufWeight.empty(64, 1024, "Q2_K", device="meta"),
    ):
        assert not pipeline_supports(weight, 2, HOPPER)
        few = fit_tile(TILE, weight, 2, HOPPER)
        assert few.gemv and (few.m, few.ctas_k) == (8, 2)
        assert fit_tile(wide, weight, 2, HOPPER) == compiler_tile(wide, weight, 2, HOPPER)


def test_stage_width_divides_the_split() -> None:
    """Two blocks per stage if they divide a split, otherwise twice as many stages of one block."""
    wide = QuantizedTile(8, 64, 256, 4, 3, 2, 48, pipeline=True, mma_sync=True)
    assert fit_tile(wide, IntWeight.empty(64, 1024, device="meta"), 2, HOPPER) == wide
    for k in (768, 1152, 1280):
        narrow = fit_tile(wide, IntWeight.empty(64, k, device="meta"), 2, HOPPER)
        assert (narrow.k, narrow.stages) == (128, 6)


def test_stream_k_ctas_are_limited_by_tiles() -> None:
    """At most as many CTAs per multiprocessor as there are tiles for; one is too few."""
    shared = QuantizedTile(8, 64, 128, 4, 6, 1, 48, pipeline=True, mma_sync=True, stream_k=5)
    for n, split_k, share in ((34816, 1, 4), (5120, 4, 2), (12800, 1, 0), (1000000, 1, 5)):
        weight = IntWeight.empty(n, 1024, device="meta")
        assert fit_tile(shared, weight, split_k, HOPPER).stream_k == share


SERVED = ("int4", "int4 asymmetric", "int8", "fp8 by blocks", "fp8 by outputs", "fp8", "nvfp4")
SIZES = ((5120, 6144, 4), (1000, 2048, 1), (33, 128, 1), (40, 1280, 2), (3712, 2688, 4))
"""(outputs, inputs, split_k): real sizes; ends within a tile; one block; five blocks; splits of 6,
6, 6 and 3 blocks."""
TOKENS = (1, 7, 8, 16, 31, 64, 65, 128, 200, 300)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(KINDS))
@pytest.mark.parametrize("name", SERVED)
def test_pipeline_tiles_equal_dequantized(name: str, dtype: torch.dtype) -> None:
    """Random numbers and every candidate, against the dequantized weight."""
    from lockstep.kernels.linear.quantized import expected_output, run_tile

    backend: Any = Backend("quantized", "cuda", dtype)
    for n, k, split_k in SIZES:
        weight = backend.place(dict(random_weights(n, k))[name])
        for tokens in TOKENS:
            x = torch.randn(tokens, k, dtype=dtype, device="cuda")
            want = expected_output(split_k, x, weight)
            tiles = {
                fit_tile(tile, weight, split_k, HOPPER)
                for tile in candidates(tokens, split_k, weight.bits)
                if tile.pipeline
            }
            for tile in tiles:
                assert tile.pipeline
                got = run_tile(split_k, False, x, weight, tile)
                assert same_bits(got, want), (n, k, tokens, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("name", SERVED)
def test_weight_slices_and_strided_rows(name: str, sync: bool) -> None:
    """Rows of a weight sliced within a block of scales; x and out are columns of wider tensors; a
    row of x with NaN leaves other rows unchanged."""
    from lockstep.kernels.linear.quantized import compile_target, expected_output, launch

    backend: Any = Backend("quantized", "cuda", torch.bfloat16)
    part = backend.place(dict(random_weights(300, 512))[name]).rows(101, 264)
    tile = QuantizedTile(8, 64, 128, 4, 3, 2, 64, pipeline=True, mma_sync=sync)
    wide = torch.randn(8, 520, dtype=torch.bfloat16, device="cuda")
    for first in (0, 1, 8):
        x = wide[:, first : first + 512]
        want = expected_output(2, x.contiguous(), part)
        out = torch.zeros(8, 200, dtype=x.dtype, device="cuda")
        launch(x, part, 2, tile, compile_target(x.device), out=out[:, 8:171])
        assert same_bits(out[:, 8:171].contiguous(), want)
        assert not out[:, :8].any() and not out[:, 171:].any()
    spoilt = wide[:, :512].clone()
    spoilt[3] = float("nan")
    want = expected_output(1, wide[:, :512].contiguous(), part)
    got = launch(spoilt, part, 1, tile, compile_target(wide.device))
    kept = [0, 1, 2, 4, 5, 6, 7]
    assert same_bits(got[kept], want[kept])
    assert got[3].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nvfp4", "int4 asymmetric, fp16 scales"])
@pytest.mark.parametrize("tokens", [16, 32])
def test_stage_is_not_refilled_before_it_was_read(name: str, tokens: int) -> None:
    """If dequantization takes longer than copies, the pipeline is always full, and a stage is
    refilled as soon as it is free. Without a fence, about 1 in 1,000 mma.sync results came from
    other blocks."""
    from lockstep.kernels.formats.weights.bench import LAYOUTS
    from lockstep.kernels.linear.quantized import expected_output, run_tile

    weight = LAYOUTS[name](34816, 5120, "cuda")
    weight.fill_dummy(torch.Generator("cuda").manual_seed(0))
    x = torch.randn(tokens, 5120, dtype=torch.bfloat16, device="cuda")
    want = expected_output(1, x, weight)
    for tile in candidates(tokens, 1, weight.bits):
        if tile.pipeline:
            for _ in range(20):
                got = run_tile(1, False, x, weight, fit_tile(tile, weight, 1, HOPPER))
                assert same_bits(got, want), tile


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 64, 100, 200, 600])
@pytest.mark.parametrize("name", ["int4", "nvfp4", "int4 asymmetric, fp16 scales", "fp8 by blocks"])
def test_stream_k_equals_dequantized(name: str, tokens: int) -> None:
    """Stream-K work ranges that end inside tiles, with one or two split-K partitions, give the bits
    of the weight dequantized first, in repeated launches."""
    from lockstep.kernels.formats.weights.bench import LAYOUTS
    from lockstep.kernels.linear.quantized import compile_target, expected_output, launch

    for n, split_k in ((20000, 1), (9000, 2)):
        weight = LAYOUTS[name](n, 2560, "cuda")
        weight.fill_dummy(torch.Generator("cuda").manual_seed(0))
        x = torch.randn(tokens, 2560, dtype=torch.bfloat16, device="cuda")
        want = expected_output(split_k, x, weight)
        target = compile_target(x.device)
        for tile in candidates(tokens, split_k, weight.bits):
            if tile.stream_k:
                few = replace(target, num_sms=40)
                for _ in range(5):
                    assert same_bits(launch(x, weight, split_k, tile, few), want), tile


@pytest.mark.gpu
def test_unsplit_factors_equal_dequantized() -> None:
    from lockstep.kernels.formats.weights.bench import LAYOUTS
    from lockstep.kernels.linear.quantized import expected_output, run_tile

    weight = LAYOUTS["nvfp4"](1000, 1024, "cuda")
    weight.fill_dummy(torch.Generator("cuda").manual_seed(0))
    weight.factors[7] = 1.7083332538604736
    assert not weight.has_split_factors
    x = torch.randn(8, 1024, dtype=torch.bfloat16, device="cuda")
    for tile in candidates(8, 2, weight.bits):
        if tile.pipeline:
            got = run_tile(2, False, x, weight, fit_tile(tile, weight, 2, HOPPER))
            assert same_bits(got, expected_output(2, x, weight)), tile


@pytest.mark.gpu
def test_fma_decoder_equals_dequantized() -> None:
    """All scales below the bound and random codes, in every pipeline tile. x is random, or selects
    single columns, so that each output is one dequantized value."""
    from lockstep.kernels.linear.quantized import expected_output, run_tile

    generator = torch.Generator().manual_seed(0)
    scale = fma_scales()
    weight = IntWeight.empty(len(scale) // 2, 256)
    weight.words.random_(-(2**31), 2**31, generator=generator)
    weight.scales.copy_(scale[torch.randperm(len(scale), generator=generator)].view(-1, 2))
    weight = Backend("quantized", "cuda", torch.bfloat16).place(weight)
    assert weight.max_scale == LARGEST_SCALE
    selected = torch.eye(256, dtype=torch.bfloat16, device="cuda")
    random = torch.randn(256, 256, dtype=torch.bfloat16, device="cuda")
    for x, split_k in product((selected, random), (1, 2)):
        want = expected_output(split_k, x, weight)
        for tokens in (8, 16, 32, 64, 128, 256):
            for tile in candidates(tokens, split_k, weight.bits):
                if tile.pipeline:
                    tile = fit_tile(tile, weight, split_k, HOPPER)
                    got = run_tile(split_k, False, x[:tokens], weight, tile)
                    assert same_bits(got, want[:tokens]), tile
    values = weight.dequantize(torch.bfloat16)
    assert torch.equal(expected_output(1, selected, weight), values.T), "sums of one value"


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [FMA_SCALE_BOUND, -0.5, 3e38, float("inf"), float("nan")])
def test_scales_above_the_bound_equal_dequantized(scale: float) -> None:
    """One such scale changes the decoder of the whole weight, and no other output."""
    from lockstep.kernels.linear.quantized import expected_output, run_tile

    weight = IntWeight.empty(1000, 1024, device="cuda")
    weight.fill_dummy(torch.Generator("cuda").manual_seed(0))
    weight.scales[7, 3] = scale
    x = torch.randn(64, 1024, dtype=torch.bfloat16, device="cuda")
    for tokens in (8, 64):
        want = expected_output(2, x[:tokens], weight)
        for tile in candidates(tokens, 2, weight.bits):
            if tile.pipeline:
                tile = fit_tile(tile, weight, 2, HOPPER)
                got = run_tile(2, False, x[:tokens], weight, tile)
                assert torch.equal(got[:, 7].isnan(), want[:, 7].isnan()), tile
                assert same_bits(got.nan_to_num(0.0), want.nan_to_num(0.0)), tile
