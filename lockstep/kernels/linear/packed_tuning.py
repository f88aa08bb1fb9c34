"""Which tile makes a linear with a packed weight fast: a table, a rule where it is silent, a tuner.

A tile never changes a bit (tests/kernels/test_packed_tuning.py). Keys of the table are
"arch/dtype/layout/NxK" and, inside, the first token count of a bucket.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from lockstep.kernels.architecture import HOPPER
from lockstep.kernels.linear import tuning
from lockstep.kernels.packed import Fp4Weight, Fp8Weight, IntWeight, PackedWeight
from lockstep.kernels.packed._form import group_of

TABLE = Path(__file__).with_name("packed_tuning.json")
BUCKETS = (1, 2, 5, 9, 17, 33, 65, 129)
"""The first token count of each bucket."""
TIMED = (1, 4, 8, 16, 32, 64, 128, 256)
"""The token count that each bucket is tuned at."""
MOST_WEIGHTS = 64
"""Of one layout and shape, for a measurement."""


@dataclass(frozen=True)
class PackedTile:
    """How a launch is cut. It decides the speed and nothing else.

    m, n, k: tokens, outputs and columns per block, powers of two, m 16 or more (8 would be another
    tree), k 128 or more; split: programs along K. registers: the most per thread, so that more
    programs fit a multiprocessor, 0: as the compiler likes. On Hopper n below 64, or fewer than 4
    warps, are multiplied by mma.sync, which has the same tree.
    """

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3
    split: int = 1
    registers: int = 0

    @property
    def warpgroup(self) -> bool:
        """Whether Hopper multiplies such a tile by wgmma."""
        return self.n >= 64 and self.warps % 4 == 0


UNPACK = PackedTile(0, 0, 0)
"""Stands for unpacking into memory, and the dense backend."""
Table = dict[str, dict[int, PackedTile]]
Run = Callable[[Tensor, PackedWeight, PackedTile], Tensor]


def bucket(tokens: int) -> int:
    """The first token count of the bucket that holds `tokens`."""
    return BUCKETS[max(bisect_right(BUCKETS, tokens), 1) - 1]


def _few(tokens: int, segments: int) -> list[PackedTile]:
    """At most 32 tokens: the chain of one program is slow, so many run on each multiprocessor."""
    m = 16 if tokens <= 16 else 32
    tiles = [
        PackedTile(m, 64, 256, 4, 3, segments, 128),
        PackedTile(m, 64, 256, 4, 3, segments, 96),
        PackedTile(m, 64, 256, 4, 4, segments),
        PackedTile(m, 64, 512, 4, 2, segments),
        PackedTile(m, 64, 128, 4, 4, segments, 96),
        PackedTile(m, 32, 128, 2, 4, segments, 128),
    ]
    if tokens <= 16:
        tiles.append(PackedTile(m, 64, 256, 4, 5, segments))
        tiles.append(PackedTile(m, 32, 256, 2, 3, segments))
    return tiles


def _some(segments: int) -> list[PackedTile]:
    """33 .. 64 tokens: an unpacked weight serves them all."""
    return [
        PackedTile(64, 64, 128, 4, 3, segments, 128),
        PackedTile(64, 64, 128, 4, 2, segments, 96),
        PackedTile(64, 64, 128, 4, 4, segments),
        PackedTile(64, 64, 256, 4, 2, segments),
        PackedTile(64, 128, 128, 4, 3, segments),
        PackedTile(64, 128, 128, 8, 4, segments),
        PackedTile(64, 128, 128, 8, 2, segments, 80),
    ]


def _hundreds(tokens: int, segments: int) -> list[PackedTile]:
    """65 .. 256 tokens: tiles as high as the tokens unpack a weight once."""
    tiles = [
        PackedTile(128, 64, 128, 4, 2, segments),
        PackedTile(128, 64, 128, 4, 3, segments),
        PackedTile(128, 128, 128, 8, 4, segments),
        PackedTile(128, 128, 128, 8, 2, segments, 128),
        PackedTile(64, 64, 128, 4, 3, segments, 128),
    ]
    if tokens > 128:
        tiles.append(PackedTile(256, 64, 128, 4, 2, segments))
        tiles.append(PackedTile(256, 128, 128, 8, 2, segments))
    return tiles


def candidates(tokens: int, segments: int) -> list[PackedTile]:
    """Tiles worth timing on Hopper, at most ten; the first serves where nothing was timed."""
    if tokens <= 32:
        return _few(tokens, segments)
    tiles = _some(segments) if tokens <= 64 else _hundreds(tokens, segments)
    return [*tiles, UNPACK] if tokens > 64 else tiles


def _modest(tokens: int) -> PackedTile:
    """A tile for any GPU since Ampere, and for the interpreter."""
    m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64 if tokens <= 64 else 128
    return PackedTile(m, 64, 128, stages=3 if m <= 64 else 2)


def layout_of(weight: PackedWeight) -> str:
    """What of a layout decides a tile's speed: bits, columns per scale, types."""
    group = group_of(weight)
    if isinstance(weight, Fp4Weight):
        return "nvfp4"
    if isinstance(weight, Fp8Weight):
        return f"fp8-{group}"
    assert isinstance(weight, IntWeight)
    kind = "asymmetric" if weight.zeros is not None else "symmetric"
    scales = str(weight.scales.dtype).removeprefix("torch.")
    return f"int{weight.bits}-{group}-{kind}-{scales}"


