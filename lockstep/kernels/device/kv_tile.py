# mypy: ignore-errors
"""How Triton kernels read tiles of one side of a cache, packed or not, and write packed heads."""

import triton
import triton.language as tl

from lockstep.kernels.device.reductions import spread


@triton.jit
def pages_of(pages, at, end, PAGE: tl.constexpr, TILE: tl.constexpr):
    """The page of tokens at .. at + TILE - 1 where they lie in one page, else of each [TILE]; the
    null page from end on. pages: the row's line of the page table."""
    if PAGE % TILE == 0:
        return tl.load(pages + at // PAGE, mask=at < end, other=0)
    else:
        key = at + tl.arange(0, TILE)
        return tl.load(pages + key // PAGE, mask=key < end, other=0)


@triton.jit
def _load(
    cache, page, at, keys, d, P_STRIDE: tl.constexpr, T_STRIDE: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys or values at .. at + TILE - 1 of a head, columns d: [TILE, columns], 0 from keys on."""
    lanes = tl.arange(0, TILE)
    mask = (at + lanes < keys)[:, None] & (d < D)[None, :]
    if PAGE % TILE == 0:
        cache += page.to(tl.int64) * P_STRIDE + at % PAGE * T_STRIDE
        place = lanes[:, None] * T_STRIDE
    else:
        place = (page.to(tl.int64) * P_STRIDE + (at + lanes) % PAGE * T_STRIDE)[:, None]
    return tl.load(cache + (place + d[None, :]), mask=mask, other=0.0)


@triton.jit
def _load_packed(
    codes, numbers, constant, kv, page, at, keys, P_STRIDE: tl.constexpr,
    T_STRIDE: tl.constexpr, COUNT: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, SHARE: tl.constexpr,
    FETCH: tl.constexpr, UNPACK: tl.constexpr, DTYPE: tl.constexpr, OPAQUE: tl.constexpr,
):  # fmt: skip
    """The same of a packed cache: fetched and unpacked by the codec's device functions, rounded to
    DTYPE. COUNT: numbers of a token and head. OPAQUE: a tile goes to shared memory as it was
    unpacked. Else it would be loaded as a product takes it: byte by byte, and by mma.sync in other
    groups of columns than those of DTYPE (kWidth 4), which adds them in another order.
    """
    lanes = tl.arange(0, TILE)
    live = (at + lanes < keys)[:, None]
    page = page.to(tl.int64)
    if PAGE % TILE == 0:
        codes += page * P_STRIDE + at % PAGE * T_STRIDE + lanes[:, None] * T_STRIDE
    else:
        codes += (page * P_STRIDE + (at + lanes) % PAGE * T_STRIDE)[:, None]
    if COUNT > 0:
        token = page * PAGE + (at + lanes) % PAGE
        numbers += (token * (HKV * COUNT) + kv * COUNT)[:, None]
    columns = tl.arange(0, max(BLOCK_D // SHARE, 1))[None, :]
    tile = UNPACK(FETCH(codes, numbers, columns, live, D), columns, constant, D).to(DTYPE)
    if OPAQUE:
        tile = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2
        )
    return tile


@triton.jit
def cache_tile(
    cache, numbers, constant, kv, page, at, keys, d, P_STRIDE: tl.constexpr,
    T_STRIDE: tl.constexpr, COUNT: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, SHARE: tl.constexpr, FETCH: tl.constexpr,
    UNPACK: tl.constexpr, DTYPE: tl.constexpr, OPAQUE: tl.constexpr,
):  # fmt: skip
    """A tile of a head (numbers, constant, FETCH, ..: as _launch.Opened has them) whose cache is
    packed or, where FETCH is None, not."""
    if FETCH is None:
        return _load(cache, page, at, keys, d, P_STRIDE, T_STRIDE, D, PAGE, TILE)
    else:
        return _load_packed(
            cache, numbers, constant, kv, page, at, keys, P_STRIDE, T_STRIDE,
            COUNT, HKV, D, d.shape[0], PAGE, TILE, SHARE, FETCH, UNPACK, DTYPE, OPAQUE,
        )  # fmt: skip


@triton.jit
def store_packed(
    values, codes, numbers, constant, slot, head, live, COUNT: tl.constexpr, HKV: tl.constexpr,
    D: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Heads [HEADS, BLOCK] of a slot by the codec's STORE; codes point to the heads' first."""
    if COUNT > 0:
        numbers += (slot.to(tl.int64) * HKV + head) * COUNT
    STORE(values, codes, numbers, constant, live, spread(HEADS, BLOCK), D)
