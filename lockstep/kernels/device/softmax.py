# mypy: ignore-errors
"""Online softmax over tiles of keys, and the combination of KV splits: Triton and Gluon.

A row's state is (row_max, row_sum, acc): the largest score so far, the sum of
exp2(score - row_max), and the sum of values with these weights. The softmax scale includes log2(e),
since the GPU has an instruction for exp2 only.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = 1.4426950408889634
"""log2(e): softmax computes 2^(x log2(e)) for e^x."""
NO_SCORE = tl.constexpr(-1e30)
"""Row maximum over no scores: finite, so that the difference of two is a number."""


@triton.jit
def online_softmax(scores, scale, first_key, last_key, row_max, KEY_AXIS: tl.constexpr):
    """Mask a tile of scores and exponentiate it by the new row maximum.

    Args:
        scores: Q K^T of a tile, unscaled, with the keys along KEY_AXIS.
        first_key: position of the tile's first key.
        last_key: last key that each row sees, [ROWS].
        row_max: of the tiles before, [ROWS].

    Returns: new row_max [ROWS], factor of the state so far (broadcastable to scores), and p like
    scores, all fp32.
    """
    scores *= scale
    keys = first_key + tl.arange(0, scores.shape[KEY_AXIS])
    # Causal mask by absolute positions. It also cuts off keys past the row's end.
    visible = tl.expand_dims(keys, 1 - KEY_AXIS) <= tl.expand_dims(last_key, KEY_AXIS)
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, KEY_AXIS))
    rescale = tl.expand_dims(tl.exp2(row_max - new_max), KEY_AXIS)
    return new_max, rescale, tl.exp2(scores - tl.expand_dims(new_max, KEY_AXIS))


@triton.jit
def combine(all_max, all_sum, all_acc, row_max, row_sum, acc, AXIS: tl.constexpr):
    """Combine the state over all splits so far with that of the next split.

    Both sides are rescaled to the larger maximum. AXIS: the axis of sum and acc that is not ROWS.
    """
    new_max = tl.maximum(all_max, row_max)
    old_scale = tl.expand_dims(tl.exp2(all_max - new_max), AXIS)
    new_scale = tl.expand_dims(tl.exp2(row_max - new_max), AXIS)
    all_sum = all_sum * old_scale + row_sum * new_scale
    return new_max, all_sum, all_acc * old_scale + acc * new_scale


@gluon.jit
def mask_scores(scores, last_key, min_last_key, first_key, layout: gl.constexpr):
    """Mask the scores [64, 64] of keys past each row's last_key [64].

    min_last_key: the smallest of them: tiles below it, nearly all, skip the comparison.
    """
    if first_key + 63 > min_last_key:
        key = first_key + gl.arange(0, 64, gl.SliceLayout(0, layout))
        scores = gl.where(key[None, :] <= last_key[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def exponentiate(scores, row_max, dtype: gl.constexpr):
    """Exponentiate masked scores [64, keys] by the new row maximum.

    Returns: (new row_max [64], factor of the state so far [64], p [64, keys] in dtype).
    """
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    return new_max, gl.exp2(row_max - new_max), gl.exp2(scores - new_max[:, None]).to(dtype)


@gluon.jit
def combine_sums(all_max, all_sum, row_max, row_sum):
    """Combine maxima and sums of all splits so far with those of the next split.

    Returns: (new maximum, new sum, factor of the old accumulator, factor of the new one).
    """
    new_max = gl.maximum(all_max, row_max)
    old_scale = gl.exp2(all_max - new_max)
    new_scale = gl.exp2(row_max - new_max)
    return new_max, all_sum * old_scale + row_sum * new_scale, old_scale, new_scale
