"""Tensors in, tensors out. One folder per op: the contract and its reference, then the backends."""

from lockstep.kernels.registry import Backend, Op, op

__all__ = ["Backend", "Op", "op"]
