# mypy: ignore-errors
"""Device functions of latent attention in Triton: blocks of query rows and the softmax state."""

import triton
import triton.language as tl

from lockstep.kernels.device.softmax import NO_SCORE, online_softmax


@triton.jit
def block_of(
    block, start, count,
    H: tl.constexpr, ROWS: tl.constexpr, KV_SPLIT: tl.constexpr, NEAR_SPLIT: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    """Return the (token, head) rows of a block: all before position FAR, or all from there on.

    Returns: first row, end of the rows of its kind, keys of their KV splits (NEAR_SPLIT before FAR,
    else KV_SPLIT).
    """
    near_rows = tl.minimum(tl.maximum(FAR - start, 0), count) * H
    near_blocks = (near_rows + ROWS - 1) // ROWS
    is_far = block >= near_blocks
    first_row = tl.where(is_far, near_rows + (block - near_blocks) * ROWS, block * ROWS)
    row_end = tl.where(is_far, count * H, near_rows)
    split = tl.where(is_far, KV_SPLIT, NEAR_SPLIT)
    return first_row, row_end, split


@triton.jit
def softmax_step(q_latent, q_rope, latent, rope, first_key, last_key, scale, row_max, row_sum, acc):
    """Add a tile of keys to the online softmax state of queries [ROWS, C] and [ROWS, R].

    latent, rope: keys of the tile, [TILE, C] and [TILE, R]; the latent is the value, too. last_key:
    last key that each row sees, [ROWS]. row_max: [ROWS]. row_sum: [ROWS, ONES], ONES equal columns.
    acc: [ROWS, C].
    """
    # One sum over C + R, latent first: the second product continues the first accumulator.
    scores = tl.dot(q_latent, latent.T, input_precision="ieee")
    scores = tl.dot(q_rope, rope.T, scores, input_precision="ieee")
    row_max, rescale, p = online_softmax(scores, scale, first_key, last_key, row_max, 1)
    p = p.to(latent.dtype)
    # The row sum is a product with ones: the matrix unit adds it in the order of acc.
    ones = tl.full((latent.shape[0], row_sum.shape[1]), 1.0, latent.dtype)
    row_sum = tl.dot(p, ones, row_sum * rescale, input_precision="ieee")
    acc = tl.dot(p, latent, acc * rescale, input_precision="ieee")
    return row_max, row_sum, acc


@triton.jit
def empty_state(ROWS: tl.constexpr, ONES: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the softmax state over no keys: row_max, row_sum, acc."""
    row_max = tl.full((ROWS,), NO_SCORE, tl.float32)
    return row_max, tl.zeros((ROWS, ONES), tl.float32), tl.zeros((ROWS, BLOCK_C), tl.float32)
