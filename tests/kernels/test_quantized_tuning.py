"""Tiles of linear with a packed weight: the table is read, and no tile changes a bit."""

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
from tests.kernels.test_quantized_weights import whole_numbers

TRITON = [backend for backend in backends() if backend.values[0].name == "triton"]
TUNED = {"int4": 4, "int4 asymmetric": 4, "fp8 by blocks": 8, "nvfp4": 4}
"""Layouts, and the bits of a weight in them."""
CUTS = {
    (tile.gemv, tile.pipeline, tile.mma_sync, tile.m, tile.n, tile.k, bits): tile
    for tokens in TIMED
    for bits in sorted(set(TUNED.values()))
    for tile in candidates(tokens, 2, bits)
    if tile != DEQUANTIZE_FIRST
}
"""A tile of each kernel and size: warps, stages and registers are the compiler's alone."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("cut", sorted(CUTS))
@pytest.mark.parametrize("backend", TRITON)
def test_no_tile_changes_a_bit(
    cut: tuple[bool, bool, bool, int, int, int, int], backend: Backend
) -> None:
    """Test rows that no tile divides, with two split-K partitions: all layouts on a GPU, one in the
    interpreter. In fp32 the op takes no tile: the weight is dequantized first."""
    from lockstep.kernels.compile_target import compile_target
    from lockstep.kernels.linear.quantized import launch, tile_of

    if backend.dtype == torch.float32:
        weight = whole_numbers("int4", 40, 1024)
        hopper = CompileTarget(HOPPER, inline_ptx=True)
        assert tile_of(5, weight, 2, backend.dtype, hopper) == DEQUANTIZE_FIRST
        backend = replace(backend, dtype=torch.float16)
    names = [name for name, bits in TUNED.items() if bits == cut[-1]]
    one = sorted(CUTS).index(cut) % len(names)
    for name in names if backend.on_gpu else names[one : one + 1]:
        weight = backend.place(whole_numbers(name, 40, 1024))
        x = backend.place(graded(5, 1024, 2, 3).to(backend.dtype))
        want = linear.backends["triton"].run(x, weight.dequantize(x.dtype), 2)
        assert same_bits(launch(x, weight, 2, CUTS[cut], compile_target(x.device)), want), name


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", TRITON)
def test_other_bits_are_refused(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is not timed; of the rest the fastest is first."""
    from lockstep.kernels.linear.quantized import expected_output, refusal, run_tile

    if backend.dtype == torch.float32:
        backend = replace(backend, dtype=torch.float16)
    weight = backend.place(whole_numbers("int4", 40, 256))
    x = backend.place(graded(5, 256, 1, 3).to(backend.dtype))
    want = expected_output(1, x, weight)
    tiles = [QuantizedTile(16, 64, 128), QuantizedTile(16, 64, 256), DEQUANTIZE_FIRST]
    spent = iter((3.0, 1.0, 2.0))
    monkeypatch.setattr(tuning, "seconds", lambda run, weights: next(spent))
    wrong = partial(refusal, 1, x, weight, want)
    found, refused = tune(partial(run_tile, 1, False), wrong, x, [weight], tiles)
    assert [seconds for seconds, _ in found] == [1.0, 2.0, 3.0] and not refused
    assert found[-1][1] == tiles[0]
    assert refusal(1, x, weight, want + 1, tiles[0]) == "other bits"


def test_candidates_are_few_and_fit() -> None:
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


def test_a_ring_fits_the_architecture() -> None:
    """Words and x of all slots, for weights of 4 and of 8 bits; 256 tokens for 4 bits alone."""
    for tokens in TIMED:
        for bits in (4, 8):
            rings = [tile for tile in candidates(tokens, 1, bits) if tile.pipeline]
            assert rings
            for tile in rings:
                blocks = tile.stages * tile.k // 128
                assert blocks * (16 * bits * tile.n + 256 * tile.m) < shared_memory_limit(HOPPER)
                assert tile.mma_sync or tile.stages >= 3
    assert max(tile.m for tile in candidates(256, 1, 4) if tile.pipeline) == 256
    assert max(tile.m for tile in candidates(256, 1, 8) if tile.pipeline) == 128


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, dict[int, QuantizedTile]]]:
    """The committed table's stand-in: empty."""
    made: dict[str, dict[int, QuantizedTile]] = {}
    for cached in (quantized_tuning._choose_tile, quantized_tuning._measured_rows):
        cached.cache_clear()
    monkeypatch.setattr(quantized_tuning, "load_table", lambda: made)
    yield made
    for cached in (quantized_tuning._choose_tile, quantized_tuning._measured_rows):
        cached.cache_clear()


def test_committed_shares_are_fewer_than_tiles() -> None:
    """Else a launch would not share, and another kernel than the one that was timed would run."""
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


