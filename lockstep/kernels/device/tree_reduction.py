# mypy: ignore-errors
"""The fixed reduction tree over split-K partitions, in registers and over partials in memory."""

import triton
import triton.language as tl


@triton.jit
def reduce_partitions(
    ACCUMULATE: tl.constexpr, args, begin, length, K, COUNT: tl.constexpr
):  # fmt: skip
    """Accumulate COUNT split-K partitions and add them pairwise in registers, as a binary tree.

    Args:
        ACCUMULATE: device function (begin, end, *args) -> tuple of accumulators of one partition.
        args: tuple literal; a tuple that was assigned to a name loses its constexprs.
        begin: first column; partitions of `length` columns follow each other, the last one of K
            may be shorter.
        COUNT: a power of two. A tree of depth d keeps d + 1 sets of accumulators in registers.

    Returns: tuple of the sums of each accumulator.
    """
    if COUNT == 1:
        return ACCUMULATE(begin, tl.minimum(begin + length, K), *args)
    else:
        left = reduce_partitions(ACCUMULATE, args, begin, length, K, COUNT // 2)
        right = reduce_partitions(
            ACCUMULATE, args, begin + COUNT // 2 * length, length, K, COUNT // 2
        )
        total = ()
        for i in tl.static_range(len(left)):
            total = total + (left[i] + right[i],)
        return total


@triton.jit
def load_tree_sum(partials_ptr, offsets, stride, mask, COUNT: tl.constexpr):
    """Load COUNT partials, `stride` elements apart, and add them pairwise, as a binary tree."""
    if COUNT == 1:
        return tl.load(partials_ptr + offsets, mask=mask, other=0.0)
    else:
        left = load_tree_sum(partials_ptr, offsets, stride, mask, COUNT // 2)
        right = load_tree_sum(partials_ptr + COUNT // 2 * stride, offsets, stride, mask, COUNT // 2)
        return left + right
