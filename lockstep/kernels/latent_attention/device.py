# mypy: ignore-errors
"""Device functions of latent attention: online softmax, folds."""

import triton
import triton.language as tl

NO_SCORE = tl.constexpr(-1e30)
"""The maximum over no scores: finite, so that a difference of two is a number."""


@triton.jit
def block_of(
    block, start, count,
    H: tl.constexpr, ROWS: tl.constexpr, SEGMENT: tl.constexpr, NEAR: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    """ROWS places (token, head) of a row with tokens start .. start + count - 1, all in front of
    FAR or all from there on: the first place, the end of the places of their kind, and the keys of
    their segments: NEAR in front, else SEGMENT."""
    near = tl.minimum(tl.maximum(FAR - start, 0), count) * H
    blocks = (near + ROWS - 1) // ROWS
    far = block >= blocks
    row = tl.where(far, near + (block - blocks) * ROWS, block * ROWS)
    stop = tl.where(far, count * H, near)
    segment = tl.where(far, SEGMENT, NEAR)
    return row, stop, segment


@triton.jit
def weigh(
    q_latent, q_rope, latent, rope, at, last, scale, top, norm, total, TILE: tl.constexpr
):  # fmt: skip
    """A tile of keys: online softmax over queries [ROWS, C] and [ROWS, R], that see keys up to last
    [ROWS].

    top: largest score [ROWS]; norm: sum of weights [ROWS, ONES], the same ONES times; total: the
    output [ROWS, C].
    """
    scores = tl.dot(q_latent, latent.T, input_precision="ieee")
    scores = tl.dot(q_rope, rope.T, scores, input_precision="ieee") * scale
    seen = (at + tl.arange(0, TILE))[None, :] <= last[:, None]
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    fade = tl.exp2(top - new_top)[:, None]
    weights = tl.exp2(scores - new_top[:, None]).to(latent.dtype)
    ones = tl.full((TILE, norm.shape[1]), 1.0, latent.dtype)
    norm = tl.dot(weights, ones, norm * fade, input_precision="ieee")
    total = tl.dot(weights, latent, total * fade, input_precision="ieee")
    return new_top, norm, total


@triton.jit
def empty_fold(ROWS: tl.constexpr, ONES: tl.constexpr, BLOCK_C: tl.constexpr):
    """A fold over no keys: the largest score, the sums of weights, the output."""
    top = tl.full((ROWS,), NO_SCORE, tl.float32)
    return top, tl.zeros((ROWS, ONES), tl.float32), tl.zeros((ROWS, BLOCK_C), tl.float32)


@triton.jit
def fold(best, norms, sums, top, norm, total):
    """One more part: each side scaled to the larger of the maxima."""
    new_best = tl.maximum(best, top)
    old = tl.exp2(best - new_best)[:, None]
    new = tl.exp2(top - new_best)[:, None]
    return new_best, norms * old + norm * new, sums * old + total * new
