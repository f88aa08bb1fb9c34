# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""latent_rope_and_cache in Triton.

One CTA per token and some query heads, and one per token for its latent and the key that all heads
share. The latent is normed by rms_norm's tree, a function of its width alone.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.kv_tile import store_quantized
from lockstep.kernels.device.reductions import inverse_rms, row_sum, spread
from lockstep.kernels.formats.kv import KVCache
from lockstep.kernels.formats.kv.launch import kv_operand, unsupported_cache
from lockstep.kernels.integers import ceil_div, next_power_of_2
from lockstep.kernels.latent_attention import latent_rope_and_cache

MAX_LATENT = 1024
"""Maximum width of a latent that one CTA norms."""
PAIRS_PER_CTA = 512
"""Pairs of q per CTA, as many bytes as ELEMENTS_PER_CTA of the rotary kernel."""
WARPS = 4


@triton.jit
def _rotate_pairs(
    x, out_ptrs, cos, sin, live, HEADS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr
):
    """Rotate HALF pairs of neighbours of each head at x and store them at out_ptrs. live: [HEADS,
    1]."""
    pair = spread(HEADS, PAIRS)
    mask = live & (pair < HALF)
    a = tl.load(x + 2 * pair, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + pair, mask=mask, other=1.0)
    s = tl.load(sin + pair, mask=mask, other=0.0)
    # Pairs are adjacent (GPT-J order), unlike the halves of rotary/triton.py.
    tl.store(out_ptrs + 2 * pair, (a * c - b * s).to(out_ptrs.dtype.element_ty), mask=mask)
    tl.store(out_ptrs + 2 * pair + 1, (b * c + a * s).to(out_ptrs.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["page_size", "eps", "layer_constant"],
    do_not_specialize_on_alignment=["positions", "slot_mapping"],
)
def _latent_rope_kernel(
    q, kv, weight, cos, sin, positions, slot_mapping, latents, ropes, out, q_token_stride,
    q_head_stride, kv_token_stride, page_size, l_page_stride, l_token_stride, r_page_stride,
    r_token_stride, eps, H: tl.constexpr, NOPE: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, scales, layer_constant,
    NUM_SCALES: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS query heads of one token; in its last CTA, write the latent and the shared key.

    NOPE: dims of a head before the rotated ones. scales, layer_constant, NUM_SCALES, STORE:
    quantized latents as KVOperand has them; STORE None: not quantized.
    """
    pdl_start()
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    angles = tl.load(positions + token) * HALF
    cos += angles
    sin += angles
    if group * HEADS < H:
        head = group * HEADS + tl.arange(0, HEADS)[:, None]
        head_ptrs = q + token * q_token_stride + head * q_head_stride + NOPE
        out_ptrs = out + (token * H + head) * (2 * HALF)
        _rotate_pairs(head_ptrs, out_ptrs, cos, sin, head < H, HEADS, HALF, PAIRS)
    else:
        kv += token * kv_token_stride
        slot = tl.load(slot_mapping + token).to(tl.int32)  # a 64-bit division is a function call
        page = (slot // page_size).to(tl.int64)
        token_in_page = slot % page_size
        # A 1 x 1 tensor turns scalar pointers into the [HEADS, 1] that _rotate_pairs takes.
        zero = tl.zeros((1, 1), tl.int32)
        rope = ropes + (page * r_page_stride + token_in_page * r_token_stride)
        _rotate_pairs(kv + C + zero, rope + zero, cos, sin, zero == 0, 1, HALF, PAIRS)
        column = tl.arange(0, BLOCK)
        live = column < C
        x = tl.load(kv + column, mask=live, other=0.0).to(tl.float32)
        scale = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
        normed = (x * inverse_rms(row_sum(x * x), eps, C) * scale).to(kv.dtype.element_ty)
        to = latents + (page * l_page_stride + token_in_page * l_token_stride)
        if STORE is None:
            tl.store(to + column, normed, mask=live)
        else:
            values = normed.to(tl.float32)[None]
            store_quantized(
                values, to + zero, scales, layer_constant, slot, zero, zero == 0, NUM_SCALES, 1, C,
                1, BLOCK, STORE,
            )  # fmt: skip


def _supports(**traits: Any) -> str | None:
    """Return None if this kernel serves a layer of these traits, else the reason why not."""
    latent = traits.get("latent", 64)
    if latent > MAX_LATENT:
        return f"a latent of {latent} is above {MAX_LATENT}"
    return unsupported_cache(latent, **traits) or gpu_trait(**traits)


@latent_rope_and_cache.backend("triton", supports=_supports)
def latent_rope_and_cache_triton(
    q: Tensor,
    kv: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    latents: KVCache,
    ropes: Tensor,
    eps: float,
) -> Tensor:
    """Run latent_rope_and_cache. Last strides are 1."""
    tokens, heads, width = q.shape
    _, page_size, latent = latents.shape
    rope = ropes.shape[2]
    out = torch.empty(tokens, heads, rope, dtype=q.dtype, device=q.device)
    pairs = next_power_of_2(rope // 2)
    latent_operand = kv_operand(latents, q.dtype)
    heads_per_cta = max(1, PAIRS_PER_CTA // pairs)
    if tokens:
        _latent_rope_kernel[(tokens, ceil_div(heads, heads_per_cta) + 1)](
            q, kv, weight, cos, sin, positions, slot_mapping, latent_operand.qdata, ropes, out,
            *q.stride()[:2], kv.stride(0), page_size, *latent_operand.qdata.stride()[:2],
            *ropes.stride()[:2], eps, H=heads, NOPE=width - rope, C=latent, HALF=rope // 2,
            HEADS=heads_per_cta, PAIRS=pairs, BLOCK=next_power_of_2(latent),
            scales=latent_operand.scales, layer_constant=latent_operand.layer_constant,
            NUM_SCALES=latent_operand.num_scales, STORE=latent_operand.store, num_warps=WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
