"""Which tile makes a linear fast: a committed table, a rule where it is silent, and the tuner.

A tile never changes a bit (tests/kernels/test_linear.py), so the table may be edited, measured
again or lost. Its keys are "arch/dtype/NxK" and, inside, the first token count of a bucket.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.kernels.timing import seconds_per_call

TABLE = Path(__file__).with_name("tuning.json")
BUCKETS = (1, 2, 5, 9, 17, 33, 65, 129, 193, 257, 769, 4097)
"""The first token count of each bucket."""
TIMED = (1, 4, 8, 16, 32, 64, 128, 192, 256, 512, 2048, 8192)
"""The token count that each bucket is tuned at."""
SPREAD = 1 << 30
"""Bytes of distinct weights that a measurement walks through: even of the largest, a few."""
LAUNCHES = 12
"""At least so many stand in the graph of a measurement."""
REPLAYS = 3
"""Of that graph; the best counts."""


@dataclass(frozen=True)
class Tile:
    """How a launch is cut.

    m, n, k: tokens, outputs and columns per block, powers of two; n may be the sum of up to three
    of them, of 16 at least, where tma loads and swap is off. split: programs along K, at most the
    split_k; more than one costs a second pass, or a reader that adds. swap: weights are the left
    operand, so that a few tokens fill a wgmma. tma: the bulk copy engine loads, where it exists and
    rows are aligned.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    split: int = 1
    swap: bool = False
    tma: bool = False


T = TypeVar("T")
Table = dict[str, dict[int, Tile]]
Run = Callable[[Tensor, Tensor, int, Tile], Tensor]
FLOATS_FEW = (
    Tile(16, 32, 32, 2, 4, split=16),
    Tile(16, 16, 32, 4, 3, split=16),
    Tile(16, 64, 32, 4, 3, split=16),
)
"""Tiles of fp32 for up to 64 tokens, on any GPU; products are chains of FMA in ascending order. us
on an H200, 256 x 7168 and 128 x 2688, 1 token: 14.2 and 9.2, 19.9 and 8.1, 20.9 and 13.0; 64
tokens: 39.1 and 12.3, 75.2 and 18.2, 37.8 and 13.2. All take 32 columns at a time: the interpreter
adds them up by themselves."""
FLOATS_HOPPER = (
    Tile(1, 32, 64, 1, 4, split=16),
    Tile(1, 16, 256, 2, 1, split=16),
    Tile(8, 32, 64, 2, 3, split=16),
    Tile(8, 16, 256, 2, 1, split=16),
    Tile(16, 32, 64, 2, 3, split=16),
    Tile(16, 64, 32, 2, 3, split=16),
)
"""More of them, timed on an H200: the fewer the warps that read the same weights out of shared
memory, the better, since each of them meets the same conflicts of banks. us as above, 1 token: 7.7
and 5.6, 12.8 and 4.4; 8 tokens, where the first of the others take 14.2 and 9.3: 11.6 and 7.1, 13.7
and 5.1; 64 tokens: 38.5 and 11.4, 35.9 and 13.4."""
FLOATS_MANY = (
    Tile(128, 128, 32, 8, 2, split=16),
    Tile(64, 128, 32, 8, 2, split=4),
)
"""Tiles of fp32 for more tokens. 256 x 7168 at 256, 2,048 and 8,192 tokens, us: 97, 383 and 1,493;
317, 630 and 2,466. Sums of all split_k in one program took 1,092 us at 2,048."""


def _floats(tokens: int) -> tuple[Tile, ...]:
    """fp32. A weight of fewer split_k than a tile's split has fewer programs."""
    if tokens > 64:
        return FLOATS_MANY
    least = next(tile.m for tile in FLOATS_HOPPER if tile.m >= min(tokens, 16))
    return *(tile for tile in FLOATS_HOPPER if tile.m == least), *FLOATS_FEW


def bucket(tokens: int) -> int:
    """The first token count of the bucket that holds `tokens`."""
    return BUCKETS[max(bisect_right(BUCKETS, tokens), 1) - 1]


