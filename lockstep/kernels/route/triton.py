# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""route in Triton: one warp per token, its logits in registers; more CTAs for the shared expert.

The softmax's sum is a tree that the source spells out (row_sum), and one warp serves any batch, so
that a row's bits are a function of E alone. The choice is a comparison of 32-bit integers, which a
warp reduces in one instruction: the largest key, the lowest index that has it, and the bits of its
score.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.activations import Act
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.device.activations import relu2, sigmoid, silu_product
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.reductions import row_sum
from lockstep.kernels.device.tree_reduction import load_tree_sum
from lockstep.kernels.integers import ceil_div, next_power_of_2
from lockstep.kernels.route.contract import (
    BARRED_KEY,
    NAN_KEY,
    SIGN_OFF,
    TINY,
    RouterOutput,
    Scoring,
    route,
)

MAX_EXPERTS = 512
"""Maximum experts: 16 logits per lane of a warp. DeepSeek-V3 has 256, Qwen3-Next 512."""
COLUMNS = 512
"""Columns of the shared expert per CTA: 16 per lane of a warp."""
SIGN_OFF_TL: tl.constexpr = tl.constexpr(SIGN_OFF)
NAN_KEY_TL: tl.constexpr = tl.constexpr(NAN_KEY)
BARRED_TL: tl.constexpr = tl.constexpr(BARRED_KEY)
TINY_TL: tl.constexpr = tl.constexpr(TINY)
BELOW_ALL: tl.constexpr = tl.constexpr(-(2**63))
"""Below the 64-bit key of every expert or group."""


@triton.jit
def _sortable_keys(scores):
    """See lockstep.kernels.route.contract.sortable_keys."""
    bits = scores.to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ SIGN_OFF_TL, bits)
    return tl.where(scores == scores, keys, NAN_KEY_TL)


@triton.jit
def _append_index(keys, indices, LANES: tl.constexpr):
    """Widen int32 keys to unique int64 keys in the same order; equal ones by descending index."""
    return (keys.to(tl.int64) << 32) | (LANES - 1 - indices)


@triton.jit
def _eligible_lanes(
    choice, keys, COUNT: tl.constexpr, TOP: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr
):
    """Return which of [GROUPS, SIZE] lanes belong to the TOP best of COUNT groups."""
    inside = tl.arange(0, SIZE)[None, :]
    unique = _append_index(keys, inside, SIZE)
    first = tl.max(unique, 1)
    second = tl.max(tl.where(unique == first[:, None], BELOW_ALL, unique), 1)
    # Exactly one lane matches each key: the sums add zeros to one number.
    best = tl.sum(tl.where(unique == first[:, None], choice, 0.0), 1)
    next_best = tl.sum(tl.where(unique == second[:, None], choice, 0.0), 1)
    group = tl.arange(0, GROUPS)
    group_keys = _append_index(_sortable_keys(best + next_best), group, GROUPS)
    group_keys = tl.where(group < COUNT, group_keys, BELOW_ALL)
    eligible = tl.zeros((GROUPS,), tl.int1)
    for _ in tl.static_range(TOP):
        top = group_keys == tl.max(group_keys, 0)
        eligible = eligible | top
        group_keys = tl.where(top, BELOW_ALL, group_keys)
    return tl.broadcast_to(eligible[:, None], (GROUPS, SIZE))