def key(weight: PackedWeight, dtype: torch.dtype, arch: int) -> str:
    """Where the table keeps the tiles of such a weight."""
    n, k = weight.shape
    name = str(dtype).removeprefix("torch.")
    return f"sm{arch}/{name}/{layout_of(weight)}/{n}x{k}"


@cache
def load(path: Path = TABLE) -> Table:
    """The table in a file; empty where there is none."""
    return tuning.read(path, PackedTile)


@cache
def _tile(first: int, name: str, segments: int, arch: int) -> PackedTile:
    known = load().get(name, {})
    timed = [count for count in known if count <= first]
    if timed:
        return known[max(timed)]
    return candidates(first, segments)[0] if arch == HOPPER else _modest(first)


def lookup(
    tokens: int, weight: PackedWeight, segments: int, dtype: torch.dtype, arch: int
) -> PackedTile:
    """The tile for `tokens` rows against a packed weight on a GPU of this architecture."""
    return _tile(bucket(tokens), key(weight, dtype, arch), segments, arch)


def some_weights(empty: Callable[[], PackedWeight]) -> list[PackedWeight]:
    """Random weights on the GPU, as many bytes of them as the tuner of dense ones takes."""
    generator = torch.Generator("cuda").manual_seed(0)
    found = [empty()]
    count = min(MOST_WEIGHTS, -(-tuning.SPREAD // found[0].nbytes))
    found += [empty() for _ in range(count - 1)]
    for weight in found:
        weight.dummy(generator)
    return found


def tune(
    run: Run,
    refusal: Callable[[Tensor, PackedWeight, PackedTile], str | None],
    tokens: int,
    weights: Sequence[PackedWeight],
    segments: int,
    dtype: torch.dtype,
) -> tuple[list[tuple[float, PackedTile]], dict[PackedTile, str]]:
    """(seconds, tile) of each candidate, fastest first; and why others must not be used."""
    x = torch.randn(tokens, weights[0].shape[1], dtype=dtype, device="cuda")
    refused = {}
    found = []
    for tile in candidates(tokens, segments):
        reason = refusal(x, weights[0], tile)
        if reason is not None:
            refused[tile] = reason
            continue
        call = partial(_timed, run, x, tile)
        found.append((tuning.seconds(call, weights), tile))
    return sorted(found, key=lambda pair: pair[0]), refused


def _timed(run: Run, x: Tensor, tile: PackedTile, weight: PackedWeight) -> object:
    return run(x, weight, tile)
