"""Kernels: tensors in, tensors out. A folder per op has its contract, reference and backends."""

from lockstep.kernels.registry import Backend, Op, op

__all__ = ["Backend", "Op", "op"]
