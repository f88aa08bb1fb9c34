"""Tiles of linear with a quantized weight: the tuning table is used, and tiles change no bit."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from lockstep.kernels.architecture import (
    ARCHITECTURES,
    H100_MULTIPROCESSORS,
    HOPPER,
    shared_memory_limit,
)
from lockstep.kernels.compile_target import CompileTarget, uses_mma_sync
from lockstep.kernels.formats.weights import Fp4Weight, Fp8Weight, IntWeight
from lockstep.kernels.formats.weights.operand import shared_memory_bytes
from lockstep.kernels.linear import choose_split_k, linear, quantized_tuning, tuning
from lockstep.kernels.linear.quantized_tuning import (
    BUCKETS,
    DEQUANTIZE_FIRST,
    MAX_TOKENS_BY_RULE,
    TIMED,
    QuantizedTile,
    bucket,
    candidates,
    fit_tile,
    lookup,
    table_key,
    tiles_to_time,
    tune,
)
from tests.kernels.backends import Backend, backends, same_bits
from tests.kernels.test_linear import graded
from tests.kernels.test_quantized_weights import exact_weight

TRITON = [backend for backend in backends() if backend.values[0].name == "triton"]
TUNED = {"int4": 4, "int4 asymmetric": 4, "fp8 by blocks": 8, "nvfp4": 4}
"""Layout -> bits per weight."""
TILE_BY_SHAPE = {
    (tile.gemv, tile.pipeline, tile.mma_sync, tile.m, tile.n, tile.k, bits): tile
    for tokens in TIMED
    for bits in sorted(set(TUNED.values()))
    for tile in candidates(tokens, 2, bits)
    if tile != DEQUANTIZE_FIRST
}
"""Tiles: one of each kernel and size, since warps, stages and registers concern the compiler."""
CUTS = [
    cut if index % 4 == 0 else pytest.param(cut, marks=pytest.mark.slow)
    for index, cut in enumerate(sorted(TILE_BY_SHAPE))
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("backend", TRITON)
def test_quantized_tiles_change_no_bit(
    cut: tuple[bool, bool, bool, int, int, int, int], backend: Backend
) -> None:
    """Rows that no tile divides, with two split-K partitions: all layouts on a GPU, one in the
    interpreter.

    In fp32 the op takes no tile: the weight is dequantized first.
    """
    from lockstep.kernels.compile_target import compile_target
    from lockstep.kernels.linear.quantized import launch, tile_of

    if backend.dtype == torch.float32:
        weight = exact_weight("int4", 40, 1024)
        hopper = CompileTarget(HOPPER, inline_ptx=True)
        assert tile_of(5, weight, 2, backend.dtype, hopper) == DEQUANTIZE_FIRST
        backend = replace(backend, dtype=torch.float16)
    names = [name for name, bits in TUNED.items() if bits == cut[-1]]
    one = sorted(TILE_BY_SHAPE).index(cut) % len(names)
    for name in names if backend.on_gpu else names[one : one + 1]:
        weight = backend.place(exact_weight(name, 40, 1024))
        x = backend.place(graded(5, 1024, 2, 3).to(backend.dtype))
        want = linear.backends["triton"].run(x, weight.dequantize(x.dtype), 2)
        assert same_bits(
            launch(x, weight, 2, TILE_BY_SHAPE[cut], compile_target(x.device)), want
        ), name


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", TRITON)
def test_tuning_refuses_other_bits(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused tiles are not timed; the others are sorted by time."""
    from lockstep.kernels.linear.quantized import expected_output, refusal, run_tile

    if backend.dtype == torch.float32:
        backend = replace(backend, dtype=torch.float16)
    weight = backend.place(exact_weight("int4", 40, 256))
    x = backend.place(graded(5, 256, 1, 3).to(backend.dtype))
    want = expected_output(1, x, weight)
    tiles = [QuantizedTile(16, 64, 128), QuantizedTile(16, 64, 256), DEQUANTIZE_FIRST]
    spent = iter((3.0, 1.0, 2.0))
    monkeypatch.setattr(tuning, "seconds", lambda run, weights: next(spent))
    wrong = partial(refusal, 1, x, weight, want)
    actual, refused = tune(partial(run_tile, 1, False), wrong, x, [weight], tiles)
    assert [seconds for seconds, _ in actual] == [1.0, 2.0, 3.0] and not refused
    assert actual[-1][1] == tiles[0]
    assert refusal(1, x, weight, want + 1, tiles[0]) == "other bits"


