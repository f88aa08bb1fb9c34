# mypy: ignore-errors
"""Slots of the paged KV cache in Triton."""

import triton
import triton.language as tl


@triton.jit
def slot_at(pages, position, columns, page_size):
    """The slot of each position under a row of a page table."""
    column = tl.minimum(position // page_size, columns - 1)
    return tl.load(pages + column).to(tl.int64) * page_size + position % page_size
