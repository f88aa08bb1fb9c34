"""linear with quantized weights for few tokens: the register-only GEMV kernel's mapping of values
to lanes."""

from typing import Any

import pytest
import torch
import triton.language as tl

from lockstep.kernels.architecture import HOPPER
from lockstep.kernels.compile_target import CompileTarget
from lockstep.kernels.formats.weights import Fp4Weight, IntWeight
from lockstep.kernels.formats.weights.cases import random_weights
from lockstep.kernels.linear.quantized_tuning import (
    QuantizedTile,
    candidates,
    compiler_tile,
    fit_tile,
    gemv_supports,
)
from tests.kernels import ptx
from tests.kernels.backends import Backend, same_bits
from tests.kernels.test_linear import graded
from tests.kernels.test_quantized_weights import exact_weight

NAMES = [name for name, _ in random_weights(8, 128) if name not in ("int4 desc_act", "int4 by 48")]
"""Layouts with regular scales."""


def gemv_tile(m: int, high: int, warps: int, stages: int, split_k: int = 1) -> QuantizedTile:
    """Return a tile of `high` products of 16 outputs per warp."""
    return QuantizedTile(m, 16 * high * warps, 128, warps, stages, split_k, gemv=True)


@pytest.mark.covering(strength=1)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("assembly", "dtype"),
    [(True, torch.bfloat16), (True, torch.float16), (False, torch.float16)],
    ids=["assembly-bf16", "assembly-fp16", "fp16"],
)
@pytest.mark.parametrize("name", NAMES)
def test_gemv_kernel_equals_dense_product(
    name: str, assembly: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel itself, with its assembly run on the CPU: each K split equals the dense
    product."""
    from lockstep.kernels.linear.quantized import _launch_gemv

    monkeypatch.setattr(tl, "inline_asm_elementwise", ptx.inline_asm_elementwise)
    index = NAMES.index(name)
    tokens = (1, 7, 16)[index % 3]
    tile = (gemv_tile(8, 1, 1, 2), gemv_tile(8, 1, 2, 1), gemv_tile(16, 2, 1, 3))[index % 3]
    weight = exact_weight(name, 20, 768)
    x = graded(tokens, 768, 2, 3).to(dtype)
    actual = torch.full((2, tokens, 20), -1.0)
    _launch_gemv(x, weight, actual, 384, tile, CompileTarget(90, assembly))
    dense = weight.dequantize(dtype).float()
    ends = (slice(0, 384), slice(384, 768))
    want = torch.stack([x[:, mine].float() @ dense[:, mine].T for mine in ends])
    assert torch.equal(actual, want)


def test_unsupported_shapes_use_compiler_tile() -> None:
    """If K is not in whole blocks in every split, NVFP4 scales are misaligned, or mma.sync does not
    equal the dense product or was not compared with it."""
    tile = gemv_tile(8, 1, 1, 4)
    full = IntWeight.empty(64, 1024, device="meta")
    for split_k, arch in ((1, 80), (2, 90), (4, 120)):
        assert gemv_supports(full, split_k, arch)
        assert fit_tile(tile, full, split_k, arch).ctas_k == split_k
    assert fit_tile(gemv_tile(8, 1, 1, 6), full, 2, 90).stages == 4
    assert not gemv_supports(full, 1, 100)
    for weight, split_k in (
        (IntWeight.empty(64, 1000, device="meta"), 1),
        (IntWeight.empty(64, 1152, device="meta"), 2),
        (Fp4Weight.empty(64, 2000, device="meta"), 1),
    ):
        assert not gemv_supports(weight, split_k, 90)
        other = fit_tile(tile, weight, split_k, 90)
        assert other == compiler_tile(tile, weight, split_k, 90) and not other.gemv


GPU_SIZES = ((5120, 6144, 2), (1000, 2048, 1), (33, 128, 1), (40, 1280, 2), (17, 200, 1))
"""(outputs, inputs, split_k): real sizes; ends within 16 rows; one block; five blocks; no whole
blocks."""
GPU_TOKENS = (1, 2, 7, 8, 9, 16, 31, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_gemv_tiles_equal_dequantized(name: str, dtype: torch.dtype) -> None:
    """Random numbers and every candidate, against the dequantized weight."""
    from lockstep.kernels.linear.quantized import expected_output, run_tile

    backend: Any = Backend("quantized", "cuda", dtype)
    for n, k, split_k in GPU_SIZES:
        weight = backend.place(dict(random_weights(n, k))[name])
        for tokens in GPU_TOKENS:
            x = torch.randn(tokens, k, dtype=dtype, device="cuda")
            want = expected_output(split_k, x, weight)
            tiles = {
                fit_tile(tile, weight, split_k, HOPPER)
                for tile in candidates(tokens, split_k, weight.bits)
                if tile.gemv
            }
            for tile in tiles:
                got = run_tile(split_k, False, x, weight, tile)
                assert same_bits(got, want), (n, k, tokens, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_weight_slices_and_strided_rows(name: str) -> None:
    """Rows of a weight sliced within a block of scales; x and out are columns of wider tensors; a
    row of x with NaN leaves other rows unchanged."""
    from lockstep.kernels.linear.quantized import compile_target, expected_output, launch

    backend: Any = Backend("quantized", "cuda", torch.bfloat16)
    part = backend.place(dict(random_weights(300, 512))[name]).rows(101, 264)
    wide = torch.randn(8, 516, dtype=torch.bfloat16, device="cuda")
    for first in (0, 1, 2):
        x = wide[:, first : first + 512]
        want = expected_output(2, x.contiguous(), part)
        out = torch.zeros(8, 200, dtype=x.dtype, device="cuda")
        launch(x, part, 2, gemv_tile(8, 2, 2, 2, 2), compile_target(x.device), out=out[:, 8:171])
        assert same_bits(out[:, 8:171].contiguous(), want)
        assert not out[:, :8].any() and not out[:, 171:].any()
    spoilt = wide[:, :512].clone()
    spoilt[3] = float("nan")
    want = expected_output(1, wide[:, :512].contiguous(), part)
    got = launch(spoilt, part, 1, gemv_tile(8, 1, 4, 4), compile_target(wide.device))
    kept = [0, 1, 2, 4, 5, 6, 7]
    assert same_bits(got[kept], want[kept]) and got[3].isnan().all()
