# mypy: ignore-errors
"""What the warps of hopper.py do, in Gluon: a ring of tiles, scores, weights, values.

A tile is 64 keys, or values, x 128 columns. One warp copies tiles into the slots of a ring in
shared memory: the barrier `full` says that a tile is there, `empty` that its readers have left. The
other functions run in a warpgroup that owns 64 rows of (token, head of a group).
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lockstep.kernels.attention import SEGMENT

TILE = 64
"""Keys of a tile: as many as in triton.py, since they are part of the definition."""
TILES = gl.constexpr(SEGMENT // TILE)
"""Tiles of a segment."""
WIDTH = gl.constexpr(128)
"""Columns of a tile: the widest accumulator that leaves a thread enough registers."""
NO_SCORE = gl.constexpr(-1e30)
"""The maximum over no scores, as in triton.py."""
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
N_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
S_ROW = gl.constexpr(gl.SliceLayout(1, S_LAYOUT.value))
O_ROW = gl.constexpr(gl.SliceLayout(1, O_LAYOUT.value))
"""Registers of a warpgroup: scores, sums of weights, output, whole vectors in memory."""


def descriptors(*caches: Tensor) -> list[TensorDescriptor]:
    """Caches [pages, 64, Hkv, D] as what a ring's copies read: [tokens, Hkv * D]."""
    layout = gl.NVMMASharedLayout(128, 16, 2)
    tile = [TILE, WIDTH.value]
    flat = [cache.view(-1, cache.shape[2] * cache.shape[3]) for cache in caches]
    return [TensorDescriptor.from_tensor(tokens, tile, layout) for tokens in flat]


