"""Paged attention: the op's contract, reference and backends."""

from lockstep.kernels.attention.contract import SEGMENT, gated, paged_attention

__all__ = ["SEGMENT", "gated", "paged_attention"]
