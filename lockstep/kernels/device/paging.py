# mypy: ignore-errors
"""Slots of the paged KV cache in Triton."""

import triton
import triton.language as tl


@triton.jit
def slot_at(page_table_ptr, position, columns, page_size):
    """Return the cache slots of positions of one row.

    page_table_ptr: the row's page table, of `columns` pages.
    """
    # Positions past the table (padding) take its last column, so that no load is out of bounds.
    column = tl.minimum(position // page_size, columns - 1)
    return tl.load(page_table_ptr + column).to(tl.int64) * page_size + position % page_size
