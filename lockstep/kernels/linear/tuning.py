"""Tiles of linear with a dense weight: a measured table, a rule for other weights, a tuner.

A tile never changes a bit (tests/kernels/test_linear.py), so the table may be edited, measured
again or deleted. Its keys are "arch/dtype/NxK" and, inside, the first token count of a bucket.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.kernels.linear.contract import FEW_OUTPUTS
from lockstep.kernels.timing import seconds_per_call

TABLE = Path(__file__).with_name("tuning.json")
BUCKETS = (1, 2, 5, 9, 17, 33, 65, 129, 193, 257, 769, 4097)
"""The first token count of each bucket."""
TIMED = (1, 4, 8, 16, 32, 64, 128, 192, 256, 512, 2048, 8192)
"""The token count that each bucket is tuned at."""
SPREAD = 1 << 30
"""Bytes of distinct weights that a measurement walks through, so that L2 does not serve it."""
LAUNCHES = 12
"""Minimum launches in the graph of a measurement."""
REPLAYS = 3
"""Replays of that graph; the fastest counts."""


@dataclass(frozen=True)
class Tile:
    """Tile of a launch.

    m, n, k: tokens, outputs and columns per block, powers of two; n may be the sum of up to three
    of them, 16 at least each, where tma is on and swap is off. ctas_k: CTAs along K, at most
    split_k; each adds split_k / ctas_k split-K partitions. More than one costs a reduction pass, or
    a consumer that adds. swap: the weight is the left operand, so that a few tokens fill the N side
    of a wgmma. tma: TMA loads, where it exists and rows are aligned.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    ctas_k: int = 1
    swap: bool = False
    tma: bool = False


T = TypeVar("T")
Table = dict[str, dict[int, Tile]]
RunTile = Callable[[Tensor, Tensor, int, Tile], Tensor]
FP32_SMALL = (
    Tile(16, 32, 32, 2, 4, ctas_k=16),
    Tile(16, 16, 32, 4, 3, ctas_k=16),
    Tile(16, 64, 32, 4, 3, ctas_k=16),
)
"""Tiles of fp32 for up to 64 tokens, on any GPU. Products are chains of FMAs in ascending order.
All tiles have k 32: Triton's interpreter adds such blocks in the same order. us of each tile on an
H200, for 256 x 7168 and 128 x 2688. 1 token: 14.2 and 9.2, 19.9 and 8.1, 20.9 and 13.0. 64 tokens:
39.1 and 12.3, 75.2 and 18.2, 37.8 and 13.2.
"""
FP32_HOPPER = (
    Tile(1, 32, 64, 1, 4, ctas_k=16),
    Tile(1, 16, 256, 2, 1, ctas_k=16),
    Tile(8, 32, 64, 2, 3, ctas_k=16),
    Tile(8, 16, 256, 2, 1, ctas_k=16),
    Tile(16, 32, 64, 2, 3, ctas_k=16),
    Tile(16, 64, 32, 2, 3, ctas_k=16),
)
"""Tiles of fp32 for up to 64 tokens on Hopper, timed before FP32_SMALL's. Few warps are fast: all
warps of a CTA read the same weights from shared memory, each with the same bank conflicts. us of
each pair of tiles, as above. 1 token: 7.7 and 5.6, 12.8 and 4.4. 8 tokens: 11.6 and 7.1, 13.7 and
5.1, where the first of FP32_SMALL takes 14.2 and 9.3. 64 tokens: 38.5 and 11.4, 35.9 and 13.4."""
FP32_LARGE = (
    Tile(128, 128, 32, 8, 2, ctas_k=16),
    Tile(64, 128, 32, 8, 2, ctas_k=4),
)
"""Tiles of fp32 for more tokens. 256 x 7168 at 256, 2,048 and 8,192 tokens, us: 97, 383 and 1,493;
317, 630 and 2,466. One CTA for all partitions took 1,092 us at 2,048."""


