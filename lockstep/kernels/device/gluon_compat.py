# mypy: ignore-errors
"""Names of Gluon that differ between the allowed versions of Triton."""

from triton.experimental.gluon import language as gl

barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""Barrier of all warps that run a function: the name before Triton 3.7, and after."""
