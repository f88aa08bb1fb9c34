"""How experts are cut into tiles. No tile changes a bit; each was chosen by what it says here."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lockstep.kernels.architecture import HOPPER, fit_stages
from lockstep.kernels.formats.weights import Fp4Weight, GgufWeight, QuantizedWeight
from lockstep.kernels.formats.weights.operand import columns_of, multiplies_by_mma_sync, stages_of

FEW_PAIRS = 128
"""The most pairs of a token and a slot without a sort: each program finds the pairs of its expert
among all, in a block of 16 x 128 comparisons, 16 in each of its threads."""
FEW_OF_EXPERTS = 2
"""And at most as many pairs as 1 / 2 of the experts: each token reads down of its own experts, also
where another token chose the same. With random choices that is 1.27 times the bytes at P = E / 2,
1.58 times at P = E. What is read again comes from L2, which is about 1.3 times as fast as memory
(5.5 TB/s, an estimate): up to E / 2 it costs nothing, at 3 / 4 of E as much as the sort, the sum
and one launch more (7 us), docs/kernels/experts.md."""
FEW_OF_PACKED = 8
"""Where down is packed, at most 1 / 8 of the experts, places that fill the slots up to a power of
two counted: each is unpacked by itself. us on an H200 in this form and sorted, of 4, 8 and 16
tokens: 35B-A3B in FP8 42 and 44, 70 and 67, 117 and 103; Nano, 6 slots, 82 and 74, 146 and 122."""


@dataclass(frozen=True)
class Tile:
    """rows of the weight, tokens and columns of K per block; weights are the left operand.

    64 rows of 4 warps are one wgmma, whatever the tokens. tma: the bulk copy engine loads act and a
    plain weight of down, where it exists and rows are aligned.
    """

    rows: int
    tokens: int
    k: int
    warps: int
    stages: int
    tma: bool = False


class Tiles(NamedTuple):
    """Of both products, of as many tokens each: of plain weights, and of packed ones."""

    up: Tile
    down: Tile
    packed_up: Tile
    packed_down: Tile


def alike(tile: Tile) -> Tiles:
    """The same for all."""
    return Tiles(tile, tile, tile, tile)


FLOAT = alike(Tile(64, 16, 32, 4, 2))
"""fp32, whose products run on the FMA units in the order of this tile: it serves both forms."""
FEW = Tiles(
    up=Tile(64, 16, 128, 4, 5),
    down=Tile(64, 16, 64, 4, 5),
    packed_up=Tile(64, 16, 256, 4, 3),
    packed_down=Tile(64, 16, 256, 4, 3),
)
"""The weights' bytes are all that counts: four loads of 16 KB wait while one is multiplied, and two
programs of 100 KB fit a multiprocessor of 227 KB. An expert of 512 makes 16 programs, so 8 slots of
one token are 128 for 132 multiprocessors. down's programs are short: more of them side by side are
worth more than loads that wait. So it is with packed weights, which a program unpacks while others
wait for theirs: with 3 stages instead of 5, 8 rows of 35B-A3B in FP8 take 69 us for 82."""
SORTED = (
    (8, FEW._replace(packed_down=Tile(128, 16, 128, 4, 3))),
    (20, Tiles(*[Tile(64, 32, 128, 4, 4)] * 2, *[Tile(64, 32, 256, 4, 4)] * 2)),
    (48, Tiles(*[Tile(128, 64, 64, 4, 4)] * 2, *[Tile(128, 64, 128, 4, 3)] * 2)),
)
"""(most pairs per expert in the mean, tiles): the least block of tokens that holds nearly all that
an expert gets, so that its weights are read once. Of Poisson's counts, 99.6 % are within 16 at a
mean of 8, 99.5 % within 32 at 20, 98.9 % within 64 at 48. Each leaves room for two programs on a
multiprocessor. Packed ones hold whole blocks of their order, of 128 columns. The first were timed
on an H200, the others not: docs/kernels/experts.md."""
MANY = Tiles(
    up=Tile(128, 128, 64, 8, 3),
    down=Tile(256, 128, 64, 8, 4, tma=True),
    packed_up=Tile(128, 128, 128, 8, 3),
    packed_down=Tile(128, 128, 128, 8, 3),
)
"""The tensor cores count: 64 accumulators a thread and 96 KB, so that one of two programs on a
multiprocessor multiplies while the other begins or ends. K is short here (512 is 8 turns). Packed,
with some 160 registers a thread, one program fits."""
SQUARE = 128
"""Rows of the tile that stands for one of more rows where these do not come by bulk copies."""
SHARED_LEFT_ROWS = 64
"""Rows of a tile, at most, of NVFP4 and of GGUF types where a product reads its left operand from
shared memory, as on sm_100: Triton 3.6 to 3.8 find no layout there for 128 rows of them."""
UNPACK_FROM = 1024
"""Pairs per expert in the mean. From here on packed weights are unpacked into memory first.

