# mypy: ignore-errors
"""Numba kernel of lora: both sums are binary trees of halves, in vectors of 16 lanes."""

import numpy as np

from lockstep.kernels.simd.compiler import KernelTable, inline, keep_alive, kernel
from lockstep.kernels.simd.vectors import (
    F32,
    FLOATS,
    LANES,
    load,
    load_int32,
    splat,
    store,
    sum_lanes,
    vload,
    vload_part,
    vstore,
    vstore_part,
)

ZERO = F32(0.0)


@inline
def add_vectors(vectors, count):
    """Add `count` vectors in memory as halving_sum does, and return the sum. Overwrites them."""
    while count > 1:
        half = 1
        while 2 * half < count:
            half *= 2
        for i in range(count - half):
            second = vload(F32, vectors, (half + i) * LANES)
            vstore(F32, vectors, i * LANES, vload(F32, vectors, i * LANES) + second)
        count = half
    return vload(F32, vectors, 0)


def _make_lora(dtype, size):
    """Return the kernel of tables and outputs in one dtype of this size in bytes."""

    @kernel
    def lora(
        y, x, a, b, scales, parts, adapter_ids, begin, end, x_stride, columns, k_size, rank,
        num_parts,
    ):  # fmt: skip
        """Add the adapters of tokens begin to end. x: fp32 rows, x_stride elements apart."""
        k_vectors = (k_size + LANES - 1) // LANES
        num_products = max(k_vectors, rank) * LANES
        memory = np.empty(num_products + rank, np.float32)
        products = memory.ctypes.data
        hidden = products + num_products * 4
        for t in range(begin, end):
            adapter = load_int32(adapter_ids, t)
            if adapter == 0:
                continue
            row = x + t * x_stride * 4
            first = 0
            for part in range(num_parts):
                last = first
                while last < columns and load_int32(parts, last) == part:
                    last += 1
                index = adapter * num_parts + part
                scale = load(F32, scales, index)
                if scale != ZERO and first < last:
                    for r in range(rank):
                        a_row = a + (index * rank + r) * k_size * size
                        # Lanes after the last column are 0 and change no bit of the sum.
                        for i in range(0, k_size, LANES):
                            value = vload_part(F32, row, i, k_size)
                            value = value * vload_part(dtype, a_row, i, k_size)
                            vstore(F32, products, i, value)
                        # Adding 0.0 turns -0.0 into 0.0, as halving_sum does.
                        store(F32, hidden, r, sum_lanes(add_vectors(products, k_vectors)) + ZERO)
                    for n in range(first, last, LANES):
                        for r in range(rank):
                            b_row = b + (adapter * rank + r) * columns * size
                            value = splat(load(F32, hidden, r)) * vload_part(dtype, b_row, n, last)
                            vstore(F32, products, r * LANES, value)
                        delta = add_vectors(products, rank) + splat(ZERO)
                        y_row = y + t * columns * size
                        value = vload_part(dtype, y_row, n, last) + splat(scale) * delta
                        vstore_part(dtype, y_row, n, last, value)
                first = last
        keep_alive(memory)

    return lora


KERNELS = KernelTable(
    (dtype, _make_lora(loaded, dtype.itemsize)) for dtype, loaded in FLOATS.items()
)
"""Dtype of y, a and b -> kernel."""