@gluon.jit
def copy(source, row, column, ring, full, empty, i):
    """The i-th copy, into slot i % slots once its last reader has left."""
    slots: gl.constexpr = ring.shape[0]
    slot = i % slots
    mbarrier.wait(empty.index(slot), (i // slots & 1) ^ 1)
    mbarrier.expect(full.index(slot), 64 * WIDTH * 2)
    tma.async_copy_global_to_shared(source, [row, column], full.index(slot), ring.index(slot))
    return i + 1


@gluon.jit
def arrived(ring, full, i):
    """The slot of the i-th copy, once it has arrived."""
    slots: gl.constexpr = ring.shape[0]
    mbarrier.wait(full.index(i % slots), i // slots & 1)
    return ring.index(i % slots)


@gluon.jit
def release(ring, empty, i):
    """The slot of the i-th copy is no longer needed by this warpgroup."""
    slots: gl.constexpr = ring.shape[0]
    mbarrier.arrive(empty.index(i % slots))


@gluon.jit
def load_queries(q, queries, row, count, kv, H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr):
    """Query rows row .. row + 63 into shared memory."""
    m = row + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, WIDE))
    place = (m // GROUP * H + kv * GROUP + m % GROUP) * D
    for part in gl.static_range(D // WIDTH):
        at = place[:, None] + (part * WIDTH + d)[None, :]
        queries.index(part).store(gl.load(q + at, mask=(m < count * GROUP)[:, None], other=0.0))


@gluon.jit
def zero_behind(slot, live, zeroed, use, OWN: gl.constexpr):
    """Zero the rows of a slot from row `live` on, together with the other warpgroup.

    Each warpgroup takes 32 rows, its OWN half, and waits for the other one: no warpgroup multiplies
    a row while the other one writes it. zeroed: mbarrier of both; use: number of earlier uses.
    """
    for part in gl.static_range(4):
        rows = slot.slice(OWN * 32 + part * 8, 8)
        row = OWN * 32 + part * 8 + gl.arange(0, 8, gl.SliceLayout(1, WIDE))[:, None]
        values = rows.load(WIDE)
        rows.store(gl.where(row < live, values, gl.zeros_like(values)))
    fence_async_shared()  # wgmma of both warpgroups reads these rows through the async proxy
    mbarrier.arrive(zeroed)
    mbarrier.wait(zeroed, use & 1)


@gluon.jit
def start_scores(queries, ring, full, i, PARTS: gl.constexpr):
    """Starts q k of a tile of keys [64, 64]; warpgroup_mma_wait ends it.

    i >> 30 is 0: what depends on i is not held in registers around the loop.
    """
    scores = gl.zeros((64, 64), gl.float32, S_LAYOUT)
    for part in gl.static_range(PARTS):
        keys = arrived(ring, full, i + part).permute((1, 0))
        q = queries.index(part + (i >> 30))
        scores = warpgroup_mma(q, keys, scores, use_acc=part > 0, is_async=True)
    return scores


@gluon.jit
def weigh(scores, scale, top, last, lowest, at, dtype: gl.constexpr):
    """Online softmax of a tile: the new maximum, the factor of what was before, the weights."""
    scores = scores * scale
    if at + 63 > lowest:
        key = at + gl.arange(0, 64, gl.SliceLayout(0, S_LAYOUT))
        scores = gl.where(key[None, :] <= last[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    return new_top, gl.exp2(top - new_top), gl.exp2(scores - new_top[:, None]).to(dtype)


@gluon.jit
def times(x, by, layout: gl.constexpr):
    """x [64, n] of a layout times by [64]."""
    return x * gl.convert_layout(by, gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def weigh_tile(scores, weights, ones, fades, t, scale, top, norm, last, lowest, at):
    """The weights of tile t of a segment, into shared memory; their sums, started."""
    top, fade, mine = weigh(scores, scale, top, last, lowest, at, weights.dtype)
    weights.index(t).store(mine)
    fades.index((t + 2) % 3).store(fade)
    fence_async_shared()
    norm = times(norm, fade, N_LAYOUT)
    return top, warpgroup_mma(weights.index(t), ones.permute((1, 0)), norm, is_async=True)


@gluon.jit
def segment_weights(
    queries, weights, fades, ones, ring, full, empty, i, count, last, lowest, at, scale,
    PARTS: gl.constexpr,
):  # fmt: skip
    """The weights of a segment's tiles, into shared memory -> the ring's place, max, sum."""
    top = gl.full((64,), NO_SCORE, gl.float32, S_ROW)
    norm = gl.zeros((64, 8), gl.float32, N_LAYOUT)
    scores = warpgroup_mma_wait(0, deps=(start_scores(queries, ring, full, i, PARTS),))
    for t in range(count - 1):
        for part in gl.static_range(PARTS):
            release(ring, empty, i + part)
        i += PARTS
        ahead = start_scores(queries, ring, full, i, PARTS)
        top, norm = weigh_tile(
            scores, weights, ones, fades, t, scale, top, norm, last, lowest, at + t * 64
        )
        norm, scores = warpgroup_mma_wait(0, deps=(norm, ahead))
    for part in gl.static_range(PARTS):
        release(ring, empty, i + part)
    t = count - 1
    top, norm = weigh_tile(
        scores, weights, ones, fades, t, scale, top, norm, last, lowest, at + t * 64
    )
    return i + PARTS, top, warpgroup_mma_wait(0, deps=(norm,))


@gluon.jit
def segment_values(
    weights, fades, ring, full, empty, zeroed, i, count, at, keys, use, OWN: gl.constexpr
):  # fmt: skip
    """Return the segment's output for the next 128 columns [64, 128]: a chain over its tiles.

    zeroed, use, OWN: see zero_behind.
    """
    total = gl.zeros((64, 128), gl.float32, O_LAYOUT)
    for t in range(count):
        values = arrived(ring, full, i + t)
        if at + t * 64 + 64 > keys:
            zero_behind(values, keys - at - t * 64, zeroed, use, OWN)
        total = total * fades.index((t + 2) % 3).load(O_ROW)[:, None]  # at t = 0 total is 0
        total = warpgroup_mma(weights.index(t), values, total, is_async=True)
        total = warpgroup_mma_wait(0, deps=(total,))
        release(ring, empty, i + t)
    return total