With fewer each block of 128 tokens unpacks a weight again, in registers, which adds 40 % to its
products' time with 4-bit integers if nothing hides it. To read, write and read them again takes as
long as the products of about 400 pairs (4.3 TB/s, 790 TFLOP/s). So it pays from 1,000 on, and
prompts of 8,192 tokens at 8 of 256, 256 pairs an expert, keep well below. An estimate."""


def are_few(tokens: int, slots: int, experts: int, quantized: bool = False) -> bool:
    """Whether the form for few tokens serves: by T, since the others are a model's. packed: as down
    is."""
    places = tokens * (1 << (slots - 1).bit_length())
    if quantized and places > experts // FEW_OF_PACKED:
        return tokens == 1
    return tokens == 1 or tokens * slots <= min(FEW_PAIRS, experts // FEW_OF_EXPERTS)


def tiles_of(pairs: int, experts: int, dtype: torch.dtype, few: bool) -> Tiles:
    """The tiles for so many pairs of a token and a slot, in the form for few tokens or the other,
    on Hopper: see fitting."""
    if dtype == torch.float32:
        return FLOAT
    if few:
        return FEW
    return next((tiles for mean, tiles in SORTED if pairs <= mean * experts), MANY)


def without_tma(tile: Tile) -> Tile:
    """The tile that stands for this one where the bulk copy engine cannot load."""
    return replace(tile, rows=min(tile.rows, SQUARE), tma=False) if tile.tma else tile


def fitting(tile: Tile, dtype: torch.dtype, arch: int) -> Tile:
    """The tile on an architecture, for a plain weight: with as many stages as fit."""
    if dtype == torch.float32:
        return tile
    if tile.tma and arch != HOPPER:
        tile = without_tma(tile)
    loaded = (tile.rows + tile.tokens) * tile.k * dtype.itemsize
    return replace(tile, stages=fit_stages(tile.stages, loaded, 0, arch))


def packed_fitting(tile: Tile, weight: QuantizedWeight, arch: int) -> Tile:
    """The tile on an architecture, for a packed weight: columns that hold its groups whole or in
    part, as many stages as fit."""
    in_registers = arch == HOPPER or multiplies_by_mma_sync(arch)
    rows = tile.rows
    if isinstance(weight, Fp4Weight | GgufWeight) and not in_registers:
        rows = min(rows, SHARED_LEFT_ROWS)
    k = columns_of(weight, tile.k, weight.k)
    stages = stages_of(tile.stages, rows, tile.tokens, k, weight, arch)
    return replace(tile, rows=rows, k=k, stages=stages)


def most_tiles(pairs: int, experts: int, tokens: int) -> int:
    """The most tiles of `tokens`, each of one expert, that there can be: of an expert's pairs the
    first begins a tile, and each that has a multiple of `tokens` before it."""
    chosen = min(experts, pairs)
    return chosen + (pairs - chosen) // tokens
