# mypy: ignore-errors
"""latent_rope_and_cache in Triton.

One program per token and some heads of q, and one per token for its latent and the key that all
heads share. The latent is normed by rms_norm's tree, a function of its width alone.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.device.kv_tile import store_packed
from lockstep.kernels.device.reductions import inverse_rms, row_sum, spread
from lockstep.kernels.formats.kv import KVCache
from lockstep.kernels.formats.kv.launch import opened, unserved
from lockstep.kernels.latent_attention import latent_rope_and_cache

WIDEST = 1024
"""Dims of a latent that one program norms."""
PAIRS_TOGETHER = 512
"""Pairs of q in one program, as many bytes as NUMBERS_TOGETHER of the rotary kernel."""
WARPS = 4


@triton.jit
def _turn(x, to, cos, sin, live, HEADS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Turns HALF pairs of neighbours of each head at x into `to`. live [HEADS, 1]."""
    pair = spread(HEADS, PAIRS)
    mask = live & (pair < HALF)
    a = tl.load(x + 2 * pair, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + pair, mask=mask, other=1.0)
    s = tl.load(sin + pair, mask=mask, other=0.0)
    tl.store(to + 2 * pair, (a * c - b * s).to(to.dtype.element_ty), mask=mask)
    tl.store(to + 2 * pair + 1, (b * c + a * s).to(to.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["page_size", "eps", "constant"],
    do_not_specialize_on_alignment=["positions", "slot_mapping"],
)
def _latent_rope_kernel(
    q, kv, weight, cos, sin, positions, slot_mapping, latents, ropes, out,
    q_token, q_head, kv_token, page_size, l_page, l_token, r_page, r_token, eps,
    H: tl.constexpr, PLAIN: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    numbers, constant, COUNT: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token's q; in its last program, the latent and the shared key.

    numbers, constant, COUNT, STORE: how latents are packed (kernels.formats.kv); STORE None:
    they are not.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    angles = tl.load(positions + token) * HALF
    cos += angles
    sin += angles
    if group * HEADS < H:
        head = group * HEADS + tl.arange(0, HEADS)[:, None]
        from_head = q + token * q_token + head * q_head + PLAIN
        to_head = out + (token * H + head) * (2 * HALF)
        _turn(from_head, to_head, cos, sin, head < H, HEADS, HALF, PAIRS)
    else:
        kv += token * kv_token
        slot = tl.load(slot_mapping + token).to(tl.int32)  # a division of 64 bits is a call
        page = (slot // page_size).to(tl.int64)
        place = slot % page_size
        one = tl.zeros((1, 1), tl.int32)
        rope = ropes + (page * r_page + place * r_token)
        _turn(kv + C + one, rope + one, cos, sin, one == 0, 1, HALF, PAIRS)
        lanes = tl.arange(0, BLOCK)
        live = lanes < C
        x = tl.load(kv + lanes, mask=live, other=0.0).to(tl.float32)
        scale = tl.load(weight + lanes, mask=live, other=0.0).to(tl.float32)
        normed = (x * inverse_rms(row_sum(x * x), eps, C) * scale).to(kv.dtype.element_ty)
        to = latents + (page * l_page + place * l_token)
        if STORE is None:
            tl.store(to + lanes, normed, mask=live)
        else:
            values = normed.to(tl.float32)[None]
            store_packed(
                values, to + one, numbers, constant, slot, one, one == 0, COUNT, 1, C, 1, BLOCK,
                STORE,
            )  # fmt: skip


def _supports(**traits: Any) -> str | None:
    latent = traits.get("latent", 64)
    if latent > WIDEST:
        return f"a latent of {latent} is above {WIDEST}"
    return unserved(latent, **traits) or gpu_trait(**traits)


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
    """See lockstep.kernels.latent_attention.latent_rope_and_cache. Last strides are 1."""
    tokens, heads, width = q.shape
    _, page_size, latent = latents.shape
    rope = ropes.shape[2]
    out = torch.empty(tokens, heads, rope, dtype=q.dtype, device=q.device)
    pairs = triton.next_power_of_2(rope // 2)
    held = opened(latents, q.dtype)
    together = max(1, PAIRS_TOGETHER // pairs)
    if tokens:
        _latent_rope_kernel[(tokens, triton.cdiv(heads, together) + 1)](
            q, kv, weight, cos, sin, positions, slot_mapping, held.codes, ropes, out,
            *q.stride()[:2], kv.stride(0), page_size, *held.codes.stride()[:2],
            *ropes.stride()[:2],
            eps, H=heads, PLAIN=width - rope, C=latent, HALF=rope // 2, HEADS=together,
            PAIRS=pairs, BLOCK=triton.next_power_of_2(latent), numbers=held.numbers,
            constant=held.constant, COUNT=held.beside, STORE=held.store, num_warps=WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
