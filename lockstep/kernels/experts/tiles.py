"""Tiles of the experts kernels. No tile changes a bit; each constant says why it was chosen."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lockstep.kernels.architecture import HOPPER
from lockstep.kernels.architecture import fit_stages as fit_dense_stages
from lockstep.kernels.compile_target import uses_mma_sync
from lockstep.kernels.formats.weights import Fp4Weight, GgufWeight, QuantizedWeight
from lockstep.kernels.formats.weights.operand import fit_block_k, fit_stages

MAX_UNSORTED_PAIRS = 128
"""Maximum pairs (token, slot) without a sort. Each CTA searches all pairs for those of its expert,
in a block of 16 x 128 comparisons, 16 per thread."""
MIN_EXPERTS_PER_PAIR = 2
"""Minimum experts per pair without a sort: the down weights are then read from memory about once.

Each token reads the down weights of its experts, even where another token chose the same. With
random choices that is 1.27 times the bytes at P = E / 2, 1.58 times at P = E. Repeated reads come
from L2, about 1.3 times as fast as memory (5.5 TB/s, an estimate): up to E / 2 they cost nothing,
at 3 / 4 of E as much as the sort, the sum and one more launch (7 us), docs/kernels/experts.md."""
MIN_EXPERTS_PER_QUANTIZED_PAIR = 8
"""Minimum experts per pair without a sort where the down weights are quantized.
Each token dequantizes the weights of its experts. Slots are padded to a power of two. us on an H200
without and with a sort, of 4, 8 and 16 tokens: 35B-A3B in FP8 42 and 44, 70 and 67, 117 and 103;
Nano, 6 slots, 82 and 74, 146 and 122."""


@dataclass(frozen=True)
class Tile:
    """Rows of the weight, tokens and columns k of a block; weights are the left operand.

    64 rows with 4 warps are one wgmma, whatever the tokens. tma: TMA loads act and a dense weight
    of down, where it exists and rows are aligned.
    """

    rows: int
    tokens: int
    k: int
    warps: int
    stages: int
    tma: bool = False


class Tiles(NamedTuple):
    """Tiles of both products, with equal tokens: of dense weights and of quantized ones."""

    up: Tile
    down: Tile
    quantized_up: Tile
    quantized_down: Tile


def same_tiles(tile: Tile) -> Tiles:
    """Return one tile for all products and weights."""
    return Tiles(tile, tile, tile, tile)


FP32_TILES = same_tiles(Tile(64, 16, 32, 4, 2))
"""fp32 runs on FMA units, in the order of this tile: with and without a sort."""
UNSORTED_TILES = Tiles(
    up=Tile(64, 16, 128, 4, 5),
    down=Tile(64, 16, 64, 4, 5),
    quantized_up=Tile(64, 16, 256, 4, 3),
    quantized_down=Tile(64, 16, 256, 4, 3),
)
"""Only the weights' bytes count: four stages of 16 KB are in flight while one is multiplied, and
two CTAs of 100 KB fit a multiprocessor of 227 KB. An expert of 512 makes 16 CTAs, so 8 slots of one
token are 128 for 132 multiprocessors. CTAs of down are short: more of them per multiprocessor are
worth more than deeper pipelines. The same holds for quantized weights: one CTA dequantizes while
others wait for their loads. 8 rows of 35B-A3B in FP8 take 69 us with 3 stages, 82 us with 5."""
SORTED_TILES = (
    (8, UNSORTED_TILES._replace(quantized_down=Tile(128, 16, 128, 4, 3))),
    (20, Tiles(*[Tile(64, 32, 128, 4, 4)] * 2, *[Tile(64, 32, 256, 4, 4)] * 2)),
    (48, Tiles(*[Tile(128, 64, 64, 4, 4)] * 2, *[Tile(128, 64, 128, 4, 3)] * 2)),
)
"""(maximum mean of pairs per expert, tiles): the smallest block of tokens that covers nearly
all pairs of an expert, so that its weights are read once. Of Poisson counts, 99.6 % are within 16
at a mean of 8, 99.5 % within 32 at 20, 98.9 % within 64 at 48. Two CTAs fit a multiprocessor.
Tiles of quantized weights cover whole blocks of 128 interleaved columns. The first were timed on an
H200, the others not: docs/kernels/experts.md."""
LARGE_TILES = Tiles(
    up=Tile(128, 128, 64, 8, 3),
    down=Tile(256, 128, 64, 8, 4, tma=True),
    quantized_up=Tile(128, 128, 128, 8, 3),
    quantized_down=Tile(128, 128, 128, 8, 3),
)
"""Tensor cores are the bound: 64 accumulators a thread and 96 KB, so that one of two CTAs on a
multiprocessor multiplies while the other is in its prologue or epilogue. K is short here (512 is 8
iterations). With quantized weights, at about 160 registers a thread, one CTA fits."""
MAX_ROWS_WITHOUT_TMA = 128
"""Rows of a tile at most where TMA cannot load them."""
SHARED_LEFT_ROWS = 64
"""Rows of a tile at most of NVFP4 and GGUF types where a product reads its left operand from shared
memory, as on sm_100: Triton 3.6 to 3.8 find no layout there for 128 rows of them."""
DEQUANTIZE_FROM = 1024
"""Mean pairs per expert from which on quantized weights are dequantized into memory first.