def _fp32_tiles(tokens: int) -> tuple[Tile, ...]:
    """Return the tiles worth timing in fp32.

    A weight of fewer partitions than a tile's ctas_k has fewer CTAs along K.
    """
    if tokens > 64:
        return FP32_LARGE
    min_m = next(tile.m for tile in FP32_HOPPER if tile.m >= min(tokens, 16))
    return *(tile for tile in FP32_HOPPER if tile.m == min_m), *FP32_SMALL


def bucket(tokens: int) -> int:
    """Return the first token count of the bucket of `tokens`."""
    return BUCKETS[max(bisect_right(BUCKETS, tokens), 1) - 1]


def _tiles_up_to_32(m: int, wide: bool) -> list[Tile]:
    """Return tiles for 1 .. 32 tokens: reading the weights is the bound."""
    tiles = [Tile(m, 64, 128, 4, 4), Tile(m, 32, 128, 4, 5)]
    return tiles[:: 1 if wide else -1] + [
        Tile(m, 32, 256, 4, 4),
        Tile(m, 64, 128, 4, 4, tma=True),
        Tile(m, 64, 128, 4, 5, swap=True, tma=True),
        Tile(m, 128, 64, 4, 5, swap=True, tma=True),
        Tile(m, 64, 128, 4, 4, ctas_k=2, swap=True, tma=True),
        Tile(m, 64, 128, 4, 5, ctas_k=2, swap=True, tma=True),
        Tile(m, 64, 128, 4, 7, ctas_k=2, swap=True, tma=True),
        Tile(m, 64, 256, 4, 3, swap=True, tma=True),
        Tile(m, 64, 256, 4, 3, ctas_k=2, swap=True, tma=True),
        *(Tile(m, 64, 128, 4, stages, swap=True, tma=True) for stages in (3, 4) if m > 16),
        *(Tile(m, 64, 256, 4, 5, ctas_k, swap=True, tma=True) for ctas_k in (1, 2) if m == 16),
    ]


def _tiles_up_to_64() -> list[Tile]:
    """Return tiles for 33 .. 64 tokens: x is read once per column tile, so column tiles grow."""
    return [
        Tile(64, 64, 128, 4, 3, tma=True),
        Tile(64, 64, 64, 4, 6, tma=True),
        Tile(64, 96, 64, 4, 5, tma=True),
        Tile(64, 128, 64, 4, 4, tma=True),
        Tile(64, 144, 64, 4, 3, tma=True),
        Tile(64, 128, 64, 8, 4, swap=True, tma=True),
        Tile(64, 128, 128, 8, 4, swap=True, tma=True),
        Tile(64, 64, 128, 4, 3, ctas_k=2, tma=True),
        Tile(64, 64, 64, 4, 6, ctas_k=2, tma=True),
        Tile(64, 64, 128, 4, 4, ctas_k=2, swap=True, tma=True),
        Tile(64, 64, 128, 4, 6, ctas_k=2, swap=True, tma=True),
        Tile(64, 64, 256, 4, 3, swap=True, tma=True),
    ]


def _tiles_up_to_256() -> list[Tile]:
    """Return tiles for 65 .. 256 tokens, between the memory bound and the tensor core bound."""
    return [
        Tile(128, 128, 64, 4, 3, tma=True),
        Tile(64, 128, 64, 4, 4, tma=True),
        Tile(64, 224, 64, 4, 3, tma=True),
        Tile(128, 64, 64, 4, 4, tma=True),
        Tile(128, 80, 64, 4, 4, tma=True),
        Tile(128, 128, 64, 8, 4, tma=True),
        Tile(128, 144, 64, 8, 6, tma=True),
        Tile(128, 192, 64, 8, 4, tma=True),
        Tile(256, 128, 64, 8, 4, tma=True),
        Tile(64, 144, 64, 4, 4, ctas_k=2, tma=True),
        Tile(128, 64, 64, 4, 4, ctas_k=2, tma=True),
        Tile(128, 80, 64, 4, 4, ctas_k=2, tma=True),
        Tile(128, 160, 64, 8, 5, ctas_k=2, tma=True),
    ]


