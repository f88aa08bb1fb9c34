"""Tiles of linear with a quantized weight: a measured table, a rule where it is silent, a tuner.

A tile never changes a bit (tests/kernels/test_quantized_tuning.py). Keys of the table are
"arch/dtype/format/NxK" and, inside, the first token count of a bucket.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf, log2
from pathlib import Path

import torch
from torch import Tensor

from lockstep.kernels.architecture import (
    H100_MULTIPROCESSORS,
    HOPPER,
    WARP_SIZE,
    shared_memory_limit,
)
from lockstep.kernels.compile_target import uses_mma_sync
from lockstep.kernels.formats.weights import (
    K_BLOCK,
    Fp4Weight,
    Fp8Weight,
    GgufWeight,
    IntWeight,
    QuantizedWeight,
)
from lockstep.kernels.formats.weights.operand import (
    fit_block_k,
    fit_stages,
    group_size_of,
    shared_memory_bytes,
)
from lockstep.kernels.linear import choose_split_k, partition_length, tuning

TABLE = Path(__file__).with_name("quantized_tuning.json")
BUCKETS = (1, 2, 5, 9, 17, 33, 65, 129, 257, 513, 1025)
"""The first token count of each bucket."""
TIMED = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""The last token count of each bucket, which it is tuned at."""
MAX_TOKENS = TIMED[-1]
"""Tokens. With more, the weight is dequantized into memory first."""
MAX_TOKENS_BY_RULE = 512
"""Maximum tokens of the pipeline kernels for a shape that is not in the table
(docs/decisions/0033-stream-k-at-many-tokens.md)."""
MAX_COMPILER_TOKENS = 256
"""Maximum tokens of tiles that the compiler lays out; an estimate."""
MAX_WEIGHTS = 64
"""Maximum distinct weights of one format and shape that a measurement walks through."""
REGISTERS = 1 << 16
"""Registers of a multiprocessor since Ampere."""
BASE_REGISTERS = 112
"""Registers of a thread besides its accumulators, where the compiler may choose: int4 takes 122
with a tile of 16 tokens (docs/kernels/quantized_weights.md)."""
GEMV_REGISTERS = 40
"""Registers per thread of the register-only GEMV, for each 16 outputs of a warp, besides
prefetched words and accumulators: int4 takes 95 with one tile of 16 and four blocks prefetched."""
MAX_CTAS = 32
"""Maximum CTAs resident on a multiprocessor since Ampere."""
GEMV_STEP = 33 / 1.75e9
"""Seconds per k16 step of a chain of single mma.sync instructions: their latency; an estimate."""
STEP = 125 / 1.75e9
"""Seconds per k16 step of a tile that the compiler lays out: measured with int4, with one and with
two CTAs on a multiprocessor of an H200, 1.75 GHz."""
BANDWIDTH = 4.3e12
"""Bytes per second of an H200's memory."""
SLACK = 1.5
"""Candidates whose estimate exceeds this multiple of the best one are not timed."""


@dataclass(frozen=True)
class QuantizedTile:
    """Tile and kernel of a launch. It decides the speed and nothing else.

    m, n, k: tokens, outputs and columns per block. ctas_k: CTAs along K. registers: bound per
    thread, so that more CTAs fit a multiprocessor; 0: the compiler chooses. At most one of the
    kernels below is chosen; otherwise the compiler lays the tile out (quantized_gemm.py): powers of
    two, m 16 or more (8 would be another tree), k 128 or more. On Hopper n below 64, or fewer than
    4 warps, run on mma.sync, which has the same tree.

    gemv: the register-only GEMV (quantized_gemv.py): m a multiple of 8, n one of 16 x warps, k 128,
    stages the blocks that a warp prefetches; each split-K partition has its own CTAs.
    pipeline: the TMA pipeline (quantized_pipeline.py): m a multiple of 8, n one of 16 x warps,
    warps a multiple of 4, k 128 or 256, registers on average over all warps; partitions as with
    gemv. mma_sync: the pipeline multiplies by mma.sync, else by wgmma. stream_k: CTAs per
    multiprocessor that share all tiles of a pipeline evenly (stream_k.py); 0: a CTA per tile.
    """

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3
    ctas_k: int = 1
    registers: int = 0
    gemv: bool = False
    pipeline: bool = False
    mma_sync: bool = False
    stream_k: int = 0

    @property
    def laid_out(self) -> bool:
        """Return whether the compiler lays the tile out; the other kernels need inline PTX."""
        return not (self.gemv or self.pipeline)

    @property
    def wgmma(self) -> bool:
        """Return whether Triton multiplies this compiler-laid-out tile by wgmma on Hopper."""
        return self.n >= 64 and self.warps % 4 == 0 and self.laid_out


