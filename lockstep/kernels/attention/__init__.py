"""Paged attention: the op's contract, reference and backends."""

from lockstep.kernels.attention.contract import KV_SPLIT, apply_gates, paged_attention

__all__ = ["KV_SPLIT", "apply_gates", "paged_attention"]
