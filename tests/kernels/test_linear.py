"""linear: its reduction tree, split_k and tuning table; tiles change no bit."""

from dataclasses import replace

import pytest
import torch

from lockstep.kernels.fp8_linear import choose_fp8_split_k
from lockstep.kernels.linear import choose_split_k, linear, partition_length, sum_partials
from lockstep.kernels.linear.tuning import (
    BUCKETS,
    TIMED,
    Tile,
    bucket,
    candidates,
    load_table,
    lookup,
    random_weights,
    save_table,
    tune,
)
from tests.kernels.backends import backends, same_bits

TRITON = [backend for backend in backends() if backend.values[0].name == "triton"]
TILES = sorted(
    {
        tile
        for tokens in TIMED
        for n in (64, 8192)
        for tile in candidates(tokens, n, 4096, torch.bfloat16, split_k=4)
    },
    key=str,
)


def graded(rows: int, k: int, count: int, seed: int) -> torch.Tensor:
    """Return small integers [rows, k], each of `count` split-K partitions on its own scale.

    The products of one partition add up exactly in fp32 in any order, since the interpreter's dot
    defines no order. Sums over partitions round, so that their reduction tree shows in the bits.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, (rows, k), generator=generator).float()
    scales = torch.exp2(torch.tensor([12.0, 0.0, 1.0, 0.0, 0.0, 11.0, 0.0, 2.0]))
    return x * scales[torch.arange(k) // partition_length(k, count)]


def wide_range_numbers(rows: int, k: int, seed: int) -> torch.Tensor:
    """Return normal numbers times 2^-20 .. 2^20, for which any other order of addition shows."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 21, (rows, k), generator=generator)
    return torch.randn(rows, k, generator=generator) * torch.exp2(exponents.float())


def operands(backend, rows: int, n: int, k: int, count: int) -> list[torch.Tensor]:
    """Return x [rows, k] and a weight [n, k] that reveal any tree other than that of `count`."""
    if backend.interpreted:
        pair = [graded(rows, k, count, 0), graded(n, k, count, 1)]
    else:
        pair = [wide_range_numbers(rows, k, 0), wide_range_numbers(n, k, 1)]
    if backend.dtype == torch.float16:
        pair = [part.clamp(-30, 30) for part in pair]
    return [part.to(backend.dtype).to(backend.device) for part in pair]


def test_reference_uses_reduction_tree():
    x = graded(5, 256, 4, 0)
    weight = graded(12, 256, 4, 1)
    a, b, c, d = (linear(x[:, i : i + 64], weight[:, i : i + 64]) for i in range(0, 256, 64))
    assert same_bits(linear(x, weight, 4), (a + b) + (c + d))
    assert not same_bits(linear(x, weight, 4), ((a + b) + c) + d)
    left = linear(x[:, :128], weight[:, :128])
    right = linear(x[:, 128:], weight[:, 128:])
    assert same_bits(linear(x, weight, 2), left + right)


def test_last_split_has_remaining_columns():
    """9 blocks of 128 columns are split into 5 and 4; below 512 columns all splits have equal
    length."""
    x = graded(5, 1152, 2, 0)
    weight = graded(12, 1152, 2, 1)
    left = linear(x[:, :640], weight[:, :640])
    right = linear(x[:, 640:], weight[:, 640:])
    assert same_bits(linear(x, weight, 2), left + right)
    for k, count, length in ((2688, 4, 768), (3712, 4, 1024), (17408, 4, 4352), (1856, 1, 1856)):
        assert partition_length(k, count) == length
        assert (count - 1) * length < k <= count * length
    assert partition_length(2688, 16) == 168


def test_split_k_depends_only_on_weight():
    for n, k in ((5120, 17408), (5120, 6144), (5120, 10240), (4096, 4096), (6144, 4096)):
        assert choose_split_k(n, k, "cuda:0") == 2
        assert choose_split_k(n, k, "cpu") == 1
    for n, k in ((34816, 5120), (248320, 5120), (16480, 5120), (256, 512), (4096, 4100)):
        assert choose_split_k(n, k, "cuda") == 1
    for n, k, cut in (
        (5120, 17408, 4),
        (2048, 2048, 4),
        (2688, 3712, 4),
        (3712, 2688, 4),
        (64, 1280, 2),
        (64, 1152, 2),
        (64, 640, 1),
        (64, 4100, 1),
        (8192, 4096, 1),
    ):
        assert choose_split_k(n, k, "cuda", quantized=True) == cut
        assert choose_split_k(n, k, "cpu", quantized=True) == 1
    for k, cut in ((7168, 16), (2688, 16), (1024, 8), (200, 1)):
        assert choose_split_k(256, k, "cuda", dtype=torch.float32) == cut
        assert choose_split_k(256, k, "cpu", dtype=torch.float32) == 1


