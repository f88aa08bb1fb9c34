# mypy: ignore-errors
"""Names of Gluon that differ between the versions of Triton that are allowed."""

from triton.experimental.gluon import language as gl

barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""Of all warps that run a function; the name before Triton 3.7, and after."""