DEQUANTIZE_FIRST = QuantizedTile(0, 0, 0)
"""Marker for dequantizing into memory and running the dense backend."""
Table = dict[str, dict[int, QuantizedTile]]
RunTile = Callable[[Tensor, QuantizedWeight, QuantizedTile], Tensor]


def bucket(tokens: int) -> int:
    """Return the first token count of the bucket of `tokens`."""
    return BUCKETS[max(bisect_right(BUCKETS, tokens), 1) - 1]


def _gemv_tiles(m: int, split_k: int, bits: int) -> list[QuantizedTile]:
    """Return tiles of the register-only GEMV for up to m tokens.

    Few tokens take many warps of 16 outputs; more take fewer warps of 32 and 64, which load x less
    often. shapes: (multiples of 16 outputs per warp, warps per CTA, blocks prefetched with 4 bits;
    half as many with 8).
    """
    shapes = {
        8: ((1, 1, 4), (1, 1, 8), (1, 1, 6), (1, 4, 4)),
        16: ((2, 1, 2), (1, 1, 4), (1, 1, 8)),
        32: ((2, 1, 2), (1, 1, 4), (2, 1, 4)),
    }
    tiles = [
        QuantizedTile(m, 16 * height * warps, 128, warps, 4 * blocks // bits, split_k, gemv=True)
        for height, warps, blocks in shapes[m]
    ]
    if m == 8:
        tiles.append(replace(tiles[0], registers=112))  # 18 warps fit: gate_up of 27B has 16.5
    return tiles


PIPELINE_TILES = {
    8: (
        (8, 64, 256, 4, 3, 48, True),
        (8, 64, 128, 4, 6, 48, True),
    ),
    16: (
        (16, 64, 256, 4, 3, 48, True),
        (16, 64, 128, 4, 5, 48, True),
        (16, 64, 128, 4, 4, 48, False),
    ),
    32: (
        (32, 64, 128, 4, 4, 64, False),
        (32, 64, 128, 4, 3, 64, False),
        (32, 64, 128, 4, 5, 80, False),
        (32, 64, 256, 4, 3, 64, False),
        (32, 64, 128, 4, 4, 64, True),
    ),
    64: (
        (64, 64, 128, 4, 3, 64, False),
        (64, 128, 128, 8, 4, 80, False),
    ),
    128: (
        (128, 128, 128, 8, 4, 120, False),
        (128, 64, 128, 4, 3, 96, False),
        (128, 256, 128, 8, 4, 168, False),
    ),
    MAX_TOKENS: (
        (256, 128, 128, 8, 3, 168, False),
        (128, 128, 128, 8, 4, 120, False),
        (128, 256, 128, 8, 4, 168, False),
    ),
}
"""Maximum tokens -> (m, n, k, warps, stages with 4 bits, registers, mma_sync) of the pipeline.
Tiles that were never the fastest are gone: up to 64 tokens
docs/decisions/0016-quantized-tma-pipeline.md, from 65 to 256 tokens 0018-wide-pipelines.md.
"""


MIN_GEMV_TOKENS = 8
"""Tokens of the smallest tile of the register-only GEMV."""
MIN_STREAM_K_WARPS = 8
"""Minimum consumer warps on a multiprocessor that runs stream-K: two per scheduler. With one, even
work ranges are slower than an uneven wave of tiles."""
STREAM_K_FIRST = 128
"""Tokens of a tile from which on stream-K was nearly always the fastest
(docs/decisions/0033-stream-k-at-many-tokens.md)."""
PRODUCER_WARPS = 4
"""Warps of the producer partition, besides the consumer warps; one of them issues copies."""
BARRIER_BYTES = 1024
"""Shared memory of a pipeline besides its stages, an upper bound."""


def _block_bytes(m: int, n: int, bits: int) -> int:
    """Return the shared memory of one block of 128 columns: words and x."""
    return 16 * bits * n + 256 * m


def _pipeline_tiles(tokens: int, split_k: int, bits: int) -> list[QuantizedTile]:
    """Return tiles of the pipeline kernels, each with and without stream-K.

    Stages hold about as many bytes whatever the bits of a weight. wgmma releases a stage one
    iteration late, so it needs three at least: a tile whose three stages do not fit is left out.
    """
    tiles = []
    max_tokens = next(count for count in PIPELINE_TILES if count >= tokens)
    for m, n, k, warps, stages_4bit, registers, mma_sync in PIPELINE_TILES[max_tokens]:
        block_bytes = _block_bytes(m, n, bits)
        stages = max(2 if mma_sync else 3, -(-stages_4bit * _block_bytes(m, n, 4) // block_bytes))
        if stages * k // K_BLOCK * block_bytes + BARRIER_BYTES > shared_memory_limit(HOPPER):
            continue
        tile = QuantizedTile(
            m, n, k, warps, stages, split_k, registers, pipeline=True, mma_sync=mma_sync
        )  # fmt: skip
        stream_k = replace(tile, stream_k=_pipeline_ctas_per_sm(tile, bits))
        tiles += [stream_k, tile] if m >= STREAM_K_FIRST else [tile, stream_k]
    return tiles


def _pipeline_ctas_per_sm(tile: QuantizedTile, bits: int) -> int:
    """Return how many CTAs of a pipeline tile fit a Hopper multiprocessor."""
    stage_bytes = tile.stages * tile.k // K_BLOCK * _block_bytes(tile.m, tile.n, bits)
    threads = WARP_SIZE * (tile.warps + PRODUCER_WARPS)
    by_memory = shared_memory_limit(HOPPER) // (stage_bytes + BARRIER_BYTES)
    return min(by_memory, REGISTERS // (threads * tile.registers))


def _tiles_up_to_32(tokens: int, split_k: int, bits: int) -> list[QuantizedTile]:
    """Return tiles for 1 .. 32 tokens, small enough for many CTAs per multiprocessor."""
    gemv = _gemv_tiles(8 if tokens <= 8 else 16 if tokens <= 16 else 32, split_k, bits)
    return [*_compiler_tiles_up_to_32(tokens, split_k), *gemv]


def _compiler_tiles_up_to_32(tokens: int, split_k: int) -> list[QuantizedTile]:
    """Return compiler-laid-out tiles for 1 .. 32 tokens."""
    m = 16 if tokens <= 16 else 32
    tiles = [
        QuantizedTile(m, 64, 256, 4, 3, split_k, 128),
        QuantizedTile(m, 64, 256, 4, 3, split_k, 96),
        QuantizedTile(m, 64, 256, 4, 4, split_k),
        QuantizedTile(m, 64, 512, 4, 2, split_k),
        QuantizedTile(m, 64, 128, 4, 4, split_k, 96),
        QuantizedTile(m, 32, 128, 2, 4, split_k, 128),
    ]
    return tiles


def _compiler_tiles_up_to_64(split_k: int) -> list[QuantizedTile]:
    """Return compiler-laid-out tiles for 33 .. 64 tokens: each dequantizes its weights once."""
    return [
        QuantizedTile(64, 64, 128, 4, 3, split_k, 128),
        QuantizedTile(64, 64, 128, 4, 2, split_k, 96),
        QuantizedTile(64, 64, 128, 4, 4, split_k),
        QuantizedTile(64, 64, 256, 4, 2, split_k),
        QuantizedTile(64, 128, 128, 4, 3, split_k),
        QuantizedTile(64, 128, 128, 8, 4, split_k),
        QuantizedTile(64, 128, 128, 8, 2, split_k, 80),
    ]


def _compiler_tiles_up_to_256(tokens: int, split_k: int) -> list[QuantizedTile]:
    """Return compiler-laid-out tiles for 65 .. 256 tokens; the tallest dequantize once."""
    tiles = [
        QuantizedTile(128, 64, 128, 4, 2, split_k),
        QuantizedTile(128, 64, 128, 4, 3, split_k),
        QuantizedTile(128, 128, 128, 8, 4, split_k),
        QuantizedTile(128, 128, 128, 8, 2, split_k, 128),
        QuantizedTile(64, 64, 128, 4, 3, split_k, 128),
    ]
    if tokens > 128:
        tiles.append(QuantizedTile(256, 64, 128, 4, 2, split_k))
        tiles.append(QuantizedTile(256, 128, 128, 8, 2, split_k))
    return tiles


def _compiler_tiles(tokens: int, split_k: int) -> list[QuantizedTile]:
    """Return the compiler-laid-out tiles worth timing on Hopper."""
    if tokens <= 32:
        return _compiler_tiles_up_to_32(tokens, split_k)
    return (
        _compiler_tiles_up_to_64(split_k)
        if tokens <= 64
        else _compiler_tiles_up_to_256(tokens, split_k)
    )


def candidates(tokens: int, split_k: int, bits: int = 4) -> list[QuantizedTile]:
    """Return at most twenty tiles worth timing on Hopper, for weights of this width.

    The first one serves where nothing was timed: a pipeline tile, which was the fastest of nearly
    every format and shape (docs/decisions/0016-quantized-tma-pipeline.md, 0033); above
    MAX_TOKENS_BY_RULE DEQUANTIZE_FIRST.
    """
    pipeline = _pipeline_tiles(tokens, split_k, bits)
    if tokens <= 32:
        return [*pipeline, *_tiles_up_to_32(tokens, split_k, bits)]
    if tokens <= 64:
        return [*pipeline, *_compiler_tiles_up_to_64(split_k)]
    if tokens <= MAX_COMPILER_TOKENS:
        return [*pipeline, *_compiler_tiles_up_to_256(tokens, split_k), DEQUANTIZE_FIRST]
    return (
        [*pipeline, DEQUANTIZE_FIRST]
        if tokens <= MAX_TOKENS_BY_RULE
        else [DEQUANTIZE_FIRST, *pipeline]
    )


def _fallback_tile(tokens: int) -> QuantizedTile:
    """Return a compiler-laid-out tile for any GPU since Ampere, within MAX_COMPILER_TOKENS."""
    if tokens > MAX_COMPILER_TOKENS:
        return DEQUANTIZE_FIRST
    m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64 if tokens <= 64 else 128
    return QuantizedTile(m, 64, 128, stages=3 if m <= 64 else 2)


def gemv_supports(weight: QuantizedWeight, split_k: int, arch: int) -> bool:
    """Return whether the register-only GEMV can run a weight with the bits of the dense backend.

    Its mma.sync must be the dense backend's product or have its bits, as on Hopper; partitions must
    be whole blocks of columns; scales of NVFP4 must be readable eight at a time, those of GGUF
    types as words.
    """
    same_bits = arch == HOPPER or uses_mma_sync(arch)
    whole_blocks = weight.k % (split_k * K_BLOCK) == 0
    if not (same_bits and whole_blocks):
        return False
    if isinstance(weight, GgufWeight):
        return all(_readable_as_words(numbers) for numbers in (weight.scales, weight.minima))
    if isinstance(weight, Fp4Weight):
        return weight.scales.stride(0) % 8 == 0 and _is_aligned(weight.scales, 8)
    return True


def _readable_as_words(numbers: Tensor | None) -> bool:
    """Return whether rows of scales can be read as 32-bit words."""
    if numbers is None:
        return True
    return numbers.stride(0) * numbers.element_size() % 4 == 0 and _is_aligned(numbers, 4)


def pipeline_supports(weight: QuantizedWeight, split_k: int, arch: int) -> bool:
    """Return whether the pipeline kernels can run a weight: on Hopper, in whole blocks per
    partition.

    Each block has one scale, or the eight scales of NVFP4 in two words.
    """
    if arch != HOPPER or weight.k % K_BLOCK or partition_length(weight.k, split_k) % K_BLOCK:
        return False
    return pipeline_can_read(weight)


def pipeline_can_read(weight: QuantizedWeight) -> bool:
    """Return whether words and scales are aligned and grouped as the pipeline kernels need."""
    if not _is_aligned(weight.words, 16) or weight.words.stride(0) % 4:
        return False
    if isinstance(weight, Fp4Weight):
        return weight.scales.stride(0) % 4 == 0 and _is_aligned(weight.scales, 4)
    return group_size_of(weight) % K_BLOCK == 0


def _is_aligned(tensor: Tensor, size: int) -> bool:
    """Return whether a tensor begins at a multiple of `size` bytes of its allocation.

    Tensors of a planned GPU have no address, so the address is not asked.
    """
    return tensor.storage_offset() * tensor.element_size() % size == 0


def compiler_tile(
    tile: QuantizedTile, weight: QuantizedWeight, split_k: int, arch: int
) -> QuantizedTile:
    """Return the compiler-laid-out tile that replaces one of the inline PTX kernels."""
    replacement = _compiler_tiles(tile.m, split_k)[0] if arch == HOPPER else _fallback_tile(tile.m)
    return fit_tile(replacement, weight, split_k, arch)


def _replace_pipeline(
    tile: QuantizedTile, weight: QuantizedWeight, split_k: int, arch: int
) -> QuantizedTile:
    """Return the tile that replaces a pipeline tile which the weight does not support.

    On Hopper, up to MIN_GEMV_TOKENS tokens, that is a GEMV tile: of the table's 32 entries for 1 to
    4 tokens that are no pipelines, 28 are GEMV.
    """
    if tile.m <= MIN_GEMV_TOKENS and arch == HOPPER:
        return _fit_gemv(
            _gemv_tiles(MIN_GEMV_TOKENS, split_k, weight.bits)[0], weight, split_k, arch
        )
    return compiler_tile(tile, weight, split_k, arch)


def _fit_gemv(
    tile: QuantizedTile, weight: QuantizedWeight, split_k: int, arch: int
) -> QuantizedTile:
    """Return the GEMV tile with no more blocks prefetched than a partition has."""
    if not gemv_supports(weight, split_k, arch):
        return compiler_tile(tile, weight, split_k, arch)
    stages = min(tile.stages, weight.k // split_k // K_BLOCK)
    if (stages, tile.ctas_k) == (tile.stages, split_k):
        return tile
    return replace(tile, stages=stages, ctas_k=split_k)


def _stream_k_ctas(tile: QuantizedTile, weight: QuantizedWeight, split_k: int, num_sms: int) -> int:
    """Return the CTAs per multiprocessor that run stream-K, 0 where it does not pay.

    There are no more CTAs than tiles, and at least MIN_STREAM_K_WARPS warps; partitions must be
    equally long.
    """
    if weight.k % (split_k * K_BLOCK):
        return 0
    tiles = -(-weight.shape[0] // tile.n) * split_k
    ctas = min(tile.stream_k, tiles // num_sms)
    return ctas if ctas * tile.warps >= MIN_STREAM_K_WARPS else 0


def fit_tile(
    tile: QuantizedTile,
    weight: QuantizedWeight,
    split_k: int,
    arch: int,
    num_sms: int = H100_MULTIPROCESSORS,
) -> QuantizedTile:
    """Return the tile as it is launched: its kernel supports the weight and its stages fit.

    num_sms: multiprocessors of the GPU.
    """
    if tile == DEQUANTIZE_FIRST:
        return tile
    if tile.gemv:
        return _fit_gemv(tile, weight, split_k, arch)
    if tile.pipeline and pipeline_supports(weight, split_k, arch):
        if weight.k % (split_k * tile.k):
            tile = replace(tile, k=K_BLOCK, stages=tile.stages * tile.k // K_BLOCK)
        ctas = _stream_k_ctas(tile, weight, split_k, num_sms)
        if (tile.ctas_k, tile.stream_k) == (split_k, ctas):
            return tile
        return replace(tile, ctas_k=split_k, stream_k=ctas)
    if tile.pipeline:
        return _replace_pipeline(tile, weight, split_k, arch)
    k = fit_block_k(weight, tile.k, partition_length(weight.k, split_k))
    stages = fit_stages(tile.stages, tile.n, tile.m, k, weight, arch, not tile.wgmma)
    ctas_k = min(tile.ctas_k, split_k)
    if (k, stages, ctas_k) == (tile.k, tile.stages, tile.ctas_k):
        return tile
    return replace(tile, k=k, stages=stages, ctas_k=ctas_k)


def format_key(weight: QuantizedWeight) -> str:
    """Return the name of what decides a tile's speed: bits, columns per scale, dtypes."""
    group = group_size_of(weight)
    if isinstance(weight, Fp4Weight):
        return "nvfp4"
    if isinstance(weight, Fp8Weight):
        return f"fp8-{group}"
    if isinstance(weight, GgufWeight):
        return weight.type_name
    assert isinstance(weight, IntWeight)
    symmetry = "asymmetric" if weight.zeros is not None else "symmetric"
    scales = str(weight.scales.dtype).removeprefix("torch.")
    return f"int{weight.bits}-{group}-{symmetry}-{scales}"


def table_key(weight: QuantizedWeight, dtype: torch.dtype, arch: int) -> str:
    """Return the table's key of a weight in a model of dtype."""
    n, k = weight.shape
    name = str(dtype).removeprefix("torch.")
    return f"sm{arch}/{name}/{format_key(weight)}/{n}x{k}"


@cache
def load_table(path: Path = TABLE) -> Table:
    """Return the table of a file; an empty one where there is no file."""
    return tuning.read_table(path, QuantizedTile)


def _distance(shape: str, other: str) -> float:
    """Return the distance of two shapes "NxK": the sum of |log2| of the ratios of their sizes."""
    pairs = zip(shape.split("x"), other.split("x"), strict=True)
    return sum(abs(log2(int(a) / int(b))) for a, b in pairs)


@cache
def _measured_rows(name: str, split_k: int) -> list[dict[int, QuantizedTile]]:
    """Return the table's row for a key, then rows of other shapes, the nearest first.

    Other shapes have the same format and as many split-K partitions.
    """
    kind, _, shape = name.rpartition("/")
    rows = []
    for key, row in load_table().items():
        other_kind, _, other = key.rpartition("/")
        n, k = map(int, other.split("x"))
        if key == name or (
            other_kind == kind and choose_split_k(n, k, "cuda", quantized=True) == split_k
        ):
            rows.append((_distance(shape, other), key, row))
    return [row for _, _, row in sorted(rows, key=lambda entry: entry[:2])]


def _tile_for_bucket(row: dict[int, QuantizedTile], first: int) -> QuantizedTile | None:
    """Return the tile that was timed for a bucket, or for one of fewer tokens if it serves too.

    It does if it covers the bucket's tokens, or if even fewer tokens dequantize first.
    """
    timed = max((count for count in row if count <= first), default=0)
    tile = row.get(timed)
    if tile is None or timed == first or tile == DEQUANTIZE_FIRST:
        return tile
    return tile if tile.m >= TIMED[BUCKETS.index(first)] else None


@cache
def _choose_tile(first: int, name: str, split_k: int, arch: int, bits: int) -> QuantizedTile:
    """Return the tile of a bucket from the table, else from the rule."""
    timed = (_tile_for_bucket(row, first) for row in _measured_rows(name, split_k))
    tile = next((tile for tile in timed if tile is not None), None)
    if tile is not None:
        return tile
    if arch == HOPPER:
        return candidates(first, split_k, bits)[0]
    return _fallback_tile(first)


def lookup(
    tokens: int,
    weight: QuantizedWeight,
    split_k: int,
    dtype: torch.dtype,
    arch: int,
    num_sms: int = H100_MULTIPROCESSORS,
) -> QuantizedTile:
    """Return the tile for `tokens` rows on a GPU of an architecture with num_sms
    multiprocessors."""
    key = table_key(weight, dtype, arch)
    tile = _choose_tile(bucket(tokens), key, split_k, arch, weight.bits)
    if tokens > MAX_COMPILER_TOKENS and not pipeline_supports(weight, split_k, arch):
        return DEQUANTIZE_FIRST
    return fit_tile(tile, weight, split_k, arch, num_sms)


def _gemv_ctas_per_sm(tile: QuantizedTile, bits: int) -> int:
    """Return how many CTAs of a GEMV tile fit a multiprocessor."""
    height = tile.n // (16 * tile.warps)
    registers = height * (GEMV_REGISTERS + 2 * bits * tile.stages + tile.m // 2) + 16 + 8
    registers = tile.registers or registers
    return max(1, min(MAX_CTAS, REGISTERS // (WARP_SIZE * tile.warps * registers)))


def estimate_seconds(
    tokens: int, weight: QuantizedWeight, tile: QuantizedTile, arch: int, num_sms: int
) -> float:
    """Return a lower bound of a launch's seconds on a GPU with num_sms multiprocessors.

    It is the time of its bytes, or of its waves of CTAs, each a chain that waits for its products.
    """
    n, k = weight.shape
    ctas = -(-tokens // tile.m) * -(-n // tile.n) * tile.ctas_k
    if tile.pipeline:
        return weight.nbytes / BANDWIDTH
    if tile.gemv:
        ctas_per_sm = _gemv_ctas_per_sm(tile, weight.bits)
        waves = max(1.0, ctas / (ctas_per_sm * num_sms))
        return max(weight.nbytes / BANDWIDTH, waves * (k / tile.ctas_k / 16) * GEMV_STEP)
    stage, fixed = shared_memory_bytes(tile.n, tile.m, tile.k, weight, not tile.wgmma)
    shared = (tile.stages - 1) * stage + fixed
    threads = WARP_SIZE * tile.warps
    registers = tile.registers or BASE_REGISTERS + tile.m * tile.n // threads
    ctas_per_sm = max(
        1, min(shared_memory_limit(arch) // shared, REGISTERS // (registers * threads))
    )
    waves = max(1.0, ctas / (ctas_per_sm * num_sms))
    return max(weight.nbytes / BANDWIDTH, waves * (k / tile.ctas_k / 16) * STEP)


def tiles_to_time(
    tokens: int, weight: QuantizedWeight, split_k: int, arch: int, num_sms: int
) -> list[QuantizedTile]:
    """Return the candidates as they are launched, each once.

    Left out are those that lose stages on the architecture, and those whose estimate is more than
    SLACK times the best one of the same kernel.
    """
    tiles: list[QuantizedTile] = []
    for tile in candidates(tokens, split_k, weight.bits):
        fitted = fit_tile(tile, weight, split_k, arch, num_sms)
        if fitted.stages == tile.stages and fitted not in tiles:
            tiles.append(fitted)
    costs = {
        tile: estimate_seconds(tokens, weight, tile, arch, num_sms)
        for tile in tiles
        if tile != DEQUANTIZE_FIRST
    }
    bounds = {
        kernel: SLACK * min((costs[t] for t in costs if _kernel_of(t) == kernel), default=inf)
        for kernel in {_kernel_of(tile) for tile in tiles}
    }
    return [tile for tile in tiles if costs.get(tile, 0.0) <= bounds[_kernel_of(tile)]]


def _kernel_of(tile: QuantizedTile) -> tuple[bool, bool]:
    """Return which kernel runs a tile, as a key: (gemv, pipeline)."""
    return tile.gemv, tile.pipeline


def random_weights(empty: Callable[[], QuantizedWeight]) -> list[QuantizedWeight]:
    """Return random weights on the GPU, as many bytes of them as the tuner of dense ones takes.

    empty: allocates one weight.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [empty()]
    count = min(MAX_WEIGHTS, -(-tuning.SPREAD // weights[0].nbytes))
    weights += [empty() for _ in range(count - 1)]
    for weight in weights:
        weight.fill_dummy(generator)
    return weights


def tune(
    run: RunTile,
    refusal: Callable[[QuantizedTile], str | None],
    x: Tensor,
    weights: Sequence[QuantizedWeight],
    tiles: Sequence[QuantizedTile],
) -> tuple[list[tuple[float, QuantizedTile]], dict[QuantizedTile, str]]:
    """Time each tile that is not refused.

    Returns: [(seconds, tile)], the fastest first; and the reason of each refused tile.
    """
    refused = {}
    times = []
    for tile in tiles:
        reason = refusal(tile)
        if reason is not None:
            refused[tile] = reason
            continue
        call = partial(_run_once, run, x, tile)
        times.append((tuning.seconds(call, weights), tile))
    return sorted(times, key=lambda pair: pair[0]), refused


def _run_once(run: RunTile, x: Tensor, tile: QuantizedTile, weight: QuantizedWeight) -> object:
    return run(x, weight, tile)
