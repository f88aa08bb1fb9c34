# mypy: ignore-errors
"""Numba kernel of rope_and_cache: norm, rotation and cache write of every head, in one call."""

from lockstep.kernels.norm.numba_kernels import norm_row
from lockstep.kernels.simd.compiler import KernelTable, inline, kernel
from lockstep.kernels.simd.vectors import F32, FLOATS, LANES, load_int, vload_part, vstore_part


@inline
def _copy(dtype, source, target, begin, end):
    """Copy elements begin .. end of a head."""
    for i in range(begin, end, LANES):
        vstore_part(dtype, target, i, end, vload_part(dtype, source, i, end))


@inline
def _rotate(dtype, size, source, target, cos, sin, half):
    """Rotate the pairs (j, half + j) of a head; source and target may be one head."""
    second = half * size
    for j in range(0, half, LANES):
        a = vload_part(dtype, source, j, half)
        b = vload_part(dtype, source + second, j, half)
        c = vload_part(F32, cos, j, half)
        s = vload_part(F32, sin, j, half)
        vstore_part(dtype, target, j, half, a * c - b * s)
        vstore_part(dtype, target + second, j, half, b * c + a * s)


@inline
def _store_head(dtype, size, source, weight, target, cos, sin, half, dim, eps, offset):
    """Norm a head unless weight is 0, rotate it unless half is 0, and write it to target."""
    if weight != 0:
        norm_row(dtype, dtype, source, weight, target, dim, eps, offset)
        source = target
    if half != 0:
        _rotate(dtype, size, source, target, cos, sin, half)
    if source != target:
        _copy(dtype, source, target, 2 * half, dim)


def _make_kernel(dtype, size):
    """Return the kernel of one dtype."""

    @kernel
    def rope_and_cache(
        qkv, q_weight, k_weight, cos, sin, positions, slots, k_cache, v_cache, out,
        tokens, stride, heads, kv_heads, dim, half, gated, eps, offset,
    ):  # fmt: skip
        head_bytes = dim * size
        q_bytes = head_bytes * 2 if gated else head_bytes
        for t in range(tokens):
            row = qkv + t * stride * size
            position = load_int(positions, t)
            cos_row = cos + position * half * 4
            sin_row = sin + position * half * 4
            for h in range(heads):
                target = out + (t * heads + h) * head_bytes
                _store_head(
                    dtype, size, row + h * q_bytes, q_weight, target, cos_row, sin_row, half, dim,
                    eps, offset,
                )  # fmt: skip
            keys = row + heads * q_bytes
            values = keys + kv_heads * head_bytes
            slot = load_int(slots, t)
            for h in range(kv_heads):
                cache_offset = (slot * kv_heads + h) * head_bytes
                _store_head(
                    dtype, size, keys + h * head_bytes, k_weight, k_cache + cache_offset, cos_row,
                    sin_row, half, dim, eps, offset,
                )  # fmt: skip
                _copy(dtype, values + h * head_bytes, v_cache + cache_offset, 0, dim)

    return rope_and_cache


KERNELS = KernelTable(
    (dtype, _make_kernel(loaded, dtype.itemsize)) for dtype, loaded in FLOATS.items()
)