def _prompt_tiles() -> list[Tile]:
    """Return tiles for a prompt's tokens:

    the largest that two warpgroups hold, one for narrow weights.
    """
    return [
        Tile(128, 256, 64, 8, 4, tma=True),
        Tile(128, 256, 64, 8, 3, tma=True),
        Tile(256, 128, 64, 8, 4, tma=True),
        Tile(256, 128, 64, 8, 3, tma=True),
        Tile(128, 128, 64, 4, 3, tma=True),
        Tile(128, 128, 64, 8, 4, tma=True),
        Tile(128, 80, 64, 4, 4, tma=True),
        Tile(128, 192, 64, 8, 4, tma=True),
        Tile(64, 64, 128, 4, 4, tma=True),
    ]


NARROW = 2048
"""Maximum outputs of a weight whose tiles are too few to occupy a GPU."""
VERY_NARROW = 512
"""Maximum outputs where small tiles are the rule's first choice. With one or two split-K partitions
96 x 5120 and 64 x 2048 were within 7 % of their best by it at 32 to 2,048 tokens, where wide tiles
took twice as long."""

RULE_COLUMNS = 512
"""Minimum columns of a weight that the rule for weights without measurements serves."""
RULE_WIDTH = 10_000
"""Minimum outputs of a weight for which that rule takes wide tiles. The minimum is twice as large
at up to 64 tokens, and three fifths of it for a prompt."""


def _partitioned_tiles(tokens: int) -> list[Tile]:
    """Return tiles for a 16-bit weight of few outputs: each split-K partition has a CTA.

    Blocks of 128 columns divide its partitions. At one token a CTA of 16 outputs and 640 columns
    reads 20 KB of weights. docs/kernels/linear.md has the times.
    """
    if tokens <= 16:
        return [
            Tile(16, 16, 128, 4, 5, ctas_k=8),
            Tile(16, 16, 128, 2, 5, ctas_k=8),
            Tile(16, 32, 128, 4, 5, ctas_k=8),
            Tile(16, 64, 128, 4, 5, ctas_k=8, swap=True, tma=True),
        ]
    if tokens <= 64:
        return [
            Tile(64, 16, 128, 4, 5, ctas_k=8, tma=True),
            Tile(64, 32, 128, 4, 5, ctas_k=8, tma=True),
            Tile(32, 16, 128, 4, 5, ctas_k=8, tma=True),
            Tile(16, 64, 128, 4, 5, ctas_k=8, swap=True, tma=True),
        ]
    return [
        Tile(64, 32, 128, 4, 4, ctas_k=8, tma=True),
        Tile(64, 16, 128, 4, 5, ctas_k=8, tma=True),
        Tile(64, 64, 128, 4, 4, ctas_k=8, tma=True),
        Tile(64, 96, 128, 4, 3, ctas_k=8, tma=True),
    ]


def _narrow_tiles(tokens: int) -> list[Tile]:
    """Return tiles for more than 16 tokens and few outputs.

    They are small, so that there are more of them, with long blocks, so that a CTA's chain has few
    iterations.
    """
    few = [
        Tile(16, 64, 256, 4, 3, swap=True, tma=True),
        Tile(16, 64, 128, 4, 4, ctas_k=2, swap=True, tma=True),
        Tile(16, 64, 256, 4, 3, ctas_k=2, swap=True, tma=True),
        Tile(32, 16, 256, 4, 5, tma=True),
        Tile(32, 64, 128, 4, 4, ctas_k=2, swap=True, tma=True),
        Tile(32, 64, 256, 4, 3, swap=True, tma=True),
        Tile(32, 64, 256, 4, 3, ctas_k=2, swap=True, tma=True),
    ]
    some = [
        Tile(64, 16, 256, 4, 3, tma=True),
        Tile(64, 16, 256, 4, 3, ctas_k=2, tma=True),
        Tile(64, 64, 128, 4, 4, ctas_k=2, tma=True),
        Tile(64, 64, 256, 4, 3, tma=True),
        Tile(64, 128, 128, 4, 4, ctas_k=2, tma=True),
    ]
    many = [
        Tile(64, 32, 256, 4, 3, tma=True),
        Tile(64, 16, 256, 4, 3, tma=True),
        Tile(64, 32, 128, 4, 4, tma=True),
        Tile(64, 64, 128, 4, 4, ctas_k=2, tma=True),
        Tile(64, 128, 64, 4, 5, swap=True, tma=True),
        Tile(64, 128, 128, 4, 4, tma=True),
        Tile(128, 64, 128, 4, 4, tma=True),
    ]
    if tokens <= 64:
        return few
    return some + few if tokens <= 256 else many