def _few(m: int, wide: bool) -> list[Tile]:
    """At most 32 tokens: the weights' bytes are all that counts."""
    tiles = [Tile(m, 64, 128, 4, 4), Tile(m, 32, 128, 4, 5)]
    return tiles[:: 1 if wide else -1] + [
        Tile(m, 32, 256, 4, 4),
        Tile(m, 64, 128, 4, 4, tma=True),
        Tile(m, 64, 128, 4, 5, swap=True, tma=True),
        Tile(m, 128, 64, 4, 5, swap=True, tma=True),
        Tile(m, 64, 128, 4, 4, split=2, swap=True, tma=True),
        Tile(m, 64, 128, 4, 5, split=2, swap=True, tma=True),
        Tile(m, 64, 128, 4, 7, split=2, swap=True, tma=True),
        Tile(m, 64, 256, 4, 3, swap=True, tma=True),
        Tile(m, 64, 256, 4, 3, split=2, swap=True, tma=True),
        *(Tile(m, 64, 128, 4, stages, swap=True, tma=True) for stages in (3, 4) if m > 16),
        *(Tile(m, 64, 256, 4, 5, split, swap=True, tma=True) for split in (1, 2) if m == 16),
    ]


def _some() -> list[Tile]:
    """33 .. 64 tokens: x is read once per column tile, so column tiles grow."""
    return [
        Tile(64, 64, 128, 4, 3, tma=True),
        Tile(64, 64, 64, 4, 6, tma=True),
        Tile(64, 96, 64, 4, 5, tma=True),
        Tile(64, 128, 64, 4, 4, tma=True),
        Tile(64, 144, 64, 4, 3, tma=True),
        Tile(64, 128, 64, 8, 4, swap=True, tma=True),
        Tile(64, 128, 128, 8, 4, swap=True, tma=True),
        Tile(64, 64, 128, 4, 3, split=2, tma=True),
        Tile(64, 64, 64, 4, 6, split=2, tma=True),
        Tile(64, 64, 128, 4, 4, split=2, swap=True, tma=True),
        Tile(64, 64, 128, 4, 6, split=2, swap=True, tma=True),
        Tile(64, 64, 256, 4, 3, swap=True, tma=True),
    ]


def _hundreds() -> list[Tile]:
    """65 .. 256 tokens: between the memory wall and the tensor cores; turns are few."""
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
        Tile(64, 144, 64, 4, 4, split=2, tma=True),
        Tile(128, 64, 64, 4, 4, split=2, tma=True),
        Tile(128, 80, 64, 4, 4, split=2, tma=True),
        Tile(128, 160, 64, 8, 5, split=2, tma=True),
    ]


def _many() -> list[Tile]:
    """A prompt's tokens: the largest tiles that two warp groups hold, one for narrow weights."""
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
"""Outputs of a weight, at most, whose tiles are too few to keep a GPU busy."""
NARROWER = 512
"""The same, at most, for small tiles by rule: 96 x 5120 and 64 x 2048 are within 7 % of their best
by it at 32 to 2,048 tokens, where wide tiles take twice as long (benchmarks/RESULTS.md)."""


def _narrow(tokens: int) -> list[Tile]:
    """More than 16 tokens and few outputs: small tiles, so that there are more of them, of long
    blocks, so that a program's chain has few turns."""
    few = [
        Tile(16, 64, 256, 4, 3, swap=True, tma=True),
        Tile(16, 64, 128, 4, 4, split=2, swap=True, tma=True),
        Tile(16, 64, 256, 4, 3, split=2, swap=True, tma=True),
        Tile(32, 16, 256, 4, 5, tma=True),
        Tile(32, 64, 128, 4, 4, split=2, swap=True, tma=True),
        Tile(32, 64, 256, 4, 3, swap=True, tma=True),
        Tile(32, 64, 256, 4, 3, split=2, swap=True, tma=True),
    ]
    some = [
        Tile(64, 16, 256, 4, 3, tma=True),
        Tile(64, 16, 256, 4, 3, split=2, tma=True),
        Tile(64, 64, 128, 4, 4, split=2, tma=True),
        Tile(64, 64, 256, 4, 3, tma=True),
        Tile(64, 128, 128, 4, 4, split=2, tma=True),
    ]
    many = [
        Tile(64, 32, 256, 4, 3, tma=True),
        Tile(64, 16, 256, 4, 3, tma=True),
        Tile(64, 32, 128, 4, 4, tma=True),
        Tile(64, 64, 128, 4, 4, split=2, tma=True),
        Tile(64, 128, 64, 4, 5, swap=True, tma=True),
        Tile(64, 128, 128, 4, 4, tma=True),
        Tile(128, 64, 128, 4, 4, tma=True),
    ]
    if tokens <= 64:
        return few
    return some + few if tokens <= 256 else many


