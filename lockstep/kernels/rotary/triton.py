# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""rope_and_cache in Triton.

One CTA per token and some heads of q, or as many of k and of v. The tree that sums a head's squares
is a function of D alone, as in rms_norm, so neither the number of heads per CTA nor alignment
changes a bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.hadamard import rotate
from lockstep.kernels.device.kv_tile import store_quantized
from lockstep.kernels.device.reductions import inverse_rms, row_sums, spread
from lockstep.kernels.formats.kv import KVCache
from lockstep.kernels.formats.kv.launch import kv_operand, unsupported_cache
from lockstep.kernels.integers import ceil_div, next_power_of_2
from lockstep.kernels.norm.triton import row_layout
from lockstep.kernels.rotary import rope_and_cache

MAX_HEAD_DIM = 1024
"""Maximum head dim: one CTA contains a whole head."""
ELEMENTS_PER_CTA = 1024
"""Elements of q in a CTA of 4 warps: times in docs/kernels/rotary.md."""


@triton.jit
def _apply_norm(x, inverse, weight, offset):
    """Return x * inverse * (offset + weight), rounded to x's dtype, in fp32."""
    values = x.to(tl.float32) * inverse * (offset + weight.to(tl.float32))
    return values.to(x.dtype).to(tl.float32)


@triton.jit
def _norm_rope_and_store(
    x, out, live, weight, cos, sin, eps, offset,
    D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Norm (unless weight is None), rotate (unless HALF is 0) and store heads of q or k.

    x, out: pointers to the heads. live: mask [HEADS, 1] of those that exist. cos, sin: pointers to
    the angles of the token's position.

    Both elements of a pair are loaded a second time, from L1, so that one thread has them.
    """
    column = spread(HEADS, BLOCK)
    pairs = spread(HEADS, PAIRS)
    in_head = live & (column < D)
    pair_mask = live & (pairs < HALF)
    # The whole head, for its sum of squares.
    x_head = tl.load(x + column, mask=in_head, other=0.0)
    if HALF > 0:
        a = tl.load(x + pairs, mask=pair_mask, other=0.0)
        b = tl.load(x + HALF + pairs, mask=pair_mask, other=0.0)
        c = tl.load(cos + pairs, mask=pair_mask, other=1.0)
        s = tl.load(sin + pairs, mask=pair_mask, other=0.0)
    if weight is not None:
        if HALF > 0:
            a_weight = tl.load(weight + pairs, mask=pair_mask, other=0.0)
            b_weight = tl.load(weight + HALF + pairs, mask=pair_mask, other=0.0)
        wide = x_head.to(tl.float32)
        inverse = inverse_rms(row_sums(wide * wide), eps, D)[:, None]
    # Dims past the rotary width are normed only.
    if D > 2 * HALF:
        unrotated = x_head
        if weight is not None:
            scale = tl.load(weight + column, mask=in_head, other=0.0)
            unrotated = _apply_norm(x_head, inverse, scale, offset).to(out.dtype.element_ty)
        tl.store(out + column, unrotated, mask=in_head & (column >= 2 * HALF))
    if HALF > 0:
        if weight is not None:
            a = _apply_norm(a, inverse, a_weight, offset)
            b = _apply_norm(b, inverse, b_weight, offset)
        else:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        tl.store(out + pairs, (a * c - b * s).to(out.dtype.element_ty), mask=pair_mask)
        tl.store(out + HALF + pairs, (b * c + a * s).to(out.dtype.element_ty), mask=pair_mask)


@triton.jit
def _norm_and_rope(
    x, live, weight, cos, sin, eps, offset,
    D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the heads of _norm_rope_and_store [HEADS, BLOCK], rounded, in fp32, 0 from column D
    on.

    A quantizer takes a head as a whole, so every column loads its partner of the pair.
    """
    column = spread(HEADS, BLOCK)
    in_head = live & (column < D)
    x_head = tl.load(x + column, mask=in_head, other=0.0)
    values = x_head.to(tl.float32)
    if weight is not None:
        inverse = inverse_rms(row_sums(values * values), eps, D)[:, None]
        scale = tl.load(weight + column, mask=in_head, other=0.0)
        values = _apply_norm(x_head, inverse, scale, offset)
    if HALF > 0:
        is_rotated = in_head & (column < 2 * HALF)
        upper = column >= HALF
        pair = tl.where(upper, column - HALF, column)
        # NeoX pairs: column j and j + HALF.
        partner = tl.where(upper, column - HALF, column + HALF)
        other = tl.load(x + partner, mask=is_rotated, other=0.0)
        if weight is not None:
            scale = tl.load(weight + partner, mask=is_rotated, other=0.0)
            other = _apply_norm(other, inverse, scale, offset)
        else:
            other = other.to(tl.float32)
        rotated = other * tl.load(sin + pair, mask=is_rotated, other=0.0)
        # (a, b) -> (a cos - b sin, b cos + a sin).
        rotated = tl.where(upper, rotated, -rotated)
        rotated = values * tl.load(cos + pair, mask=is_rotated, other=1.0) + rotated
        values = tl.where(is_rotated, rotated, values)
    # Rounded to the model's dtype before it is quantized, as an unquantized cache stores it.
    return tl.where(in_head, values.to(x_head.dtype).to(tl.float32), 0.0)


@triton.jit(
    do_not_specialize=["page_size", "eps", "offset", "k_layer_constant", "v_layer_constant"],
    do_not_specialize_on_alignment=["positions", "slot_mapping"],
)
def _rope_and_cache_kernel(
    qkv, q_weight, k_weight, cos, sin, positions, slot_mapping, k_cache, v_cache, q, qkv_stride,
    page_size, k_page_stride, k_token_stride, k_head_stride, v_page_stride, v_token_stride,
    v_head_stride, eps, offset, H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, GATED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr, k_scales, v_scales, k_layer_constant, v_layer_constant,
    K_NUM_SCALES: tl.constexpr, V_NUM_SCALES: tl.constexpr, K_STORE: tl.constexpr,
    V_STORE: tl.constexpr, ROTATION_BLOCK: tl.constexpr,
):  # fmt: skip
    """Process HEADS heads of one token: of q in the first CTAs, of k and v in the rest.

    K_STORE, V_STORE: quantizers' stores (kernels.formats.kv); None: the cache is not quantized.
    ROTATION_BLOCK: elements of a key that the quantizer rotates together, and so of q; 0: none.
    """
    pdl_start()
    Q_CTAS: tl.constexpr = (H + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    if HALF > 0:
        angles = tl.load(positions + token) * HALF
        cos += angles
        sin += angles
    head = tl.arange(0, HEADS)[:, None]
    qkv += token * qkv_stride
    if group < Q_CTAS:  # CTA-uniform: a CTA contains heads of q, or of k and v
        head += group * HEADS
        x = qkv + head * ((1 + GATED) * D)
        out = q + (token * H + head) * D
        if ROTATION_BLOCK == 0:
            _norm_rope_and_store(
                x, out, head < H, q_weight, cos, sin, eps, offset, D, HALF, HEADS, BLOCK, PAIRS
            )
        else:
            heads = _norm_and_rope(
                x, head < H, q_weight, cos, sin, eps, offset, D, HALF, HEADS, BLOCK
            )
            heads = rotate(heads, k_layer_constant, ROTATION_BLOCK).to(q.dtype.element_ty)
            tl.store(out + spread(HEADS, BLOCK), heads, mask=head < H)
    else:
        head += (group - Q_CTAS) * HEADS
        column = tl.arange(0, BLOCK)[None]
        live = head < HKV
        keys = qkv + (H * (1 + GATED) + head) * D
        v = tl.load(keys + HKV * D + column, mask=live & (column < D), other=0.0)
        slot = tl.load(slot_mapping + token).to(tl.int32)  # a 64-bit division is a function call
        page = (slot // page_size).to(tl.int64)  # a cache may exceed 2^31 elements
        token_in_page = slot % page_size
        k_offset = page * k_page_stride + token_in_page * k_token_stride
        k_ptrs = k_cache + k_offset + head * k_head_stride
        if K_STORE is None:
            _norm_rope_and_store(
                keys, k_ptrs, live, k_weight, cos, sin, eps, offset, D, HALF, HEADS, BLOCK, PAIRS
            )
            v_ptrs = (
                v_cache
                + (page * v_page_stride + token_in_page * v_token_stride)
                + head * v_head_stride
            )
            tl.store(v_ptrs + column, v, mask=live & (column < D))
        else:
            k = _norm_and_rope(keys, live, k_weight, cos, sin, eps, offset, D, HALF, HEADS, BLOCK)
            store_quantized(
                k, k_ptrs, k_scales, k_layer_constant, slot, head, live, K_NUM_SCALES, HKV, D,
                HEADS, BLOCK, K_STORE,
            )  # fmt: skip
            v_ptrs = (
                v_cache
                + (page * v_page_stride + token_in_page * v_token_stride)
                + head * v_head_stride
            )
            store_quantized(
                v.to(tl.float32), v_ptrs, v_scales, v_layer_constant, slot, head, live,
                V_NUM_SCALES, HKV, D, HEADS, BLOCK, V_STORE,
            )  # fmt: skip


def _supports(**traits: Any) -> str | None:
    """Return None if this kernel serves a layer of these traits, else the reason why not."""
    dim = traits.get("head_dim", 64)
    if dim > MAX_HEAD_DIM:
        return f"head_dim {dim} is above {MAX_HEAD_DIM}"
    return unsupported_cache(dim, **traits) or gpu_trait(**traits)


@rope_and_cache.backend("triton", supports=_supports)
def rope_and_cache_triton(
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
    """Run rope_and_cache. Last strides are 1."""
    tokens, width = qkv.shape
    _, page_size, kv_heads, dim = k_cache.shape
    heads = (width // dim - 2 * kv_heads) // (1 + gated)
    q = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    pairs = 0 if cos is None else cos.shape[1]
    # About ELEMENTS_PER_CTA elements per CTA, at least one head.
    heads_per_cta = max(1, ELEMENTS_PER_CTA // next_power_of_2(dim))
    groups = ceil_div(heads, heads_per_cta) + ceil_div(kv_heads, heads_per_cta)
    k = kv_operand(k_cache, qkv.dtype)
    v = kv_operand(v_cache, qkv.dtype)
    if tokens:
        _rope_and_cache_kernel[(tokens, groups)](
            qkv, q_weight, k_weight, cos, sin, positions, slot_mapping, k.qdata, v.qdata, q,
            qkv.stride(0), page_size, *k.qdata.stride()[:3], *v.qdata.stride()[:3], eps, offset,
            H=heads, HKV=kv_heads, HALF=pairs, GATED=int(gated), HEADS=heads_per_cta,
            PAIRS=next_power_of_2(max(pairs, 1)), **row_layout(dim, heads_per_cta),
            k_scales=k.scales, v_scales=v.scales, k_layer_constant=k.layer_constant,
            v_layer_constant=v.layer_constant, K_NUM_SCALES=k.num_scales, V_NUM_SCALES=v.num_scales,
            K_STORE=k.store, V_STORE=v.store, ROTATION_BLOCK=k.rotation_block,
        )  # fmt: skip
    return q
