"""Which tile makes a linear with a packed weight fast: a table, a rule where it is silent, a tuner.

A tile never changes a bit (tests/kernels/test_quantized_tuning.py). Keys of the table are
"arch/dtype/layout/NxK" and, inside, the first token count of a bucket.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf, log2
from pathlib import Path

import torch
from torch import Tensor

from lockstep.kernels.architecture import H100_MULTIPROCESSORS, HOPPER, shared_memory_limit
from lockstep.kernels.formats.weights import (
    Fp4Weight,
    Fp8Weight,
    GgufWeight,
    IntWeight,
    QuantizedWeight,
)
from lockstep.kernels.formats.weights.dequantize_tile import BLOCK
from lockstep.kernels.formats.weights.operand import (
    columns_of,
    group_of,
    multiplies_by_mma_sync,
    shared_by,
    stages_of,
)
from lockstep.kernels.linear import choose_split_k, partition_length, tuning

TABLE = Path(__file__).with_name("quantized_tuning.json")
BUCKETS = (1, 2, 5, 9, 17, 33, 65, 129, 257, 513, 1025)
"""The first token count of each bucket."""
TIMED = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""The last token count of each bucket, which it is tuned at."""
MOST = TIMED[-1]
"""Tokens. More have the weight unpacked ahead."""
MOST_BY_RULE = 512
"""The same through a ring where the table is silent
(docs/decisions/0033-shares-of-many-tokens.md)."""
MOST_LAID_OUT = 256
"""The same for tiles that the compiler lays out; estimated."""
MOST_WEIGHTS = 64
"""Of one layout and shape, for a measurement."""
REGISTERS = 1 << 16
"""Of a multiprocessor since Ampere."""
OWN_REGISTERS = 112
"""Of a thread, beside its accumulators, where the compiler may choose: int4 takes 122 with a tile
of 16 tokens (docs/kernels/quantized_weights.md)."""
LANE_REGISTERS = 40
"""The same of the kernel whose warps work alone, for each 16 outputs of a warp, beside the words
that wait and its sums: int4 takes 95 with one tile of 16 and four blocks ahead."""
PROGRAMS = 32
"""That a multiprocessor holds at most, since Ampere."""
LANE_STEP = 33 / 1.75e9
"""Seconds of a chain of single mma.sync instructions per 16 columns: their latency; estimated."""
STEP = 125 / 1.75e9
"""Seconds of a chain per 16 columns: measured with int4, at one and at two programs on a
multiprocessor of an H200, 1.75 GHz."""
BANDWIDTH = 4.3e12
"""Bytes per second of an H200's memory."""
SLACK = 1.5
"""Tiles that the estimate makes so many times as slow as the best one are not timed."""


@dataclass(frozen=True)
class PackedTile:
    """How a launch is cut. It decides the speed and nothing else.

    m, n, k: tokens, outputs and columns per block, powers of two, m 16 or more (8 would be another
    tree), k 128 or more; split: programs along K. registers: the most per thread, so that more
    programs fit a multiprocessor, 0: as the compiler likes. On Hopper n below 64, or fewer than 4
    warps, are multiplied by mma.sync, which has the same tree. lanes: the kernel whose warps work
    alone (quantized_gemv.py): m a multiple of 8, n one of 16 x warps, k 128, stages the blocks that
    a warp loads ahead, and each segment a program of its own. ring: the kernel whose blocks pass
    through a ring (quantized_pipeline.py): m a multiple of 8, n one of 16 x warps, warps one of 4,
    k 128 or 256, stages its slots, registers of a thread on average, and split_k as with lanes.
    sync: it multiplies by mma.sync, else by wgmma. share: programs for each multiprocessor, which
    share all tiles of a ring evenly; 0: a program for each tile.
    """

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3
    split: int = 1
    registers: int = 0
    lanes: bool = False
    ring: bool = False
    sync: bool = False
    share: int = 0

    @property
    def laid_out(self) -> bool:
        """Whether the compiler lays it out, as on any GPU; the other kernels are assembly."""
        return not (self.lanes or self.ring)

    @property
    def warpgroup(self) -> bool:
        """Whether Hopper multiplies such a tile, laid out by the compiler, by wgmma."""
        return self.n >= 64 and self.warps % 4 == 0 and self.laid_out


