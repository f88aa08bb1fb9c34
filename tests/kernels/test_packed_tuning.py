"""Tiles of linear with a packed weight: the table is read, and no tile changes a bit."""

from dataclasses import replace

import pytest
import torch

from lockstep.kernels.linear import linear, packed_tuning
from lockstep.kernels.linear.packed_tuning import (
    BUCKETS,
    TIMED,
    UNPACK,
    PackedTile,
    bucket,
    candidates,
    key,
    lookup,
)
from lockstep.kernels.packed.cases import random_weights
from tests.kernels.backends import Backend, backends, same_bits
from tests.kernels.test_linear import graded
from tests.kernels.test_packed import whole_numbers

TRITON = [backend for backend in backends() if backend.values[0].name == "triton"]
CUTS = {
    (tile.m, tile.n, tile.k): tile
    for tokens in TIMED
    for tile in candidates(tokens, 2)
    if tile != UNPACK
}
"""A tile of each size: warps, stages and registers are the compiler's alone."""
TUNED = ("int4", "int4 asymmetric", "fp8 by blocks", "nvfp4")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("cut", sorted(CUTS))
@pytest.mark.parametrize("backend", TRITON)
def test_no_tile_changes_a_bit(cut: tuple[int, int, int], backend: Backend) -> None:
    """Rows that no tile divides, two segments; a GPU takes all layouts, an interpreter one."""
    from lockstep.kernels.linear.packed import launch, target_of

    if backend.interpreted:
        backend = replace(backend, dtype=torch.float16)
    few = sorted(CUTS).index(cut) % len(TUNED)
    for name in TUNED if backend.on_gpu else TUNED[few : few + 1]:
        weight = backend.place(whole_numbers(name, 40, 1024))
        x = backend.place(graded(5, 1024, 2, 3).to(backend.dtype))
        want = linear.backends["triton"].run(x, weight.unpack(x.dtype), 2)
        assert same_bits(launch(x, weight, 2, CUTS[cut], target_of(x.device)), want), name


def test_candidates_are_few_and_fit() -> None:
    for tokens in TIMED:
        for segments in (1, 2):
            tiles = candidates(tokens, segments)
            assert len(tiles) <= 10 and len(set(tiles)) == len(tiles)
            assert all(tile == UNPACK or (tile.m >= 16 and tile.k % 128 == 0) for tile in tiles)
            assert tiles[0] != UNPACK


def test_lookup_takes_the_bucket_below(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = dict(random_weights(64, 256))["int4"]
    best = PackedTile(8, 64, 128)
    table = {key(weight, torch.bfloat16, 90): {5: best, 129: UNPACK}}
    packed_tuning._tile.cache_clear()
    monkeypatch.setattr(packed_tuning, "load", lambda: table)
    assert lookup(8, weight, 1, torch.bfloat16, 90) == best
    assert lookup(100, weight, 1, torch.bfloat16, 90) == best
    assert lookup(200, weight, 1, torch.bfloat16, 90) == UNPACK
    assert lookup(4, weight, 1, torch.bfloat16, 90) == candidates(4, 1)[0]
    assert lookup(4, weight, 1, torch.bfloat16, 80).k == 128
    packed_tuning._tile.cache_clear()
    assert [bucket(tokens) for tokens in TIMED] == list(BUCKETS)


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