def test_a_bucket_serves_what_its_tile_holds(table: dict[str, dict[int, QuantizedTile]]) -> None:
    weight = int4(8192, 4096)
    found = partial(lookup, weight=weight, split_k=1, dtype=torch.bfloat16)
    few = QuantizedTile(16, 64, 128)
    table[table_key(weight, torch.bfloat16, 90)] = {5: few, 65: DEQUANTIZE_FIRST}
    for tokens in (5, 8, 16):
        assert found(tokens, arch=90) == few
    for tokens in (4, 17, 33):
        assert found(tokens, arch=90) == candidates(tokens, 1)[0]
    for tokens in (65, 200):
        assert found(tokens, arch=90) == DEQUANTIZE_FIRST
    assert found(9, arch=80) == QuantizedTile(16, 64, 128)
    assert found(8, arch=100) == QuantizedTile(16, 64, 128)
    assert [bucket(tokens) for tokens in TIMED] == list(BUCKETS)


def test_many_tokens_pass_through_a_ring_or_the_weight_is_unpacked_ahead(
    table: dict[str, dict[int, QuantizedTile]],
) -> None:
    """A tile of fewer tokens does not stand for them, nor one that the compiler lays out."""
    weight = int4(8192, 4096)
    found = partial(lookup, weight=weight, split_k=1, dtype=torch.bfloat16)
    row = table.setdefault(
        table_key(weight, torch.bfloat16, 90), {129: QuantizedTile(256, 64, 128)}
    )
    for tokens in (257, MAX_TOKENS_BY_RULE):
        assert found(tokens, arch=90).pipeline
        assert found(tokens, arch=80) == found(tokens, arch=120) == DEQUANTIZE_FIRST
        by_32 = IntWeight.empty(8192, 4096, group=32, device="meta")
        assert found(tokens, weight=by_32, arch=90) == DEQUANTIZE_FIRST
    assert found(MAX_TOKENS_BY_RULE + 1, arch=90) == DEQUANTIZE_FIRST
    for cached in (quantized_tuning._choose_tile, quantized_tuning._measured_rows):
        cached.cache_clear()
    wide = QuantizedTile(128, 256, 128, 8, 3, 1, 168, pipeline=True)
    row[513] = wide
    assert found(600, arch=90) == wide
    assert found(600, arch=80) == DEQUANTIZE_FIRST


def test_programs_share_tiles_where_two_warps_multiply_on_a_scheduler() -> None:
    """One program of eight warps, or two of four; not where there are fewer tiles than programs."""
    wide = QuantizedTile(128, 128, 128, 8, 4, 1, 120, pipeline=True, stream_k=1)
    narrow = replace(wide, n=64, warps=4, stream_k=2)
    assert fit_tile(wide, int4(34816, 5120), 1, HOPPER).stream_k == 1
    assert fit_tile(narrow, int4(34816, 5120), 1, HOPPER).stream_k == 2
    assert fit_tile(replace(narrow, stream_k=1), int4(34816, 5120), 1, HOPPER).stream_k == 0
    assert fit_tile(wide, int4(16384, 5120), 1, HOPPER).stream_k == 0
    assert fit_tile(wide, int4(5120, 6144), 4, HOPPER).stream_k == 1


def test_a_shape_that_was_not_timed_is_as_its_nearest(
    table: dict[str, dict[int, QuantizedTile]],
) -> None:
    """The nearest shape has the same format and the same split_k."""
    tiles = [QuantizedTile(16, 64, 128, stages=stages) for stages in (2, 3, 4)]
    for tile, (n, k) in zip(tiles, ((16384, 4096), (32768, 8192), (4096, 4096)), strict=True):
        table[table_key(int4(n, k), torch.bfloat16, 90)] = {1: tile}
    found = partial(lookup, 1, dtype=torch.bfloat16, arch=90)
    assert found(int4(16480, 4096), split_k=1) == tiles[0]
    assert found(int4(34816, 5120), split_k=1) == tiles[1]
    assert found(int4(8000, 4096), split_k=4) == tiles[2]
    other = Fp4Weight.empty(16384, 4096, device="meta")
    assert found(other, split_k=1) == candidates(1, 1)[0]


def test_tiles_are_cut_to_the_weight_and_the_architecture() -> None:
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


def test_few_candidates_are_timed() -> None:
    """Those that fit, each once, and none that the estimate puts far behind."""
    for n, k, parts in ((34816, 5120, 1), (5120, 17408, 2), (2048, 512, 1)):
        for weight in (int4(n, k), Fp8Weight.empty(n, k, 128, 128, device="meta")):
            for tokens in TIMED:
                tiles = tiles_to_time(tokens, weight, parts, 90, 132)
                assert 1 <= len(tiles) == len(set(tiles)) <= 20
                assert tokens > 32 or {tile.gemv for tile in tiles} == {False, True}
                assert {tile.pipeline for tile in tiles} == {False, True}
                made = candidates(tokens, parts, weight.bits)
                assert set(tiles) <= {fit_tile(tile, weight, parts, 90) for tile in made}
                assert tokens <= 64 or DEQUANTIZE_FIRST in tiles
    narrow = tiles_to_time(1, int4(2048, 640), 1, 90, 132)
    assert {tile.k for tile in narrow} <= {128}
    assert max(tile.stages for tile in narrow if tile.pipeline) > 4
    tight = tiles_to_time(64, Fp8Weight.empty(4096, 4096, 128, 128, device="meta"), 2, 86, 82)
    assert len(tight) < len(candidates(64, 2))


def test_short_way_of_nvfp4_is_exact() -> None:
    """Every code and scale: their product, 2^7 times smaller, is exact in fp16."""
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
