# mypy: ignore-errors
"""Loads of key and value tiles from a cache, quantized or not, and stores of quantized heads."""

import triton
import triton.language as tl

from lockstep.kernels.device.reductions import spread


@triton.jit
def pages_of_tile(page_table_row, first_key, end, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Return the page of tokens first_key .. first_key + TILE - 1 if they lie in one page, else the
    page of each [TILE]; the null page from `end` on.

    page_table_row: pointer to the row's line of the page table.
    """
    # Tiles begin at multiples of TILE, so such a tile never straddles two pages.
    if PAGE % TILE == 0:
        return tl.load(page_table_row + first_key // PAGE, mask=first_key < end, other=0)
    else:
        key = first_key + tl.arange(0, TILE)
        return tl.load(page_table_row + key // PAGE, mask=key < end, other=0)


@triton.jit
def _load_tile(
    cache, page, first_key, num_keys, column, PAGE_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Load keys or values first_key .. first_key + TILE - 1 of a head: [TILE, columns], 0 from
    num_keys on."""
    token_offset = tl.arange(0, TILE)
    mask = (first_key + token_offset < num_keys)[:, None] & (column < D)[None, :]
    # One scalar page offset: the address arithmetic per token stays in 32 bits.
    if PAGE % TILE == 0:
        cache += page.to(tl.int64) * PAGE_STRIDE + first_key % PAGE * TOKEN_STRIDE
        offsets = token_offset[:, None] * TOKEN_STRIDE
    else:
        offsets = (
            page.to(tl.int64) * PAGE_STRIDE + (first_key + token_offset) % PAGE * TOKEN_STRIDE
        )[:, None]
    return tl.load(cache + (offsets + column[None, :]), mask=mask, other=0.0)


@triton.jit
def _load_quantized_tile(
    qdata, scales, layer_constant, kv, page, first_key, num_keys, PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, NUM_SCALES: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, VALUES_PER_LOAD: tl.constexpr,
    LOAD: tl.constexpr, DEQUANTIZE: tl.constexpr, DTYPE: tl.constexpr, OPAQUE: tl.constexpr,
):  # fmt: skip
    """Load a tile of a quantized cache with the quantizer's device functions, rounded to DTYPE.

    NUM_SCALES: scales of a token and head. OPAQUE: hide the dequantization from the compiler, so
    that the tile goes to shared memory in DTYPE. Otherwise the compiler would load the operand byte
    by byte, and mma.sync would take it in other groups of columns than those of DTYPE (kWidth 4),
    which adds them in another order.
    """
    token_offset = tl.arange(0, TILE)
    live = (first_key + token_offset < num_keys)[:, None]
    page = page.to(tl.int64)
    if PAGE % TILE == 0:
        qdata += (
            page * PAGE_STRIDE
            + first_key % PAGE * TOKEN_STRIDE
            + token_offset[:, None] * TOKEN_STRIDE
        )
    else:
        qdata += (page * PAGE_STRIDE + (first_key + token_offset) % PAGE * TOKEN_STRIDE)[:, None]
    if NUM_SCALES > 0:
        token = page * PAGE + (first_key + token_offset) % PAGE
        scales += (token * (HKV * NUM_SCALES) + kv * NUM_SCALES)[:, None]
    columns = tl.arange(0, max(BLOCK_D // VALUES_PER_LOAD, 1))[None, :]
    tile = DEQUANTIZE(LOAD(qdata, scales, columns, live, D), columns, layer_constant, D).to(DTYPE)
    if OPAQUE:
        # An opaque move of two bf16: the layout pass cannot push the conversion through it.
        tile = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2
        )
    return tile


@triton.jit
def load_kv_tile(
    cache, scales, layer_constant, kv, page, first_key, num_keys, column, PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, NUM_SCALES: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, VALUES_PER_LOAD: tl.constexpr, LOAD: tl.constexpr,
    DEQUANTIZE: tl.constexpr, DTYPE: tl.constexpr, OPAQUE: tl.constexpr,
):  # fmt: skip
    """Load a tile of a head from a cache, quantized or, where LOAD is None, of the model's dtype.

    scales, layer_constant, LOAD, ..: as KVOperand has them.
    """
    if LOAD is None:
        return _load_tile(
            cache, page, first_key, num_keys, column, PAGE_STRIDE, TOKEN_STRIDE, D, PAGE, TILE
        )
    else:
        return _load_quantized_tile(
            cache, scales, layer_constant, kv, page, first_key, num_keys, PAGE_STRIDE, TOKEN_STRIDE,
            NUM_SCALES, HKV, D, column.shape[0], PAGE, TILE, VALUES_PER_LOAD, LOAD, DEQUANTIZE,
            DTYPE, OPAQUE,
        )  # fmt: skip


@triton.jit
def store_quantized(
    x, qdata, scales, layer_constant, slot, head, live, NUM_SCALES: tl.constexpr, HKV: tl.constexpr,
    D: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Quantize heads [HEADS, BLOCK] of a slot by the quantizer's STORE. qdata points to the heads'
    first values."""
    if NUM_SCALES > 0:
        # Scales are [slots, HKV, NUM_SCALES].
        scales += (slot.to(tl.int64) * HKV + head) * NUM_SCALES
    STORE(x, qdata, scales, layer_constant, live, spread(HEADS, BLOCK), D)