def _modest(tokens: int, dtype: torch.dtype) -> Tile:
    """A tile for any GPU since Ampere, and for the interpreter."""
    if dtype == torch.float32:
        return FLOATS_FEW[0] if tokens <= 64 else FLOATS_MANY[0]
    if tokens <= 16:
        return Tile(16, 64, 64, 4, 4)
    return Tile(64, 64, 64, 4, 4) if tokens <= 64 else Tile(128, 128, 32, 8, 3)


def candidates(tokens: int, n: int, k: int, dtype: torch.dtype, split_k: int = 1) -> list[Tile]:
    """Tiles worth timing on Hopper, a dozen, or two for narrow weights; the first serves where
    nothing was timed."""
    if dtype == torch.float32:
        return list(_floats(tokens))
    if tokens <= 32:
        tiles = _few(16 if tokens <= 16 else 32, n >= 8192)
    elif tokens <= 64:
        tiles = _some()
    else:
        tiles = _hundreds() if tokens <= 256 else _many()
    if n <= NARROW and tokens > 16:
        narrow = _narrow(tokens)
        tiles = [*narrow, *tiles] if n <= NARROWER else [*tiles, *narrow]
        tiles = list(dict.fromkeys(tiles))
    return [tile for tile in tiles if tile.split <= split_k and tile.k <= max(k, 64)]


def _key(n: int, k: int, dtype: torch.dtype, arch: str) -> str:
    return f"{arch}/{str(dtype).removeprefix('torch.')}/{n}x{k}"


def read(path: Path, kind: type[T]) -> dict[str, dict[int, T]]:
    """The table of such tiles in a file; empty where there is none."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return {
        key: {int(first): kind(**own) for first, own in row.items()} for key, row in found.items()
    }


@cache
def load(path: Path = TABLE) -> Table:
    """The table in a file; empty where there is none."""
    return read(path, Tile)


def save(table: Mapping[str, Mapping[int, Any]], path: Path = TABLE) -> None:
    """Writes a table of tiles, one per line, defaults left out."""
    blocks = []
    for key, row in sorted(table.items()):
        lines = []
        for first, tile in sorted(row.items()):
            values = ((field, getattr(tile, field.name)) for field in fields(tile))
            own = {field.name: value for field, value in values if value != field.default}
            lines.append(f'    "{first}": {json.dumps(own)}')
        blocks.append(f'  "{key}": {{\n' + ",\n".join(lines) + "\n  }")
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


@cache
def _tile(first: int, n: int, k: int, dtype: torch.dtype, arch: str) -> Tile:
    known = load().get(_key(n, k, dtype, arch), {})
    timed = [count for count in known if count <= first]
    if timed:
        return known[max(timed)]
    return candidates(first, n, k, dtype)[0] if arch == "sm90" else _modest(first, dtype)


def lookup(tokens: int, n: int, k: int, dtype: torch.dtype, arch: str) -> Tile:
    """The tile for `tokens` rows against a weight [n, k] on a GPU of this architecture."""
    return _tile(bucket(tokens), n, k, dtype, arch)


def seconds(run: Callable[[T], object], weights: Sequence[T]) -> float:
    """Seconds per launch in a replayed graph that walks through the weights: best of REPLAYS."""
    rounds = -(-LAUNCHES // len(weights))
    calls = [partial(run, weight) for weight in list(weights) * rounds]
    return seconds_per_call(calls, "cuda", REPLAYS, pick=min)


def some_weights(n: int, k: int, dtype: torch.dtype) -> list[Tensor]:
    """Weights [n, k] on the GPU, SPREAD bytes of them or 64: small models do live in the cache."""
    count = min(64, -(-SPREAD // (n * k * dtype.itemsize)))
    return [torch.randn(n, k, dtype=dtype, device="cuda") for _ in range(count)]


def tune(
    run: Run, tokens: int, weights: Sequence[Tensor], split_k: int
) -> list[tuple[float, Tile]]:
    """(seconds, tile) of each candidate, fastest first; `run` is launch of the Triton backend."""
    (n, k) = weights[0].shape
    dtype = weights[0].dtype
    x = torch.randn(tokens, k, dtype=dtype, device="cuda")

    def timed(tile: Tile) -> tuple[float, Tile]:
        return seconds(lambda weight: run(x, weight, split_k, tile), weights), tile

    tiles = candidates(tokens, n, k, dtype, split_k)
    timed(tiles[0])  # clocks rise under load
    return sorted(map(timed, tiles), key=lambda pair: pair[0])
