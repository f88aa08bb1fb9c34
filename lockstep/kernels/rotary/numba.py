"""rope_and_cache on a CPU by one Numba kernel."""

import torch
from torch import Tensor

from lockstep.kernels.backends import numba_trait
from lockstep.kernels.formats.kv import KVCache, is_dense, rotate_queries, write_slots
from lockstep.kernels.rotary import rope_and_cache
from lockstep.kernels.rotary.numba_kernels import KERNELS
from lockstep.kernels.simd.strides import address, optional_address


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
    heads, rest = divmod(columns - 2 * kv_heads * dim, dim * (1 + gated))
    if heads < 0 or rest:
        raise ValueError(f"qkv: {columns} columns are no heads of {dim}, of which {kv_heads} are k")
    out = torch.empty(tokens, heads, dim, dtype=qkv.dtype)
    if qkv.stride(1) != 1:
        qkv = qkv.contiguous()
    if q_weight is None or k_weight is None:
        q_weight = k_weight = None
    if cos is None or sin is None:
        cos = sin = None
    half = 0 if cos is None else cos.shape[1]
    angles = 0 if cos is None else cos.numel()
    if 2 * half > dim:
        raise ValueError(f"cos: {half} angles rotate {2 * half} dims; a head has {dim}")
    positions = positions.long()
    KERNELS[qkv.dtype](
        qkv.data_ptr(),
        optional_address("q_weight", q_weight, qkv.dtype, dim),
        optional_address("k_weight", k_weight, qkv.dtype, dim),
        optional_address("cos", cos, torch.float32, angles),
        optional_address("sin", sin, torch.float32, angles),
        address("positions", positions, torch.int64, tokens),
        address("slot_mapping", slots, torch.int64, tokens),
        address("k_cache", keys, qkv.dtype, keys.numel()),
        address("v_cache", values, qkv.dtype, keys.numel()),
        out.data_ptr(), tokens, qkv.stride(0), heads, kv_heads, dim, half, int(gated), eps, offset,
    )  # fmt: skip
    if keys is not k_cache:
        write_slots(k_cache, slot_mapping, keys)
        write_slots(v_cache, slot_mapping, values)
        return rotate_queries(out, k_cache)
    return out