def test_candidate_tiles_are_few_and_valid() -> None:
    for tokens in TIMED:
        for split_k in (1, 2):
            tiles = candidates(tokens, split_k)
            assert len(tiles) <= 20 and len(set(tiles)) == len(tiles)
            for tile in tiles:
                if not tile.laid_out:
                    assert tile.m % 8 == tile.n % (16 * tile.warps) == 0
                    assert tile.k == 128 or (tile.pipeline and tile.k == 256)
                else:
                    assert tile == DEQUANTIZE_FIRST or (tile.m >= 16 and tile.k % 128 == 0)
            assert (tiles[0] == DEQUANTIZE_FIRST) == (tokens > MAX_TOKENS_BY_RULE)


def test_pipeline_stages_fit_shared_memory() -> None:
    """Words and x of all stages, for weights of 4 and 8 bits; 256 tokens only for 4 bits."""
    for tokens in TIMED:
        for bits in (4, 8):
            pipelined = [tile for tile in candidates(tokens, 1, bits) if tile.pipeline]
            assert pipelined
            for tile in pipelined:
                blocks = tile.stages * tile.k // 128
                assert blocks * (16 * bits * tile.n + 256 * tile.m) < shared_memory_limit(HOPPER)
                assert tile.mma_sync or tile.stages >= 3
    assert max(tile.m for tile in candidates(256, 1, 4) if tile.pipeline) == 256
    assert max(tile.m for tile in candidates(256, 1, 8) if tile.pipeline) == 128


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, dict[int, QuantizedTile]]]:
    """Replace the committed table by an empty one."""
    result: dict[str, dict[int, QuantizedTile]] = {}
    for cached in (quantized_tuning._choose_tile, quantized_tuning._measured_rows):
        cached.cache_clear()
    monkeypatch.setattr(quantized_tuning, "load_table", lambda: result)
    yield result
    for cached in (quantized_tuning._choose_tile, quantized_tuning._measured_rows):
        cached.cache_clear()