UNPACK = PackedTile(0, 0, 0)
"""Stands for unpacking into memory, and the dense backend."""
Table = dict[str, dict[int, PackedTile]]
Run = Callable[[Tensor, QuantizedWeight, PackedTile], Tensor]


def bucket(tokens: int) -> int:
    """The first token count of the bucket that holds `tokens`."""
    return BUCKETS[max(bisect_right(BUCKETS, tokens), 1) - 1]


def _lanes(m: int, split_k: int, bits: int) -> list[PackedTile]:
    """Where x is short, many warps of 16 outputs, else fewer of 32 and 64, that load x less often.

    cuts: (16 outputs of a warp, warps of a program, blocks ahead with 4 bits: half with 8).
    """
    cuts = {
        8: ((1, 1, 4), (1, 1, 8), (1, 1, 6), (1, 4, 4)),
        16: ((2, 1, 2), (1, 1, 4), (1, 1, 8)),
        32: ((2, 1, 2), (1, 1, 4), (2, 1, 4)),
    }
    tiles = [
        PackedTile(m, 16 * high * warps, 128, warps, 4 * ahead // bits, split_k, lanes=True)
        for high, warps, ahead in cuts[m]
    ]
    if m == 8:
        tiles.append(replace(tiles[0], registers=112))  # 18 warps fit: gate_up of 27B has 16.5
    return tiles


RING_CUTS = {
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
    MOST: (
        (256, 128, 128, 8, 3, 168, False),
        (128, 128, 128, 8, 4, 120, False),
        (128, 256, 128, 8, 4, 168, False),
    ),
}
"""By the most tokens: (tokens, outputs and columns of a block, warps, slots with 4 bits, registers,
sync). Up to 64 tokens those that were never the fastest are gone
(docs/decisions/0016-packed-ring.md); of 65 to 256 tokens, 0018-wide-rings.md."""


SINGLY = 8
"""Tokens of the smallest tile of the register-only kernel."""
SHARING_WARPS = 8
"""Warps that multiply on a multiprocessor whose programs share tiles, at least: two for each
scheduler. With one, a multiprocessor is slower than with shares that are uneven."""
SHARED_FIRST = 128
"""Tokens of tiles from which on shares were the fastest nearly everywhere
(docs/decisions/0033-shares-of-many-tokens.md)."""
RING_WARPS = 4
"""Of a program through a ring, beside those that multiply: one is at work."""
BARRIERS = 1024
"""Bytes of shared memory beside a ring's slots, at most."""


def _slot_bytes(m: int, n: int, bits: int) -> int:
    """Shared memory of 128 columns in a ring: words and x."""
    return 16 * bits * n + 256 * m


def _ring(tokens: int, split_k: int, bits: int) -> list[PackedTile]:
    """Tiles through a ring, with about as many bytes of slots whatever the bits of a weight; wgmma
    leaves a slot one later, so three at least: where they do not fit, there is no such tile."""
    tiles = []
    most = next(count for count in RING_CUTS if count >= tokens)
    for m, n, k, warps, slots, registers, sync in RING_CUTS[most]:
        share = -(-slots * _slot_bytes(m, n, 4) // _slot_bytes(m, n, bits))
        slots = max(2 if sync else 3, share)
        if slots * k // int(BLOCK) * _slot_bytes(m, n, bits) + BARRIERS > shared_memory_limit(
            HOPPER
        ):
            continue
        tile = PackedTile(m, n, k, warps, slots, split_k, registers, ring=True, sync=sync)
        shared = replace(tile, share=_ring_held(tile, bits))
        tiles += [shared, tile] if m >= SHARED_FIRST else [tile, shared]
    return tiles


def _ring_held(tile: PackedTile, bits: int) -> int:
    """How many programs through a ring a multiprocessor of Hopper holds."""
    slots = tile.stages * tile.k // int(BLOCK) * _slot_bytes(tile.m, tile.n, bits)
    threads = 32 * (tile.warps + RING_WARPS)
    return min(
        shared_memory_limit(HOPPER) // (slots + BARRIERS), REGISTERS // (threads * tile.registers)
    )


def _few(tokens: int, split_k: int, bits: int) -> list[PackedTile]:
    """At most 32 tokens: the chain of one program is slow, so many run on each multiprocessor."""
    lanes = _lanes(8 if tokens <= 8 else 16 if tokens <= 16 else 32, split_k, bits)
    return [*_blocks(tokens, split_k), *lanes]


def _blocks(tokens: int, split_k: int) -> list[PackedTile]:
    """At most 32 tokens, in tiles that the compiler lays out."""
    m = 16 if tokens <= 16 else 32
    tiles = [
        PackedTile(m, 64, 256, 4, 3, split_k, 128),
        PackedTile(m, 64, 256, 4, 3, split_k, 96),
        PackedTile(m, 64, 256, 4, 4, split_k),
        PackedTile(m, 64, 512, 4, 2, split_k),
        PackedTile(m, 64, 128, 4, 4, split_k, 96),
        PackedTile(m, 32, 128, 2, 4, split_k, 128),
    ]
    return tiles


def _some(split_k: int) -> list[PackedTile]:
    """33 .. 64 tokens: an unpacked weight serves them all."""
    return [
        PackedTile(64, 64, 128, 4, 3, split_k, 128),
        PackedTile(64, 64, 128, 4, 2, split_k, 96),
        PackedTile(64, 64, 128, 4, 4, split_k),
        PackedTile(64, 64, 256, 4, 2, split_k),
        PackedTile(64, 128, 128, 4, 3, split_k),
        PackedTile(64, 128, 128, 8, 4, split_k),
        PackedTile(64, 128, 128, 8, 2, split_k, 80),
    ]


def _hundreds(tokens: int, split_k: int) -> list[PackedTile]:
    """65 .. 256 tokens: tiles as high as the tokens unpack a weight once."""
    tiles = [
        PackedTile(128, 64, 128, 4, 2, split_k),
        PackedTile(128, 64, 128, 4, 3, split_k),
        PackedTile(128, 128, 128, 8, 4, split_k),
        PackedTile(128, 128, 128, 8, 2, split_k, 128),
        PackedTile(64, 64, 128, 4, 3, split_k, 128),
    ]
    if tokens > 128:
        tiles.append(PackedTile(256, 64, 128, 4, 2, split_k))
        tiles.append(PackedTile(256, 128, 128, 8, 2, split_k))
    return tiles


def _laid_out(tokens: int, split_k: int) -> list[PackedTile]:
    """Tiles that the compiler lays out."""
    if tokens <= 32:
        return _blocks(tokens, split_k)
    return _some(split_k) if tokens <= 64 else _hundreds(tokens, split_k)


def candidates(tokens: int, split_k: int, bits: int = 4) -> list[PackedTile]:
    """Tiles worth timing on Hopper, at most twenty, for weights of so many bits; the first serves
    where nothing was timed: one through a ring, which was the fastest of nearly every layout and
    shape (docs/decisions/0016-packed-ring.md, 0033), above MOST_BY_RULE UNPACK."""
    ring = _ring(tokens, split_k, bits)
    if tokens <= 32:
        return [*ring, *_few(tokens, split_k, bits)]
    if tokens <= 64:
        return [*ring, *_some(split_k)]
    if tokens <= MOST_LAID_OUT:
        return [*ring, *_hundreds(tokens, split_k), UNPACK]
    return [*ring, UNPACK] if tokens <= MOST_BY_RULE else [UNPACK, *ring]


def _modest(tokens: int) -> PackedTile:
    """A tile for any GPU since Ampere, laid out by the compiler; above MOST_LAID_OUT UNPACK."""
    if tokens > MOST_LAID_OUT:
        return UNPACK
    m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64 if tokens <= 64 else 128
    return PackedTile(m, 64, 128, stages=3 if m <= 64 else 2)


def lanes_serve(weight: QuantizedWeight, split_k: int, arch: int) -> bool:
    """Whether warps that work alone can multiply a weight, with the bits of the dense backend: by
    mma.sync where it is that backend's product, or has its bits, as on Hopper; in whole blocks of
    columns; and where the scales of NVFP4 can be read eight at a time, those of GGUF types as
    words."""
    same = arch == HOPPER or multiplies_by_mma_sync(arch)
    whole = weight.k % (split_k * int(BLOCK)) == 0
    if not (same and whole):
        return False
    if isinstance(weight, GgufWeight):
        return all(_in_words(numbers) for numbers in (weight.scales, weight.minima))
    if isinstance(weight, Fp4Weight):
        return weight.scales.stride(0) % 8 == 0 and _begins_at(weight.scales, 8)
    return True


def _in_words(numbers: Tensor | None) -> bool:
    """Return whether rows of numbers can be read as words of 32 bits."""
    if numbers is None:
        return True
    return numbers.stride(0) * numbers.element_size() % 4 == 0 and _begins_at(numbers, 4)


def ring_serves(weight: QuantizedWeight, split_k: int, arch: int) -> bool:
    """Whether a weight can pass through a ring: on Hopper, in whole blocks of columns per segment,
    each with one scale, or the eight of NVFP4 in two words."""
    if arch != HOPPER or weight.k % int(BLOCK) or partition_length(weight.k, split_k) % int(BLOCK):
        return False
    return ring_reads(weight)


def ring_reads(weight: QuantizedWeight) -> bool:
    """Whether words, scales and zeros lie as a ring reads them."""
    if not _begins_at(weight.words, 16) or weight.words.stride(0) % 4:
        return False
    if isinstance(weight, Fp4Weight):
        return weight.scales.stride(0) % 4 == 0 and _begins_at(weight.scales, 4)
    return group_of(weight) % int(BLOCK) == 0


def _begins_at(tensor: Tensor, size: int) -> bool:
    """Whether a tensor begins at a multiple of `size` bytes, as its allocation does. Its address
    would say so too, but one of a GPU that is not there has none."""
    return tensor.storage_offset() * tensor.element_size() % size == 0


def block_tile(tile: PackedTile, weight: QuantizedWeight, split_k: int, arch: int) -> PackedTile:
    """What stands for a tile of assembly where that does not serve, or none can run."""
    other = _laid_out(tile.m, split_k)[0] if arch == HOPPER else _modest(tile.m)
    return cut(other, weight, split_k, arch)


def _without_ring(tile: PackedTile, weight: QuantizedWeight, split_k: int, arch: int) -> PackedTile:
    """Return the tile that replaces a ring which does not serve: on Hopper, up to SINGLY tokens,
    one of the register-only kernel, which 28 of the table's 32 entries for 1 to 4 tokens are that
    are no rings."""
    if tile.m <= SINGLY and arch == HOPPER:
        return _cut_lanes(_lanes(SINGLY, split_k, weight.bits)[0], weight, split_k, arch)
    return block_tile(tile, weight, split_k, arch)


def _cut_lanes(tile: PackedTile, weight: QuantizedWeight, split_k: int, arch: int) -> PackedTile:
    """No more blocks ahead than a segment has."""
    if not lanes_serve(weight, split_k, arch):
        return block_tile(tile, weight, split_k, arch)
    ahead = min(tile.stages, weight.k // split_k // int(BLOCK))
    if (ahead, tile.split) == (tile.stages, split_k):
        return tile
    return replace(tile, stages=ahead, split=split_k)


def _shared(tile: PackedTile, weight: QuantizedWeight, split_k: int) -> int:
    """Programs for each multiprocessor that may share a weight's tiles: no more than there are
    tiles, of SHARING_WARPS together, and only of split_k that are equally long."""
    if weight.k % (split_k * int(BLOCK)):
        return 0
    tiles = -(-weight.shape[0] // tile.n) * split_k
    share = min(tile.share, tiles // H100_MULTIPROCESSORS)
    return share if share * tile.warps >= SHARING_WARPS else 0


def cut(tile: PackedTile, weight: QuantizedWeight, split_k: int, arch: int) -> PackedTile:
    """A tile as a launch takes it: columns that suit the weight, and as many of the stages as the
    architecture has shared memory for."""
    if tile == UNPACK:
        return tile
    if tile.lanes:
        return _cut_lanes(tile, weight, split_k, arch)
    if tile.ring and ring_serves(weight, split_k, arch):
        if weight.k % (split_k * tile.k):
            tile = replace(tile, k=int(BLOCK), stages=tile.stages * tile.k // int(BLOCK))
        shared = _shared(tile, weight, split_k)
        if (tile.split, tile.share) == (split_k, shared):
            return tile
        return replace(tile, split=split_k, share=shared)
    if tile.ring:
        return _without_ring(tile, weight, split_k, arch)
    k = columns_of(weight, tile.k, partition_length(weight.k, split_k))
    sync = not tile.warpgroup
    stages = stages_of(tile.stages, tile.n, tile.m, k, weight, arch, sync)
    split = min(tile.split, split_k)
    if (k, stages, split) == (tile.k, tile.stages, tile.split):
        return tile
    return replace(tile, k=k, stages=stages, split=split)


def layout_of(weight: QuantizedWeight) -> str:
    """What of a layout decides a tile's speed: bits, columns per scale, types."""
    group = group_of(weight)
    if isinstance(weight, Fp4Weight):
        return "nvfp4"
    if isinstance(weight, Fp8Weight):
        return f"fp8-{group}"
    if isinstance(weight, GgufWeight):
        return weight.type_name
    assert isinstance(weight, IntWeight)
    kind = "asymmetric" if weight.zeros is not None else "symmetric"
    scales = str(weight.scales.dtype).removeprefix("torch.")
    return f"int{weight.bits}-{group}-{kind}-{scales}"


def key(weight: QuantizedWeight, dtype: torch.dtype, arch: int) -> str:
    """Where the table keeps the tiles of such a weight."""
    n, k = weight.shape
    name = str(dtype).removeprefix("torch.")
    return f"sm{arch}/{name}/{layout_of(weight)}/{n}x{k}"


@cache
def load(path: Path = TABLE) -> Table:
    """The table in a file; empty where there is none."""
    return tuning.read(path, PackedTile)


def _distance(shape: str, other: str) -> float:
    """Between two shapes "NxK": the ratios of both sizes, in powers of two."""
    pairs = zip(shape.split("x"), other.split("x"), strict=True)
    return sum(abs(log2(int(a) / int(b))) for a, b in pairs)


@cache
def _measured(name: str, split_k: int) -> list[dict[int, PackedTile]]:
    """The table's tiles for a key, then those of other shapes of the same layout whose K is cut
    into as many split_k, the nearest first."""
    kind, _, shape = name.rpartition("/")
    found = []
    for own, row in load().items():
        other_kind, _, other = own.rpartition("/")
        n, k = map(int, other.split("x"))
        if own == name or (
            other_kind == kind and choose_split_k(n, k, "cuda", quantized=True) == split_k
        ):
            found.append((_distance(shape, other), own, row))
    return [row for _, _, row in sorted(found, key=lambda one: one[:2])]


def _serving(row: dict[int, PackedTile], first: int) -> PackedTile | None:
    """What was timed for a bucket. One of fewer tokens serves too if its tile holds as many as
    these, and if even they are unpacked ahead."""
    below = max((count for count in row if count <= first), default=0)
    tile = row.get(below)
    if tile is None or below == first or tile == UNPACK:
        return tile
    return tile if tile.m >= TIMED[BUCKETS.index(first)] else None


@cache
def _tile(first: int, name: str, split_k: int, arch: int, bits: int) -> PackedTile:
    """By the table, else by the rule."""
    timed = (_serving(row, first) for row in _measured(name, split_k))
    found = next((tile for tile in timed if tile is not None), None)
    if found is not None:
        return found
    if arch == HOPPER:
        return candidates(first, split_k, bits)[0]
    return _modest(first)


def lookup(
    tokens: int, weight: QuantizedWeight, split_k: int, dtype: torch.dtype, arch: int
) -> PackedTile:
    """The tile for `tokens` rows against a packed weight on a GPU of this architecture."""
    tile = _tile(bucket(tokens), key(weight, dtype, arch), split_k, arch, weight.bits)
    if tokens > MOST_LAID_OUT and not ring_serves(weight, split_k, arch):
        return UNPACK
    return cut(tile, weight, split_k, arch)


def _lanes_held(tile: PackedTile, bits: int) -> int:
    """How many such programs a multiprocessor holds."""
    high = tile.n // (16 * tile.warps)
    registers = high * (LANE_REGISTERS + 2 * bits * tile.stages + tile.m // 2) + 16 + 8
    registers = tile.registers or registers
    return max(1, min(PROGRAMS, REGISTERS // (32 * tile.warps * registers)))


def estimate(
    tokens: int, weight: QuantizedWeight, tile: PackedTile, arch: int, processors: int
) -> float:
    """Seconds of a launch on a GPU of so many multiprocessors, at least: its bytes, or the waves of
    its programs, each of which is a chain that waits for its products."""
    n, k = weight.shape
    programs = -(-tokens // tile.m) * -(-n // tile.n) * tile.split
    if tile.ring:
        return weight.nbytes / BANDWIDTH
    if tile.lanes:
        held = _lanes_held(tile, weight.bits)
        waves = max(1.0, programs / (held * processors))
        return max(weight.nbytes / BANDWIDTH, waves * (k / tile.split / 16) * LANE_STEP)
    stage, fixed = shared_by(tile.n, tile.m, tile.k, weight, not tile.warpgroup)
    shared = (tile.stages - 1) * stage + fixed
    threads = 32 * tile.warps
    registers = tile.registers or OWN_REGISTERS + tile.m * tile.n // threads
    held = max(1, min(shared_memory_limit(arch) // shared, REGISTERS // (registers * threads)))
    waves = max(1.0, programs / (held * processors))
    return max(weight.nbytes / BANDWIDTH, waves * (k / tile.split / 16) * STEP)


def worth_timing(
    tokens: int, weight: QuantizedWeight, split_k: int, arch: int, processors: int
) -> list[PackedTile]:
    """The candidates as they are launched, each once, that keep their stages on the architecture
    and are not far behind by the estimate, among those of the same kernel."""
    found: list[PackedTile] = []
    for tile in candidates(tokens, split_k, weight.bits):
        own = cut(tile, weight, split_k, arch)
        if own.stages == tile.stages and own not in found:
            found.append(own)
    cost = {
        tile: estimate(tokens, weight, tile, arch, processors) for tile in found if tile != UNPACK
    }
    most = {
        kernel: SLACK * min((cost[tile] for tile in cost if _kernel(tile) == kernel), default=inf)
        for kernel in {_kernel(tile) for tile in found}
    }
    return [tile for tile in found if cost.get(tile, 0.0) <= most[_kernel(tile)]]


def _kernel(tile: PackedTile) -> tuple[bool, bool]:
    """Which kernel a tile is of."""
    return tile.lanes, tile.ring


def some_weights(empty: Callable[[], QuantizedWeight]) -> list[QuantizedWeight]:
    """Random weights on the GPU, as many bytes of them as the tuner of dense ones takes."""
    generator = torch.Generator("cuda").manual_seed(0)
    found = [empty()]
    count = min(MOST_WEIGHTS, -(-tuning.SPREAD // found[0].nbytes))
    found += [empty() for _ in range(count - 1)]
    for weight in found:
        weight.fill_dummy(generator)
    return found


def tune(
    run: Run,
    refusal: Callable[[PackedTile], str | None],
    x: Tensor,
    weights: Sequence[QuantizedWeight],
    tiles: Sequence[PackedTile],
) -> tuple[list[tuple[float, PackedTile]], dict[PackedTile, str]]:
    """(seconds, tile) of each tile, fastest first; and why others must not be used."""
    refused = {}
    found = []
    for tile in tiles:
        reason = refusal(tile)
        if reason is not None:
            refused[tile] = reason
            continue
        call = partial(_timed, run, x, tile)
        found.append((tuning.seconds(call, weights), tile))
    return sorted(found, key=lambda pair: pair[0]), refused


def _timed(run: Run, x: Tensor, tile: PackedTile, weight: QuantizedWeight) -> object:
    return run(x, weight, tile)