@triton.jit
def _choose_experts(
    logits_ptr, offset, partial_stride, bias_ptr, ids_ptr, weights_ptr, token, scale,
    SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    GROUP_COUNT: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the ids and weights of a token.

    Its logits, from `offset` on, are tree sums of PARTS partials, partial_stride elements apart. A
    lane is a position in one of GROUPS groups, each padded to SIZE experts.
    """
    LANES: tl.constexpr = GROUPS * SIZE
    MEMBERS: tl.constexpr = EXPERTS // GROUP_COUNT
    lane = tl.arange(0, LANES)
    valid = (lane // SIZE < GROUP_COUNT) & (lane % SIZE < MEMBERS)
    expert = tl.where(valid, lane // SIZE * MEMBERS + lane % SIZE, EXPERTS)
    dtype = weights_ptr.dtype.element_ty if PARTS > 1 else logits_ptr.dtype.element_ty
    x = load_tree_sum(logits_ptr, offset + expert, partial_stride, valid, PARTS)
    x = x.to(dtype).to(tl.float32)
    x = tl.where(valid, x, float("-inf"))
    if SOFTMAX:
        powers = tl.where(valid, tl.exp(x - tl.max(x, 0)), 0.0)
        scores = tl.div_rn(powers, tl.broadcast_to(row_sum(powers), (LANES,)))
    else:
        scores = sigmoid(x)
    choice = scores
    if bias_ptr is not None:
        choice = scores + tl.load(bias_ptr + expert, mask=valid, other=0.0)
    keys = tl.where(valid, _sortable_keys(choice), BARRED_TL)
    if GROUP_COUNT > 1:
        grid: tl.constexpr = (GROUPS, SIZE)
        eligible = _eligible_lanes(
            tl.reshape(choice, grid), tl.reshape(keys, grid), GROUP_COUNT, TOP_GROUPS, GROUPS, SIZE
        )
        keys = tl.where(tl.reshape(eligible, (LANES,)), keys, BARRED_TL)
    slot = tl.arange(0, SLOTS)
    ids = tl.zeros((SLOTS,), tl.int32)
    weights = tl.zeros((SLOTS,), tl.float32)
    total = tl.zeros((1,), tl.float32)
    bits = scores.to(tl.int32, bitcast=True)
    for i in range(TOP_K):
        best = tl.min(tl.where(keys == tl.max(keys, 0), expert, EXPERTS), 0)
        # The score travels as an integer: an integer sum over one lane keeps NaN and -0.
        score_bits = tl.sum(tl.where(expert == best, bits, 0), 0)
        score = tl.full((1,), score_bits, tl.int32).to(tl.float32, bitcast=True)
        ids = tl.where(slot == i, best, ids)
        weights = tl.where(slot == i, tl.broadcast_to(score, (SLOTS,)), weights)
        total += score
        keys = tl.where(expert == best, BARRED_TL, keys)
    if RENORMALIZE:
        weights = tl.div_rn(weights, tl.broadcast_to(total + TINY_TL, (SLOTS,)))
    weights = (weights * scale).to(weights_ptr.dtype.element_ty)
    tl.store(ids_ptr + token * TOP_K + slot, ids, mask=slot < TOP_K)
    tl.store(weights_ptr + token * TOP_K + slot, weights, mask=slot < TOP_K)


@triton.jit
def _activate_shared(
    shared_ptr, offset, partial_stride, inner_ptr, token, first, width,
    GATED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK columns of a token's inner, from `first` on, from tree sums of PARTS partials."""
    dtype: tl.constexpr = inner_ptr.dtype.element_ty
    column = first + tl.arange(0, BLOCK)
    mask = column < width
    gate = load_tree_sum(shared_ptr, offset + column, partial_stride, mask, PARTS).to(dtype)
    if GATED:
        up = load_tree_sum(shared_ptr, offset + width + column, partial_stride, mask, PARTS)
        activated = silu_product(gate, up.to(dtype), dtype)
    else:
        activated = relu2(gate.to(tl.float32)).to(dtype)
    tl.store(inner_ptr + token * width + column, activated, mask=mask)


@triton.jit(do_not_specialize=["partial_stride", "gate_partial_stride", "shared_partial_stride"])
def _route_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, stride, partial_stride, scale,
    gate_ptr, gate_stride, gate_partial_stride, gate_out_ptr,
    shared_ptr, shared_stride, shared_partial_stride, inner_ptr, width,
    SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    GROUP_COUNT: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr,
    GATE_PARTS: tl.constexpr, GATED: tl.constexpr, SHARED_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Route a token and copy the shared expert's gate, or activate BLOCK columns of that expert.

    The first CTA of a token does the former, the others the latter.
    """
    pdl_start()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if block == 0:
        _choose_experts(
            logits_ptr, token * stride, partial_stride.to(tl.int64), bias_ptr, ids_ptr,
            weights_ptr, token, scale,
            SOFTMAX, RENORMALIZE, EXPERTS, TOP_K, GROUP_COUNT, TOP_GROUPS, GROUPS, SIZE, SLOTS,
            PARTS,
        )  # fmt: skip
        if gate_ptr is not None:
            zero = tl.zeros((1,), tl.int64)
            offset = token * gate_stride + zero
            gate = load_tree_sum(
                gate_ptr, offset, gate_partial_stride.to(tl.int64), zero == 0, GATE_PARTS
            )  # fmt: skip
            tl.store(gate_out_ptr + token + zero, gate.to(gate_out_ptr.dtype.element_ty))
    elif shared_ptr is not None:
        _activate_shared(
            shared_ptr, token * shared_stride, shared_partial_stride.to(tl.int64), inner_ptr,
            token, (block - 1) * BLOCK, width, GATED, SHARED_PARTS, BLOCK,
        )  # fmt: skip


def _supports(**traits: Any) -> str | None:
    experts = traits.get("experts", 1)
    if experts > MAX_EXPERTS:
        return f"{experts} experts exceed {MAX_EXPERTS}"
    return gpu_trait(**traits)


@route.backend("triton", supports=_supports)
def route_triton(
    logits: Tensor,
    top_k: int,
    scoring: Scoring = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    dtype: torch.dtype = torch.float32,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    act: Act = "silu_mul",
    shared_dtype: torch.dtype = torch.float32,
) -> RouterOutput:
    """See lockstep.kernels.route.contract.route. The last strides of logits and shared are 1."""
    tokens, experts = logits.shape[-2:]
    device = logits.device
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    weights = torch.empty(tokens, top_k, dtype=dtype, device=device)
    gated = act == "silu_mul"
    width = 0 if shared is None else shared.shape[-1] // (1 + gated)
    inner = None if shared is None else shared.new_empty(tokens, width, dtype=shared_dtype)
    gates = None if shared_gate is None else shared_gate.new_empty(tokens, dtype=dtype)
    stride, part, parts = _strides(logits)
    gate_stride, gate_part, gate_parts = _strides(shared_gate)
    shared_stride, shared_part, shared_parts = _strides(shared)
    power = next_power_of_2
    if tokens:
        _route_kernel[(tokens, 1 + ceil_div(width, COLUMNS))](
            logits, bias, ids, weights, stride, part, float(scale),
            shared_gate, gate_stride, gate_part, gates,
            shared, shared_stride, shared_part, inner, width,
            SOFTMAX=scoring == "softmax", RENORMALIZE=renormalize, EXPERTS=experts, TOP_K=top_k,
            GROUP_COUNT=groups, TOP_GROUPS=top_groups,
            GROUPS=power(groups), SIZE=power(experts // groups), SLOTS=power(top_k), PARTS=parts,
            GATE_PARTS=gate_parts, GATED=gated, SHARED_PARTS=shared_parts, BLOCK=COLUMNS,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return RouterOutput(ids, weights, inner, gates)


def _strides(product: Tensor | None) -> tuple[int, int, int]:
    """Return (stride between tokens, stride between partials, number of partials) of a product."""
    if product is None:
        return 0, 0, 1
    return product.stride(-2), product.stride(0), product.shape[0] if product.dim() > 2 else 1
