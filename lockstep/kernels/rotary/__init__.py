"""QK norm, rotary embedding and the write to the KV cache, in one op."""

from lockstep.kernels.rotary.contract import rope_and_cache

__all__ = ["rope_and_cache"]
