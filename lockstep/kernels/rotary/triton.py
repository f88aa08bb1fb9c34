# mypy: ignore-errors
"""rope_and_cache in Triton.

One program per token and some heads of q, or as many of k and of v; the tree that sums a head is a
function of D alone, as in rms_norm, so that neither their number nor alignment changes a bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.device.hadamard import turned
from lockstep.kernels.device.kv_tile import store_packed
from lockstep.kernels.device.reductions import inverse_rms, row_sums, spread
from lockstep.kernels.formats.kv import KVCache
from lockstep.kernels.formats.kv.launch import opened, unserved
from lockstep.kernels.norm.triton import row_layout
from lockstep.kernels.rotary import rope_and_cache

WIDEST = 1024
"""Numbers of a head that one program takes."""
NUMBERS_TOGETHER = 1024
"""Numbers of q in one program, in 4 warps: times in docs/kernels/rotary.md."""


@triton.jit
def _normed(x, inverse, weight, offset):
    """x * inverse * (offset + weight), rounded to x's dtype; fp32."""
    values = x.to(tl.float32) * inverse * (offset + weight.to(tl.float32))
    return values.to(x.dtype).to(tl.float32)


@triton.jit
def _turn(
    x, out, live, weight, cos, sin, eps, offset,
    D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Heads of q or k, normed (unless weight is None) and rotated (unless HALF is 0): x and out
    point to them, live [HEADS, 1] says which are there; cos and sin point to the position's angles.

    Both numbers of a pair are loaded once more, from L1, so that one thread holds them.
    """
    lanes = spread(HEADS, BLOCK)
    pairs = spread(HEADS, PAIRS)
    own = live & (lanes < D)
    turns = live & (pairs < HALF)
    mine = tl.load(x + lanes, mask=own, other=0.0)
    if HALF > 0:
        a = tl.load(x + pairs, mask=turns, other=0.0)
        b = tl.load(x + HALF + pairs, mask=turns, other=0.0)
        c = tl.load(cos + pairs, mask=turns, other=1.0)
        s = tl.load(sin + pairs, mask=turns, other=0.0)
    if weight is not None:
        if HALF > 0:
            a_weight = tl.load(weight + pairs, mask=turns, other=0.0)
            b_weight = tl.load(weight + HALF + pairs, mask=turns, other=0.0)
        wide = mine.to(tl.float32)
        inverse = inverse_rms(row_sums(wide * wide), eps, D)[:, None]
    if D > 2 * HALF:
        passed = mine
        if weight is not None:
            scale = tl.load(weight + lanes, mask=own, other=0.0)
            passed = _normed(mine, inverse, scale, offset).to(out.dtype.element_ty)
        tl.store(out + lanes, passed, mask=own & (lanes >= 2 * HALF))
    if HALF > 0:
        if weight is not None:
            a = _normed(a, inverse, a_weight, offset)
            b = _normed(b, inverse, b_weight, offset)
        else:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        tl.store(out + pairs, (a * c - b * s).to(out.dtype.element_ty), mask=turns)
        tl.store(out + HALF + pairs, (b * c + a * s).to(out.dtype.element_ty), mask=turns)


@triton.jit
def _turned(
    x, live, weight, cos, sin, eps, offset,
    D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """_turn's heads [HEADS, BLOCK], rounded, in fp32; 0 behind D: a codec sees a head as a whole.

    A number's partner in its pair is loaded beside it.
    """
    lanes = spread(HEADS, BLOCK)
    own = live & (lanes < D)
    mine = tl.load(x + lanes, mask=own, other=0.0)
    values = mine.to(tl.float32)
    if weight is not None:
        inverse = inverse_rms(row_sums(values * values), eps, D)[:, None]
        scale = tl.load(weight + lanes, mask=own, other=0.0)
        values = _normed(mine, inverse, scale, offset)
    if HALF > 0:
        turns = own & (lanes < 2 * HALF)
        upper = lanes >= HALF
        pair = tl.where(upper, lanes - HALF, lanes)
        partner = tl.where(upper, lanes - HALF, lanes + HALF)
        other = tl.load(x + partner, mask=turns, other=0.0)
        if weight is not None:
            scale = tl.load(weight + partner, mask=turns, other=0.0)
            other = _normed(other, inverse, scale, offset)
        else:
            other = other.to(tl.float32)
        turned = other * tl.load(sin + pair, mask=turns, other=0.0)
        turned = tl.where(upper, turned, -turned)
        turned = values * tl.load(cos + pair, mask=turns, other=1.0) + turned
        values = tl.where(turns, turned, values)
    return tl.where(own, values.to(mine.dtype).to(tl.float32), 0.0)


@triton.jit(
    do_not_specialize=["page_size", "eps", "offset", "k_constant", "v_constant"],
    do_not_specialize_on_alignment=["positions", "slot_mapping"],
)
def _rope_and_cache_kernel(
    qkv, q_weight, k_weight, cos, sin, positions, slot_mapping, k_cache, v_cache, q,
    stride, page_size, k_page, k_token, k_head, v_page, v_token, v_head, eps, offset,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, GATED: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr,
    k_numbers, v_numbers, k_constant, v_constant, K_COUNT: tl.constexpr, V_COUNT: tl.constexpr,
    K_STORE: tl.constexpr, V_STORE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token: of q in its first programs, of k and v in the rest.

    K_STORE, V_STORE: how keys and values are packed (kernels.formats.kv); None: they are not.
    TURNED: numbers of a head that the packing of keys rotates together, and so q's too; 0: none.
    """
    Q: tl.constexpr = (H + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    if HALF > 0:
        angles = tl.load(positions + token) * HALF
        cos += angles
        sin += angles
    head = tl.arange(0, HEADS)[:, None]
    qkv += token * stride
    if group < Q:
        head += group * HEADS
        x = qkv + head * ((1 + GATED) * D)
        out = q + (token * H + head) * D
        if TURNED == 0:
            _turn(x, out, head < H, q_weight, cos, sin, eps, offset, D, HALF, HEADS, BLOCK, PAIRS)
        else:
            heads = _turned(x, head < H, q_weight, cos, sin, eps, offset, D, HALF, HEADS, BLOCK)
            heads = turned(heads, k_constant, TURNED).to(q.dtype.element_ty)
            tl.store(out + spread(HEADS, BLOCK), heads, mask=head < H)
    else:
        head += (group - Q) * HEADS
        lanes = tl.arange(0, BLOCK)[None]
        live = head < HKV
        keys = qkv + (H * (1 + GATED) + head) * D
        v = tl.load(keys + HKV * D + lanes, mask=live & (lanes < D), other=0.0)
        slot = tl.load(slot_mapping + token).to(tl.int32)  # a division of 64 bits is a call
        page = (slot // page_size).to(tl.int64)
        place = slot % page_size
        k_at = k_cache + (page * k_page + place * k_token) + head * k_head
        if K_STORE is None:
            _turn(keys, k_at, live, k_weight, cos, sin, eps, offset, D, HALF, HEADS, BLOCK, PAIRS)
            v_at = v_cache + (page * v_page + place * v_token) + head * v_head
            tl.store(v_at + lanes, v, mask=live & (lanes < D))
        else:
            k = _turned(keys, live, k_weight, cos, sin, eps, offset, D, HALF, HEADS, BLOCK)
            store_packed(
                k, k_at, k_numbers, k_constant, slot, head, live, K_COUNT, HKV, D, HEADS, BLOCK,
                K_STORE,
            )  # fmt: skip
            v_at = v_cache + (page * v_page + place * v_token) + head * v_head
            store_packed(
                v.to(tl.float32), v_at, v_numbers, v_constant, slot, head, live, V_COUNT, HKV, D,
                HEADS, BLOCK, V_STORE,
            )  # fmt: skip


def _supports(**traits: Any) -> str | None:
    dim = traits.get("head_dim", 64)
    if dim > WIDEST:
        return f"head_dim {dim} is above {WIDEST}"
    return unserved(dim, **traits) or gpu_trait(**traits)


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
    """See lockstep.kernels.rotary.rope_and_cache. Last strides are 1."""
    tokens, width = qkv.shape
    _, page_size, kv_heads, dim = k_cache.shape
    heads = (width // dim - 2 * kv_heads) // (1 + gated)
    q = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    pairs = 0 if cos is None else cos.shape[1]
    together = max(1, NUMBERS_TOGETHER // triton.next_power_of_2(dim))
    groups = triton.cdiv(heads, together) + triton.cdiv(kv_heads, together)
    k = opened(k_cache, qkv.dtype)
    v = opened(v_cache, qkv.dtype)
    if tokens:
        _rope_and_cache_kernel[(tokens, groups)](
            qkv, q_weight, k_weight, cos, sin, positions, slot_mapping, k.codes, v.codes, q,
            qkv.stride(0), page_size, *k.codes.stride()[:3], *v.codes.stride()[:3], eps, offset,
            H=heads, HKV=kv_heads, HALF=pairs, GATED=int(gated), HEADS=together,
            PAIRS=triton.next_power_of_2(max(pairs, 1)), **row_layout(dim, together),
            k_numbers=k.numbers, v_numbers=v.numbers, k_constant=k.constant, v_constant=v.constant,
            K_COUNT=k.beside, V_COUNT=v.beside, K_STORE=k.store, V_STORE=v.store, TURNED=k.block,
        )  # fmt: skip
    return q