With fewer, each block of 128 tokens dequantizes a weight again in registers, which adds 40 % to the
time of its products with 4-bit integers if nothing hides it. Reading, writing and reading them
again takes as long as the products of about 400 pairs (4.3 TB/s, 790 TFLOP/s). So it pays from
1,000 on, and prompts of 8,192 tokens at 8 of 256, 256 pairs an expert, stay well below. An
estimate."""


def runs_unsorted(tokens: int, slots: int, experts: int, quantized: bool = False) -> bool:
    """Return whether this many tokens run without a sort. quantized: whether down is quantized."""
    padded_pairs = tokens * (1 << (slots - 1).bit_length())
    if quantized and padded_pairs > experts // MIN_EXPERTS_PER_QUANTIZED_PAIR:
        return tokens == 1
    return tokens == 1 or tokens * slots <= min(MAX_UNSORTED_PAIRS, experts // MIN_EXPERTS_PER_PAIR)


def tiles_of(pairs: int, experts: int, dtype: torch.dtype, unsorted: bool) -> Tiles:
    """Return Hopper's tiles for this number of pairs, without a sort (`unsorted`) or with one."""
    if dtype == torch.float32:
        return FP32_TILES
    if unsorted:
        return UNSORTED_TILES
    return next((tiles for mean, tiles in SORTED_TILES if pairs <= mean * experts), LARGE_TILES)


def without_tma(tile: Tile) -> Tile:
    """Return the tile that replaces this one where TMA cannot load."""
    return replace(tile, rows=min(tile.rows, MAX_ROWS_WITHOUT_TMA), tma=False) if tile.tma else tile


def fit_dense_tile(tile: Tile, dtype: torch.dtype, arch: int) -> Tile:
    """Return the tile of a dense weight on an architecture, with as many stages as fit."""
    if dtype == torch.float32:
        return tile
    if tile.tma and arch != HOPPER:
        tile = without_tma(tile)
    loaded = (tile.rows + tile.tokens) * tile.k * dtype.itemsize
    return replace(tile, stages=fit_dense_stages(tile.stages, loaded, 0, arch))


def fit_quantized_tile(tile: Tile, weight: QuantizedWeight, arch: int) -> Tile:
    """Return the tile of a quantized weight on an architecture.

    Its columns hold whole groups or a part of one, and it has as many stages as fit.
    """
    in_registers = arch == HOPPER or uses_mma_sync(arch)
    rows = tile.rows
    if isinstance(weight, Fp4Weight | GgufWeight) and not in_registers:
        rows = min(rows, SHARED_LEFT_ROWS)
    k = fit_block_k(weight, tile.k, weight.k)
    stages = fit_stages(tile.stages, rows, tile.tokens, k, weight, arch)
    return replace(tile, rows=rows, k=k, stages=stages)


def max_tiles(pairs: int, experts: int, tokens: int) -> int:
    """Return the maximum number of tiles of `tokens`, each of one expert.

    Of an expert's pairs the first begins a tile, and so does each that follows a multiple of
    `tokens` others.
    """
    chosen = min(experts, pairs)
    return chosen + (pairs - chosen) // tokens
