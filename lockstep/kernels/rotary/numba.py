"""rope_and_cache on a CPU by one Numba kernel."""

import torch
from torch import Tensor

from lockstep.kernels.backends import numba_trait
from lockstep.kernels.formats.kv import KVCache, is_dense, rotate_queries, write_slots
from lockstep.kernels.rotary import rope_and_cache
from lockstep.kernels.rotary.numba_kernels import KERNELS


@rope_and_cache.backend("numba", supports=numba_trait)
def rope_and_cache_numba(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    eps: float,
    offset: float,
    gated: bool,
) -> Tensor:
    """See lockstep.kernels.rotary.rope_and_cache."""
    kv_heads, dim = k_cache.shape[2:]
    tokens, columns = qkv.shape
    keys = k_cache
    values = v_cache
    slots = slot_mapping.long()
    if not (is_dense(keys) and is_dense(values)):
        # The kernel writes the step's keys and values in order, and write_slots copies them.
        keys, values = (torch.empty(tokens, kv_heads, dim, dtype=qkv.dtype) for _ in range(2))
        slots = torch.arange(tokens)
    heads = (columns - 2 * kv_heads * dim) // (dim * (1 + gated))
    out = torch.empty(tokens, heads, dim, dtype=qkv.dtype)
    if qkv.stride(1) != 1:
        qkv = qkv.contiguous()
    normed = q_weight is not None and k_weight is not None
    rotated = cos is not None and sin is not None
    positions = positions.long()
    KERNELS[qkv.dtype](
        qkv.data_ptr(),
        _address(q_weight if normed else None), _address(k_weight if normed else None),
        _address(cos), _address(sin),
        positions.data_ptr(), slots.data_ptr(), keys.data_ptr(), values.data_ptr(),
        out.data_ptr(), tokens, qkv.stride(0), heads, kv_heads, dim,
        cos.shape[1] if cos is not None and rotated else 0, int(gated), eps, offset,
    )  # fmt: skip
    if keys is not k_cache:
        write_slots(k_cache, slot_mapping, keys)
        write_slots(v_cache, slot_mapping, values)
        return rotate_queries(out, k_cache)
    return out


def _address(x: Tensor | None) -> int:
    """Return the address of a tensor, 0 of None."""
    return 0 if x is None else x.data_ptr()
