"""linear with packed weights for few tokens, by warps that work alone: which lane holds what."""

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
from tests.kernels.test_quantized_weights import whole_numbers

NAMES = [name for name, _ in random_weights(8, 128) if name not in ("int4 desc_act", "int4 by 48")]
"""Layouts whose scales lie regularly."""


def lanes(m: int, high: int, warps: int, ahead: int, split_k: int = 1) -> QuantizedTile:
    """A tile of `high` products of 16 outputs per warp."""
    return QuantizedTile(m, 16 * high * warps, 128, warps, ahead, split_k, gemv=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("assembly", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_every_lane_holds_its_part(
    name: str, assembly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel itself, its assembly run on the CPU: each part of K is the plain product's."""
    from lockstep.kernels.linear.quantized import _launch_gemv

    monkeypatch.setattr(tl, "inline_asm_elementwise", ptx.inline_asm_elementwise)
    place = NAMES.index(name)
    tokens = (1, 7, 16)[place % 3]
    tile = (lanes(8, 1, 1, 2), lanes(8, 1, 2, 1), lanes(16, 2, 1, 3))[place % 3]
    for dtype in (torch.float16, torch.bfloat16) if assembly else (torch.float16,):
        weight = whole_numbers(name, 20, 768)
        x = graded(tokens, 768, 2, 3).to(dtype)
        found = torch.full((2, tokens, 20), -1.0)
        _launch_gemv(x, weight, found, 384, tile, CompileTarget(90, assembly))
        dense = weight.dequantize(dtype).float()
        ends = (slice(0, 384), slice(384, 768))
        want = torch.stack([x[:, own].float() @ dense[:, own].T for own in ends])
        assert torch.equal(found, want), dtype


def test_other_tiles_stand_in() -> None:
    """Where K is not of whole blocks in every segment, scales of NVFP4 lie oddly, or mma.sync is
    not the dense product and was not compared with it."""
    tile = lanes(8, 1, 1, 4)
    whole = IntWeight.empty(64, 1024, device="meta")
    for split_k, arch in ((1, 80), (2, 90), (4, 120)):
        assert gemv_supports(whole, split_k, arch)
        assert fit_tile(tile, whole, split_k, arch).ctas_k == split_k
    assert fit_tile(lanes(8, 1, 1, 6), whole, 2, 90).stages == 4
    assert not gemv_supports(whole, 1, 100)
    for weight, split_k in (
        (IntWeight.empty(64, 1000, device="meta"), 1),
        (IntWeight.empty(64, 1152, device="meta"), 2),
        (Fp4Weight.empty(64, 2000, device="meta"), 1),
    ):
        assert not gemv_supports(weight, split_k, 90)
        other = fit_tile(tile, weight, split_k, 90)
        assert other == compiler_tile(tile, weight, split_k, 90) and not other.gemv


GPU_SIZES = ((5120, 6144, 2), (1000, 2048, 1), (33, 128, 1), (40, 1280, 2), (17, 200, 1))
"""Outputs, inputs, split_k: real ones; ends within 16 rows; one block; five; no whole blocks."""
GPU_TOKENS = (1, 2, 7, 8, 9, 16, 31, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_bits_of_every_cut(name: str, dtype: torch.dtype) -> None:
    """Random numbers, every candidate, against the weight unpacked ahead."""
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
def test_parts_of_weights_and_of_rows(name: str) -> None:
    """Rows of a weight cut within a block of scales; x and out are columns of wider tensors; a row
    of x with NaN leaves the others alone."""
    from lockstep.kernels.linear.quantized import compile_target, expected_output, launch

    backend: Any = Backend("quantized", "cuda", torch.bfloat16)
    part = backend.place(dict(random_weights(300, 512))[name]).rows(101, 264)
    wide = torch.randn(8, 516, dtype=torch.bfloat16, device="cuda")
    for first in (0, 1, 2):
        x = wide[:, first : first + 512]
        want = expected_output(2, x.contiguous(), part)
        out = torch.zeros(8, 200, dtype=x.dtype, device="cuda")
        launch(x, part, 2, lanes(8, 2, 2, 2, 2), compile_target(x.device), out=out[:, 8:171])
        assert same_bits(out[:, 8:171].contiguous(), want)
        assert not out[:, :8].any() and not out[:, 171:].any()
    spoilt = wide[:, :512].clone()
    spoilt[3] = float("nan")
    want = expected_output(1, wide[:, :512].contiguous(), part)
    got = launch(spoilt, part, 1, lanes(8, 1, 4, 4), compile_target(wide.device))
    kept = [0, 1, 2, 4, 5, 6, 7]
    assert same_bits(got[kept], want[kept]) and got[3].isnan().all()