def test_committed_stream_k_has_fewer_ctas_than_tiles() -> None:
    """Otherwise a launch would not use stream-K, and a kernel other than the timed one would
    run."""
    shared = 0
    for name, row in quantized_tuning.load_table().items():
        n, k = map(int, name.rpartition("/")[2].split("x"))
        parts = choose_split_k(n, k, "cuda", quantized=True)
        sharing = {first: tile for first, tile in row.items() if tile.stream_k}
        for first, tile in sharing.items():
            high = -(-TIMED[BUCKETS.index(first)] // tile.m)
            programs = tile.stream_k * H100_MULTIPROCESSORS // (high * parts)
            assert 0 < programs < -(-n // tile.n), (name, first)
            shared += 1
    assert shared > 50


def int4(n: int, k: int) -> IntWeight:
    return IntWeight.empty(n, k, device="meta")


def test_table_bucket_serves_tokens_within_its_tile(
    table: dict[str, dict[int, QuantizedTile]],
) -> None:
    weight = int4(8192, 4096)
    actual = partial(lookup, weight=weight, split_k=1, dtype=torch.bfloat16)
    few = QuantizedTile(16, 64, 128)
    table[table_key(weight, torch.bfloat16, 90)] = {5: few, 65: DEQUANTIZE_FIRST}
    for tokens in (5, 8, 16):
        assert actual(tokens, arch=90) == few
    for tokens in (4, 17, 33):
        assert actual(tokens, arch=90) == candidates(tokens, 1)[0]
    for tokens in (65, 200):
        assert actual(tokens, arch=90) == DEQUANTIZE_FIRST
    assert actual(9, arch=80) == QuantizedTile(16, 64, 128)
    assert actual(8, arch=100) == QuantizedTile(16, 64, 128)
    assert [bucket(tokens) for tokens in TIMED] == list(BUCKETS)


def test_many_tokens_use_pipeline_or_dequantize_first(
    table: dict[str, dict[int, QuantizedTile]],
) -> None:
    """Neither a tile of fewer tokens nor a compiler-chosen tile replaces them."""
    weight = int4(8192, 4096)
    actual = partial(lookup, weight=weight, split_k=1, dtype=torch.bfloat16)
    row = table.setdefault(
        table_key(weight, torch.bfloat16, 90), {129: QuantizedTile(256, 64, 128)}
    )
    for tokens in (257, MAX_TOKENS_BY_RULE):
        assert actual(tokens, arch=90).pipeline
        assert actual(tokens, arch=80) == actual(tokens, arch=120) == DEQUANTIZE_FIRST
        by_32 = IntWeight.empty(8192, 4096, group=32, device="meta")
        assert actual(tokens, weight=by_32, arch=90) == DEQUANTIZE_FIRST
    assert actual(MAX_TOKENS_BY_RULE + 1, arch=90) == DEQUANTIZE_FIRST
    for cached in (quantized_tuning._choose_tile, quantized_tuning._measured_rows):
        cached.cache_clear()
    wide = QuantizedTile(128, 256, 128, 8, 3, 1, 168, pipeline=True)
    row[513] = wide
    assert actual(600, arch=90) == wide
    assert actual(600, arch=80) == DEQUANTIZE_FIRST


def test_stream_k_requires_two_warps_per_scheduler() -> None:
    """Stream-K needs one CTA of eight warps or two of four, and at least as many tiles as CTAs."""
    wide = QuantizedTile(128, 128, 128, 8, 4, 1, 120, pipeline=True, stream_k=1)
    narrow = replace(wide, n=64, warps=4, stream_k=2)
    assert fit_tile(wide, int4(34816, 5120), 1, HOPPER).stream_k == 1
    assert fit_tile(narrow, int4(34816, 5120), 1, HOPPER).stream_k == 2
    assert fit_tile(replace(narrow, stream_k=1), int4(34816, 5120), 1, HOPPER).stream_k == 0
    assert fit_tile(wide, int4(16384, 5120), 1, HOPPER).stream_k == 0
    assert fit_tile(wide, int4(5120, 6144), 4, HOPPER).stream_k == 1


def test_untimed_shape_uses_nearest_timed_shape(
    table: dict[str, dict[int, QuantizedTile]],
) -> None:
    """The nearest shape has the same format and the same split_k."""
    tiles = [QuantizedTile(16, 64, 128, stages=stages) for stages in (2, 3, 4)]
    for tile, (n, k) in zip(tiles, ((16384, 4096), (32768, 8192), (4096, 4096)), strict=True):
        table[table_key(int4(n, k), torch.bfloat16, 90)] = {1: tile}
    actual = partial(lookup, 1, dtype=torch.bfloat16, arch=90)
    assert actual(int4(16480, 4096), split_k=1) == tiles[0]
    assert actual(int4(34816, 5120), split_k=1) == tiles[1]
    assert actual(int4(8000, 4096), split_k=4) == tiles[2]
    other = Fp4Weight.empty(16384, 4096, device="meta")
    assert actual(other, split_k=1) == candidates(1, 1)[0]


def test_tiles_are_fitted_to_weight_and_architecture() -> None:
    wide = QuantizedTile(16, 64, 512, stages=4, ctas_k=2)
    weight = Fp8Weight.empty(256, 4096, 128, 128, device="meta")
    assert fit_tile(wide, weight, 2, 90) == replace(wide, stages=4)
    assert fit_tile(wide, weight, 2, 86).stages == 1
    assert fit_tile(wide, int4(256, 640), 1, 90) == replace(wide, k=128, ctas_k=1)
    assert fit_tile(DEQUANTIZE_FIRST, weight, 1, 86) == DEQUANTIZE_FIRST
    for arch in ARCHITECTURES:
        for tokens in TIMED:
            tile = lookup(tokens, weight, 1, torch.bfloat16, arch)
            if not tile.laid_out:
                continue
            stage, fixed = shared_memory_bytes(tile.n, tile.m, tile.k, weight, uses_mma_sync(arch))
            assert (tile.stages - 1) * stage + fixed <= shared_memory_limit(arch)


def test_timed_candidates_fit_and_are_distinct() -> None:
    """Without duplicates and without those whose estimate is far slower."""
    for n, k, parts in ((34816, 5120, 1), (5120, 17408, 2), (2048, 512, 1)):
        for weight in (int4(n, k), Fp8Weight.empty(n, k, 128, 128, device="meta")):
            for tokens in TIMED:
                tiles = tiles_to_time(tokens, weight, parts, 90, 132)
                assert 1 <= len(tiles) == len(set(tiles)) <= 20
                assert tokens > 32 or {tile.gemv for tile in tiles} == {False, True}
                assert {tile.pipeline for tile in tiles} == {False, True}
                result = candidates(tokens, parts, weight.bits)
                assert set(tiles) <= {fit_tile(tile, weight, parts, 90) for tile in result}
                assert tokens <= 64 or DEQUANTIZE_FIRST in tiles
    narrow = tiles_to_time(1, int4(2048, 640), 1, 90, 132)
    assert {tile.k for tile in narrow} <= {128}
    assert max(tile.stages for tile in narrow if tile.pipeline) > 4
    tight = tiles_to_time(64, Fp8Weight.empty(4096, 4096, 128, 128, device="meta"), 2, 86, 82)
    assert len(tight) < len(candidates(64, 2))


def test_nvfp4_fp16_shortcut_is_exact() -> None:
    """For every code and scale, their product scaled by 2^-7 is exact in fp16."""
    codes = torch.arange(16, dtype=torch.int32)
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    small = bits.to(torch.int16).view(torch.float16)
    scales = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    scales = scales.to(torch.float32)
    scales = scales[scales.isfinite()]
    large = (scales * 128).half()
    assert torch.equal(large.float(), scales * 128)
    product = small[:, None].float() * large.float()[None, :]
    assert torch.equal(product.half().float(), product)
    values = small.float() * 2**14
    assert values[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