def _has_many_partitions(n: int, dtype: torch.dtype, split_k: int) -> bool:
    """Return whether a weight has the partitions of few outputs: see choose_split_k."""
    return n <= FEW_OUTPUTS and dtype != torch.float32 and split_k > 2


def _fallback_tile(tokens: int, n: int, k: int, dtype: torch.dtype, split_k: int) -> Tile:
    """Return a tile for any GPU since Ampere, and for Triton's interpreter.

    A weight of few outputs has half of Hopper's columns per block, since there is less shared
    memory.
    """
    if dtype == torch.float32:
        return FP32_SMALL[0] if tokens <= 64 else FP32_LARGE[0]
    if _has_many_partitions(n, dtype, split_k):
        return replace(candidates(tokens, n, k, dtype, split_k)[0], k=64, tma=False)
    if tokens <= 16:
        return Tile(16, 64, 64, 4, 4)
    return Tile(64, 64, 64, 4, 4) if tokens <= 64 else Tile(128, 128, 32, 8, 3)


def candidates(tokens: int, n: int, k: int, dtype: torch.dtype, split_k: int = 1) -> list[Tile]:
    """Return tiles worth timing on Hopper."""
    if dtype == torch.float32:
        return list(_fp32_tiles(tokens))
    if _has_many_partitions(n, dtype, split_k):
        tiles = _partitioned_tiles(tokens)
        return [replace(tile, ctas_k=min(tile.ctas_k, split_k)) for tile in tiles]
    if tokens <= 32:
        tiles = _tiles_up_to_32(16 if tokens <= 16 else 32, n >= 8192)
    elif tokens <= 64:
        tiles = _tiles_up_to_64()
    else:
        tiles = _tiles_up_to_256() if tokens <= 256 else _prompt_tiles()
    if n <= NARROW and tokens > 16:
        narrow = _narrow_tiles(tokens)
        tiles = [*narrow, *tiles] if n <= VERY_NARROW else [*tiles, *narrow]
        tiles = list(dict.fromkeys(tiles))
    return [tile for tile in tiles if tile.ctas_k <= split_k and tile.k <= max(k, 64)]


def _table_key(n: int, k: int, dtype: torch.dtype, arch: str) -> str:
    return f"{arch}/{str(dtype).removeprefix('torch.')}/{n}x{k}"


def read_table(path: Path, kind: type[T]) -> dict[str, dict[int, T]]:
    """Read a table of such tiles from a file; an empty one where there is no file."""
    rows = json.loads(path.read_text()) if path.exists() else {}
    return {
        key: {int(first): kind(**tile) for first, tile in row.items()} for key, row in rows.items()
    }


@cache
def load_table(path: Path = TABLE) -> Table:
    """Return the table of a file; an empty one where there is no file."""
    return read_table(path, Tile)


