"""rope_and_cache in Triton.

One program per (token, head of q, k or v); the lanes that sum a head are a function of D alone, as
in rms_norm. No argument is specialised on alignment or size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.norm.triton import inverse_rms, row_layout
from lockstep.kernels.rotary import rope_and_cache

WIDEST = 1024


@triton.jit
def _scaled(x, inverse, weight, offset):
    """A normed head: x * inverse * (offset + weight), rounded to x's dtype, as fp32."""
    values = x.to(tl.float32) * inverse * (offset + weight.to(tl.float32))
    return values.to(x.dtype).to(tl.float32)


@triton.jit
def _turned(
    x, weight, cos, sin, eps, offset, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    """One head of q or k [BLOCK], normed and rotated; cos and sin point to its position's line.

    A lane computes its pair's normed value again rather than ask another lane for it.
    """
    lanes = tl.arange(0, BLOCK)
    live, turns, low = lanes < D, lanes < 2 * HALF, lanes < HALF
    pairs, angles = tl.where(low, lanes + HALF, lanes - HALF), tl.where(low, lanes, lanes - HALF)
    mine = tl.load(x + lanes, mask=live, other=0.0)
    wide = mine.to(tl.float32)
    inverse = inverse_rms(wide, eps, D)
    mine = _scaled(mine, inverse, tl.load(weight + lanes, mask=live, other=0.0), offset)
    pair = tl.load(x + pairs, mask=turns, other=0.0)
    pair = _scaled(pair, inverse, tl.load(weight + pairs, mask=turns, other=0.0), offset)
    c = tl.load(cos + angles, mask=turns, other=1.0)
    s = tl.load(sin + angles, mask=turns, other=0.0)
    return tl.where(turns, mine * c + tl.where(low, -pair, pair) * s, mine)


@triton.jit(
    do_not_specialize=[
        "stride", "page_size", "k_page", "k_token", "k_head", "v_page", "v_token", "v_head",
        "eps", "offset",
    ],
    do_not_specialize_on_alignment=[
        "qkv", "q_weight", "k_weight", "cos", "sin", "positions", "slot_mapping", "k_cache",
        "v_cache", "q",
    ],
)  # fmt: skip
def _rope_and_cache_kernel(
    qkv, q_weight, k_weight, cos, sin, positions, slot_mapping, k_cache, v_cache, q,
    stride, page_size, k_page, k_token, k_head, v_page, v_token, v_head, eps, offset,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one token: of q where head < H, then HKV of k, then HKV of v."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    line = tl.load(positions + token) * HALF
    slot = tl.load(slot_mapping + token)
    page, place = slot // page_size, slot % page_size
    qkv += token * stride
    keys = qkv + H * (1 + GATED) * D
    cos += line
    sin += line
    if head < H:
        x = qkv + head * (1 + GATED) * D
        turned = _turned(x, q_weight, cos, sin, eps, offset, D, HALF, BLOCK)
        q += (token * H + head) * D
        tl.store(q + lanes, turned.to(q.dtype.element_ty), mask=lanes < D)
    elif head < H + HKV:
        x = keys + (head - H) * D
        turned = _turned(x, k_weight, cos, sin, eps, offset, D, HALF, BLOCK)
        k_cache += page * k_page + place * k_token + (head - H) * k_head
        tl.store(k_cache + lanes, turned.to(k_cache.dtype.element_ty), mask=lanes < D)
    else:
        v = tl.load(keys + (head - H) * D + lanes, mask=lanes < D, other=0.0)
        v_cache += page * v_page + place * v_token + (head - H - HKV) * v_head
        tl.store(v_cache + lanes, v, mask=lanes < D)


def _supports(**traits: Any) -> str | None:
    dim = traits.get("head_dim", 64)
    return f"head_dim {dim} is above {WIDEST}" if dim > WIDEST else gpu_trait(**traits)


@rope_and_cache.backend("triton", supports=_supports)
def rope_and_cache_triton(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
    offset: float,
    gated: bool,
) -> Tensor:
    """See lockstep.kernels.rotary.rope_and_cache. Last strides are 1."""
    (tokens, width), (_, page_size, kv_heads, dim) = qkv.shape, k_cache.shape
    heads = (width // dim - 2 * kv_heads) // (1 + gated)
    q = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        _rope_and_cache_kernel[(tokens, heads + 2 * kv_heads)](
            qkv, q_weight, k_weight, cos, sin, positions, slot_mapping, k_cache, v_cache, q,
            qkv.stride(0), page_size, *k_cache.stride()[:3], *v_cache.stride()[:3], eps, offset,
            H=heads, HKV=kv_heads, HALF=cos.shape[1], GATED=int(gated),
            **row_layout(dim),
        )  # fmt: skip
    return q
