# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""Stages of the attention kernels on Hopper, in Gluon: loads, Q K^T, softmax, P V.

A tile is 64 keys, or values, x 128 columns. A producer warp copies tiles by TMA into the stages of
a multistage pipeline in shared memory. The barrier `full` of a stage says that its tile has
arrived, `empty` that its readers have released it. The other functions run in a consumer warpgroup,
which owns 64 (token, query head of the group) rows.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lockstep.kernels.attention import KV_SPLIT
from lockstep.kernels.device.softmax import NO_SCORE, exponentiate, mask_scores
from lockstep.kernels.device.tiles import TILE_ROWS, tile_descriptor, tma_load_tile, zero_tail_rows

TILE = TILE_ROWS
"""Keys of a tile: the number of triton.py, since they are part of the op's definition."""
TILES_PER_SPLIT = gl.constexpr(KV_SPLIT // TILE)
"""Tiles of a KV split."""
TILE_COLUMNS = gl.constexpr(128)
"""Columns of a tile: the widest accumulator that leaves a thread enough registers."""
QK_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUM_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
ACC_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
COPY_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
QK_ROWS = gl.constexpr(gl.SliceLayout(1, QK_LAYOUT.value))
ACC_ROWS = gl.constexpr(gl.SliceLayout(1, ACC_LAYOUT.value))
"""Register layouts of a warpgroup: scores, row sums, accumulator, 16-byte vectors of global memory;
one number per row of the first and the third."""


def cache_descriptors(*caches: Tensor) -> list[TensorDescriptor]:
    """Return the TMA descriptors of caches [pages, 64, Hkv, D], read as [tokens, Hkv * D]."""
    flat = [cache.view(-1, cache.shape[2] * cache.shape[3]) for cache in caches]
    return [tile_descriptor(tokens, TILE_COLUMNS.value) for tokens in flat]


@gluon.jit
def load_next_tile(source, row, column, stages, full, empty, i):
    """Copy the pipeline's i-th tile into stage i % num_stages, once its last reader has released
    it."""
    num_stages: gl.constexpr = stages.shape[0]
    stage = i % num_stages
    tma_load_tile(
        source, row, column, stages.index(stage), full.index(stage), empty.index(stage),
        i // num_stages & 1,
    )  # fmt: skip
    return i + 1


@gluon.jit
def wait_tile(stages, full, i):
    """Wait for the pipeline's i-th tile and return its stage."""
    num_stages: gl.constexpr = stages.shape[0]
    # A stage's use alternates the barrier's parity.
    mbarrier.wait(full.index(i % num_stages), i // num_stages & 1)
    return stages.index(i % num_stages)


@gluon.jit
def release_stage(stages, empty, i):
    """Release the stage of the i-th tile: this warpgroup reads it no more."""
    num_stages: gl.constexpr = stages.shape[0]
    mbarrier.arrive(empty.index(i % num_stages))


@gluon.jit
def load_q_tile(
    q, q_tiles, first_row, count, kv, H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr
):
    """Load query rows first_row .. first_row + 63 into shared memory."""
    m = first_row + gl.arange(0, 64, gl.SliceLayout(1, COPY_LAYOUT))
    column = gl.arange(0, TILE_COLUMNS, gl.SliceLayout(0, COPY_LAYOUT))
    offsets = (m // GROUP * H + kv * GROUP + m % GROUP) * D
    for part in gl.static_range(D // TILE_COLUMNS):
        offset = offsets[:, None] + (part * TILE_COLUMNS + column)[None, :]
        q_tiles.index(part).store(gl.load(q + offset, mask=(m < count * GROUP)[:, None], other=0.0))


@gluon.jit
def zero_tail(stage, live, zeroed, use, WARPGROUP: gl.constexpr):
    """Zero the rows of a tile from row `live` on, together with the other warpgroup.

    Each warpgroup zeroes its half, 32 rows, and waits for the other one: no warpgroup multiplies a
    row that the other one still writes. zeroed: mbarrier of both; use: number of earlier uses.
    """
    for part in gl.static_range(4):
        rows = stage.slice(WARPGROUP * 32 + part * 8, 8)  # a variable would not be a constexpr
        zero_tail_rows(rows, WARPGROUP * 32 + part * 8, live, COPY_LAYOUT)
    fence_async_shared()  # wgmma of both warpgroups reads these rows through the async proxy
    mbarrier.arrive(zeroed)
    mbarrier.wait(zeroed, use & 1)


@gluon.jit
def issue_qk(q_tiles, stages, full, i, PARTS: gl.constexpr):
    """Issue Q K^T of a tile of keys [64, 64]; warpgroup_mma_wait completes it.

    i >> 30 is 0. It makes addresses depend on i, so that the compiler does not keep them in
    registers across the loop.
    """
    scores = gl.zeros((64, 64), gl.float32, QK_LAYOUT)
    for part in gl.static_range(PARTS):
        num_keys = wait_tile(stages, full, i + part).permute((1, 0))
        q = q_tiles.index(part + (i >> 30))
        # One ascending chain over the head's columns, as tl.dot of triton.py.
        scores = warpgroup_mma(q, num_keys, scores, use_acc=part > 0, is_async=True)
    return scores


@gluon.jit
def softmax_step(scores, scale, row_max, last_key, min_last_key, first_key, dtype: gl.constexpr):
    """Run online softmax on a tile. Returns: new row_max, factor of the state so far, p."""
    scores = mask_scores(scores * scale, last_key, min_last_key, first_key, QK_LAYOUT)
    return exponentiate(scores, row_max, dtype)


@gluon.jit
def scale_rows(x, by, layout: gl.constexpr):
    """Multiply x [64, n] of a layout by one number per row."""
    return x * gl.convert_layout(by, gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def row_sums(sums):
    """Return the row sums [64] of a product with ones [64, 8], whose columns are equal."""
    return gl.convert_layout(gl.max(sums, 1), QK_ROWS)


@gluon.jit
def softmax_tile(
    scores, p_tiles, ones, rescales, t, scale, row_max, row_sum, last_key, min_last_key, first_key
):
    """Store p of tile t of a split to shared memory and issue its row sums."""
    row_max, rescale, p = softmax_step(
        scores, scale, row_max, last_key, min_last_key, first_key, p_tiles.dtype
    )
    p_tiles.index(t).store(p)
    # Three buffers for four tiles: tile 3 overwrites the factor of tile 0, which only multiplies an
    # accumulator of zeros.
    rescales.index((t + 2) % 3).store(rescale)
    # wgmma reads p through the async proxy.
    fence_async_shared()
    row_sum = scale_rows(row_sum, rescale, SUM_LAYOUT)
    # Row sums are a product with ones: the same order of additions as in triton.py.
    return row_max, warpgroup_mma(p_tiles.index(t), ones.permute((1, 0)), row_sum, is_async=True)


@gluon.jit
def split_softmax(
    q_tiles, p_tiles, rescales, ones, stages, full, empty, i, count, last_key, min_last_key,
    first_key, scale, PARTS: gl.constexpr,
):  # fmt: skip
    """Run softmax on the tiles of a KV split; p goes to shared memory.

    Returns: next pipeline index, row_max, row_sum.
    """
    row_max = gl.full((64,), NO_SCORE, gl.float32, QK_ROWS)
    row_sum = gl.zeros((64, 8), gl.float32, SUM_LAYOUT)
    scores = warpgroup_mma_wait(0, deps=(issue_qk(q_tiles, stages, full, i, PARTS),))
    for t in range(count - 1):
        for part in gl.static_range(PARTS):
            release_stage(stages, empty, i + part)
        i += PARTS
        # Overlaps the next tile's Q K^T on the tensor cores with this tile's softmax.
        next_scores = issue_qk(q_tiles, stages, full, i, PARTS)
        row_max, row_sum = softmax_tile(
            scores, p_tiles, ones, rescales, t, scale, row_max, row_sum, last_key, min_last_key,
            first_key + t * 64,
        )  # fmt: skip
        row_sum, scores = warpgroup_mma_wait(0, deps=(row_sum, next_scores))
    for part in gl.static_range(PARTS):
        release_stage(stages, empty, i + part)
    t = count - 1
    row_max, row_sum = softmax_tile(
        scores, p_tiles, ones, rescales, t, scale, row_max, row_sum, last_key, min_last_key,
        first_key + t * 64,
    )  # fmt: skip
    return i + PARTS, row_max, warpgroup_mma_wait(0, deps=(row_sum,))


@gluon.jit
def split_pv(
    p_tiles, rescales, stages, full, empty, zeroed, i, count, first_key, num_keys, use,
    WARPGROUP: gl.constexpr,
):  # fmt: skip
    """Return the split's accumulator for the next 128 columns [64, 128]: one chain over its tiles.

    zeroed, use, WARPGROUP: see zero_tail.
    """
    acc = gl.zeros((64, 128), gl.float32, ACC_LAYOUT)
    for t in range(count):
        values = wait_tile(stages, full, i + t)
        if first_key + t * 64 + 64 > num_keys:
            zero_tail(values, num_keys - first_key - t * 64, zeroed, use, WARPGROUP)
        acc = acc * rescales.index((t + 2) % 3).load(ACC_ROWS)[:, None]  # at t = 0 acc is 0
        acc = warpgroup_mma(p_tiles.index(t), values, acc, is_async=True)
        # The stage may be released only once its product is complete.
        acc = warpgroup_mma_wait(0, deps=(acc,))
        release_stage(stages, empty, i + t)
    return acc