def test_split_k_of_few_outputs():
    """A dense weight of few outputs counts its own, whatever else its linear layer has."""
    sizes = ((96, 5120, 8), (64, 2048, 8), (128, 4096, 8), (8, 4096, 8), (64, 2560, 4))
    for n, k, count in (*sizes, (129, 2048, 2), (64, 1024, 1), (64, 2688, 1)):
        assert choose_split_k(n, k, "cuda") == count, (n, k)
        assert choose_split_k(n, k, "cpu") == 1
        if n <= 128:
            assert choose_split_k(n, k, "cuda", layer_outputs=16480) == count
    assert choose_split_k(129, 5120, "cuda", layer_outputs=16480) == 1
    assert choose_split_k(96, 5120, "cuda", quantized=True, layer_outputs=16480) == 1
    assert choose_split_k(96, 5120, "cuda", quantized=True, layer_outputs=4096) == 4
    assert choose_split_k(96, 5120, "cuda", dtype=torch.float32, layer_outputs=16480) == 16
    assert {choose_fp8_split_k(n, 5120, "cuda") for n in (64, 96)} == {2}, "its kernels' maximum"


@pytest.mark.parametrize("arch", ["sm90", "sm80"])
@pytest.mark.parametrize(("n", "k"), [(96, 5120), (64, 2048), (48, 5120), (128, 4096), (64, 2560)])
def test_few_outputs_are_read_by_many_ctas(arch, n, k):
    """96 x 5120 with two CTAs took three times as long as a launch. 48: the share of a rank."""
    count = choose_split_k(n, k, "cuda")
    for tokens in (1, 8, 16):
        tile = lookup(tokens, n, k, torch.bfloat16, arch, count)
        assert tile.ctas_k == count and -(-n // tile.n) * tile.ctas_k >= min(24, n // 4)
        assert tile.n * (k // tile.ctas_k) * 2 <= 40 << 10, "bytes of weights per CTA"
    for tokens in (1, 64, 256, 512, 2048):
        tile = lookup(tokens, n, k, torch.bfloat16, arch, count)
        assert partition_length(k, count) % tile.k == 0, "no tile straddles two partitions"
        assert tile.ctas_k == count


def test_accumulators_stay_in_registers():
    """A tile shrinks if a CTA's accumulators would not fit."""
    from lockstep.kernels.linear.triton import _fit_accumulators

    wide = Tile(128, 256, 64, 8, 4, tma=True)
    square = replace(wide, n=128)
    assert _fit_accumulators(wide, 1, True) == wide
    assert _fit_accumulators(wide, 2, True) == square
    assert _fit_accumulators(wide, 4, True) == replace(square, ctas_k=2)
    assert _fit_accumulators(replace(wide, m=256, n=128), 2, True) == square
    assert _fit_accumulators(replace(wide, ctas_k=2), 2, True) == replace(wide, ctas_k=2)
    assert _fit_accumulators(replace(wide, ctas_k=2), 4, False) == replace(square, n=64)
    assert _fit_accumulators(Tile(128, 144, 64, 8, 6), 1, True) == Tile(128, 128, 64, 8, 6)


def test_token_buckets_and_default_tiles():
    assert [bucket(tokens) for tokens in (0, *TIMED)] == [1, *BUCKETS]
    assert [bucket(first - 1) for first in BUCKETS[1:]] == list(BUCKETS[:-1])
    for tokens in TIMED:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            tiles = candidates(tokens, 999, 4096, dtype, split_k=4)
            assert len(set(tiles)) == len(tiles) <= 26
            assert tiles[0].ctas_k == 1 or dtype == torch.float32
            assert lookup(tokens, 999, 4096, dtype, "sm90", 4) in tiles
            assert lookup(tokens, 999, 4096, dtype, "sm80").tma is False
            assert candidates(tokens, 999, 40, dtype)
            assert candidates(tokens, 64, 40, dtype)


def test_default_tiles_for_few_outputs_are_small():
    """More CTAs than with 128 x 128 tiles, with long blocks of K."""
    for tokens in (32, 64, 128, 256, 512, 8192):
        tile = lookup(tokens, 128, 2048, torch.bfloat16, "sm90")
        assert tile.m * tile.n <= 2048 and tile.k == 256
        assert lookup(tokens, 999, 2048, torch.bfloat16, "sm90").m >= min(tokens, 64)


@pytest.mark.parametrize("tokens", [1, 8, 32, 64, 256])
def test_default_tiles_of_few_outputs_share_k_among_ctas(tokens):
    """A rank's 2,560 columns make too few tiles for a GPU, unless CTAs share K."""
    assert lookup(tokens, 2560, 17408, torch.bfloat16, "sm90", 2).ctas_k == 2
    assert lookup(tokens, 7168, 5120, torch.bfloat16, "sm90", 1).ctas_k == 1


def test_tuning_table_round_trip(tmp_path):
    path = tmp_path / "tuning.json"
    assert load_table(path) == {}
    tiles = {1: Tile(16, 32, 128, 4, 5, ctas_k=2), 257: Tile(128, 256, 64, 8, 3, tma=True)}
    save_table(
        {"sm90/bfloat16/64x4096": tiles, "sm90/float16/8x8": {}}, other := tmp_path / "other.json"
    )
    assert load_table(other) == {"sm90/bfloat16/64x4096": tiles, "sm90/float16/8x8": {}}


def test_committed_tiles_are_candidates():
    for key, row in load_table().items():
        n, k = map(int, key.rpartition("/")[2].split("x"))
        for first, tile in row.items():
            tokens = TIMED[BUCKETS.index(first)]
            dtype = getattr(torch, key.split("/")[1])
            known = candidates(tokens, n, k, dtype, choose_split_k(n, k, "cuda"))
            assert tile in known, (key, first)


def tiles_of(backend, n: int, k: int, count: int) -> list[Tile]:
    """Return all tiles in bf16, and under the interpreter at the largest split_k; otherwise
    some."""
    if backend.interpreted:
        results = sorted({replace(tile, stages=1) for tile in TILES}, key=str)
        return results if count == 4 else results[::3]
    if backend.dtype == torch.float32:
        return [tile for tokens in TIMED for tile in candidates(tokens, n, k, backend.dtype)]
    return TILES if backend.dtype == torch.bfloat16 else TILES[::4]


@pytest.mark.default_cases("2")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", TRITON)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_tiles_change_no_bit(backend, count):
    """Every candidate of every bucket: the whole batch, one row, and another first row."""
    from lockstep.kernels.linear.triton import launch

    rows, n, k = (300, 1008, 4096) if backend.on_gpu else (18, 40, 1024)
    x, weight = operands(backend, rows, n, k, count)
    tiles = tiles_of(backend, n, k, count)
    full = launch(x, weight, count, tiles[0])
    assert count == 1 or not same_bits(full, launch(x, weight, 1, tiles[0]))
    for tile in tiles:
        for part, want in ((x, full), (x[1:2], full[1:2]), (x[5:], full[5:])):
            assert same_bits(launch(part, weight, count, tile), want), (tile, len(part))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", TRITON)
@pytest.mark.parametrize(("k", "count"), [(2048, 8), (2560, 4)])
def test_tiles_of_few_outputs_change_no_bit(backend, k, count):
    """Every tile, in the batch and alone, and the outputs of one rank of several."""
    from lockstep.kernels.linear.triton import launch

    rows, n = (300, 96) if backend.on_gpu else (18, 40)
    x, weight = operands(backend, rows, n, k, count)
    share = weight[n // 4 : n // 2].contiguous()
    every = dict.fromkeys(
        tile for tokens in TIMED for tile in candidates(tokens, n, k, torch.bfloat16, count)
    )
    tiles = [replace(tile, stages=1) if backend.interpreted else tile for tile in every]
    full = linear(x, weight, count) if backend.interpreted else launch(x, weight, count, tiles[0])
    assert not same_bits(full, launch(x, weight, 2, tiles[0]))
    for tile in tiles:
        assert same_bits(launch(x, weight, count, tile), full), tile
        assert same_bits(launch(x[1:2], weight, count, tile), full[1:2]), tile
        assert same_bits(launch(x, share, count, tile), full[:, n // 4 : n // 2]), tile
        partials = launch(x, weight, count, tile, allow_partials=True)
        assert same_bits(sum_partials(partials, x.dtype), full), tile
        out = torch.empty_like(full)
        assert same_bits(launch(x, weight, count, tile, out=out), full), tile


@pytest.mark.gpu
def test_tuning_returns_sorted_candidates():
    from lockstep.kernels.linear.triton import launch

    times = tune(launch, 16, random_weights(512, 2048, torch.bfloat16), 2)
    assert [seconds for seconds, _ in times] == sorted(seconds for seconds, _ in times)
    assert {tile for _, tile in times} == set(candidates(16, 512, 2048, torch.bfloat16, 2))