def save_table(table: Mapping[str, Mapping[int, Any]], path: Path = TABLE) -> None:
    """Write a table of tiles, one per line, without fields that have their default."""
    blocks = []
    for key, row in sorted(table.items()):
        lines = []
        for first, tile in sorted(row.items()):
            values = ((field, getattr(tile, field.name)) for field in fields(tile))
            changed = {field.name: value for field, value in values if value != field.default}
            lines.append(f'    "{first}": {json.dumps(changed)}')
        blocks.append(f'  "{key}": {{\n' + ",\n".join(lines) + "\n  }")
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def _rule_tile(tokens: int, n: int, k: int, dtype: torch.dtype, split_k: int) -> Tile:
    """Return a tile on Hopper for a weight that was not timed, such as a rank's share of columns.

    Few outputs need several CTAs along K. H200, 2560 x 17408, one token: 23.1 us, where the first
    candidate takes 43.0. The tiles of this rule are the best of some shares of Qwen3.6-27B and
    35B-A3B for two ranks; their times in other shares were not compared (docs/lab/linear.md).
    """
    timed = candidates(tokens, n, k, dtype, split_k)
    if dtype == torch.float32 or n <= VERY_NARROW or k < RULE_COLUMNS:
        return timed[0]
    ctas_k = min(split_k, 2)
    if tokens <= 16:
        return Tile(16, 64, 256, 4, 5, ctas_k, swap=True, tma=True)
    if tokens <= 32:
        return Tile(32, 64, 128, 4, 7 if ctas_k > 1 else 4, ctas_k, swap=True, tma=True)
    if tokens <= 64 and ctas_k > 1:
        return Tile(64, 64, 128, 4, 6, ctas_k, swap=True, tma=True)
    if tokens <= 64 and n >= 2 * RULE_WIDTH:
        return Tile(64, 96, 64, 4, 5, tma=True)
    if tokens <= 64:
        return Tile(64, 64, 256, 4, 3, swap=True, tma=True)
    if tokens <= 256 and n < RULE_WIDTH and ctas_k > 1:
        return Tile(128, 64, 64, 4, 4, ctas_k, tma=True)
    if tokens <= 256 and n < RULE_WIDTH:
        return Tile(64, 128, 64, 4, 4, tma=True)
    if tokens <= 256 or n <= NARROW:
        return timed[0]
    if n < RULE_WIDTH * 3 // 5:
        return Tile(128, 128, 64, 4, 3, tma=True)
    return Tile(256, 128, 64, 8, 4, tma=True)


@cache
def _choose_tile(first: int, n: int, k: int, dtype: torch.dtype, arch: str, split_k: int) -> Tile:
    known = load_table().get(_table_key(n, k, dtype, arch), {})
    timed = [count for count in known if count <= first]
    if timed:
        return known[max(timed)]
    if arch != "sm90":
        return _fallback_tile(first, n, k, dtype, split_k)
    return _rule_tile(first, n, k, dtype, split_k)


def lookup(tokens: int, n: int, k: int, dtype: torch.dtype, arch: str, split_k: int = 1) -> Tile:
    """Return the tile for `tokens` rows of a weight [n, k] on a GPU of an architecture."""
    return _choose_tile(bucket(tokens), n, k, dtype, arch, split_k)


def seconds(
    run: Callable[[T], object], weights: Sequence[T], min_launches: int = LAUNCHES
) -> float:
    """Return the seconds per launch in a replayed graph that walks through the weights."""
    rounds = -(-min_launches // len(weights))
    calls = [partial(run, weight) for weight in list(weights) * rounds]
    return seconds_per_call(calls, "cuda", REPLAYS, pick=min)


def random_weights(n: int, k: int, dtype: torch.dtype) -> list[Tensor]:
    """Return weights [n, k] on the GPU, SPREAD bytes of them, 64 at most.

    A small model's weights do stay in L2 when it runs.
    """
    count = min(64, -(-SPREAD // (n * k * dtype.itemsize)))
    return [torch.randn(n, k, dtype=dtype, device="cuda") for _ in range(count)]


def tune(
    run: RunTile, tokens: int, weights: Sequence[Tensor], split_k: int
) -> list[tuple[float, Tile]]:
    """Time each candidate: [(seconds, tile)], the fastest first. run: launch of triton.py."""
    (n, k) = weights[0].shape
    dtype = weights[0].dtype
    x = torch.randn(tokens, k, dtype=dtype, device="cuda")

    def timed(tile: Tile) -> tuple[float, Tile]:
        return seconds(lambda weight: run(x, weight, split_k, tile), weights), tile

    tiles = candidates(tokens, n, k, dtype, split_k)
    timed(tiles[0])  # warm-up: clocks rise under load
    return sorted(map(timed, tiles), key=lambda pair: pair[0])
