# mypy: ignore-errors
"""route in Triton: one warp per token, its logits in registers; others beside it for the shared
expert's columns.

The softmax's sum is a tree that the source spells (row_sum), and one warp serves any batch, so that
a row's bits are a function of E alone. Choosing is integers of 32 bits, which a warp compares in
one instruction: the largest key, the lowest index that has it, and the bits of its score.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.activations import Act
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.device.activations import relu2, sigmoid, silu_product
from lockstep.kernels.device.reductions import row_sum
from lockstep.kernels.linear.triton import tree_load
from lockstep.kernels.route.contract import (
    BARRED_KEY,
    NAN_KEY,
    SIGN_OFF,
    TINY,
    RouterOutput,
    Scoring,
    route,
)

MOST_EXPERTS = 512
"""16 logits in each of a warp's lanes; DeepSeek-V3 has 256, Qwen3-Next 512."""
COLUMNS = 512
"""Of the shared expert in a program: 16 in each of a warp's lanes."""
SIGN: tl.constexpr = tl.constexpr(SIGN_OFF)
OF_NAN: tl.constexpr = tl.constexpr(NAN_KEY)
BARRED: tl.constexpr = tl.constexpr(BARRED_KEY)
SMALL: tl.constexpr = tl.constexpr(TINY)
TAKEN: tl.constexpr = tl.constexpr(-(2**63))
"""Below the key of every expert or group in 64 bits."""


@triton.jit
def _order_of(scores):
    """See lockstep.kernels.route.sortable_keys."""
    bits = scores.to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ SIGN, bits)
    return tl.where(scores == scores, keys, OF_NAN)


@triton.jit
def _with_place(keys, places, LANES: tl.constexpr):
    """Keys int32 -> int64 in the same order, equal ones in descending order of their place."""
    return (keys.to(tl.int64) << 32) | (LANES - 1 - places)


@triton.jit
def _groups_left(
    choice, keys, COUNT: tl.constexpr, TOP: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr
):
    """Which of [GROUPS, SIZE] lanes are of the TOP best of COUNT groups: [GROUPS, SIZE]."""
    inside = tl.arange(0, SIZE)[None, :]
    places = _with_place(keys, inside, SIZE)
    first = tl.max(places, 1)
    second = tl.max(tl.where(places == first[:, None], TAKEN, places), 1)
    one = tl.sum(tl.where(places == first[:, None], choice, 0.0), 1)
    two = tl.sum(tl.where(places == second[:, None], choice, 0.0), 1)
    own = tl.arange(0, GROUPS)
    worth = tl.where(own < COUNT, _with_place(_order_of(one + two), own, GROUPS), TAKEN)
    left = tl.zeros((GROUPS,), tl.int1)
    for _ in tl.static_range(TOP):
        best = worth == tl.max(worth, 0)
        left = left | best
        worth = tl.where(best, TAKEN, worth)
    return tl.broadcast_to(left[:, None], (GROUPS, SIZE))


@triton.jit
def _choose(
    logits, at, part, bias, ids, weights, token, scale,
    SOFTMAX: tl.constexpr, RENORMALISE: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr,
    GROUP_COUNT: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Fills a token's ids and weights. Its logits are sums of PARTS partials, `part` numbers apart,
    from `at` on.

    A lane is a place in one of GROUPS groups, each filled up to SIZE experts.
    """
    LANES: tl.constexpr = GROUPS * SIZE
    MEMBERS: tl.constexpr = EXPERTS // GROUP_COUNT
    lane = tl.arange(0, LANES)
    live = (lane // SIZE < GROUP_COUNT) & (lane % SIZE < MEMBERS)
    expert = tl.where(live, lane // SIZE * MEMBERS + lane % SIZE, EXPERTS)
    dtype = weights.dtype.element_ty if PARTS > 1 else logits.dtype.element_ty
    x = tree_load(logits, at + expert, part, live, PARTS).to(dtype).to(tl.float32)
    x = tl.where(live, x, float("-inf"))
    if SOFTMAX:
        powers = tl.where(live, tl.exp(x - tl.max(x, 0)), 0.0)
        scores = tl.div_rn(powers, tl.broadcast_to(row_sum(powers), (LANES,)))
    else:
        scores = sigmoid(x)
    choice = scores
    if bias is not None:
        choice = scores + tl.load(bias + expert, mask=live, other=0.0)
    keys = tl.where(live, _order_of(choice), BARRED)
    if GROUP_COUNT > 1:
        grid: tl.constexpr = (GROUPS, SIZE)
        left = _groups_left(
            tl.reshape(choice, grid), tl.reshape(keys, grid), GROUP_COUNT, TOP_GROUPS, GROUPS, SIZE
        )
        keys = tl.where(tl.reshape(left, (LANES,)), keys, BARRED)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), tl.int32)
    kept = tl.zeros((SLOTS,), tl.float32)
    total = tl.zeros((1,), tl.float32)
    bits = scores.to(tl.int32, bitcast=True)
    for turn in range(K):
        best = tl.min(tl.where(keys == tl.max(keys, 0), expert, EXPERTS), 0)
        own = tl.sum(tl.where(expert == best, bits, 0), 0)
        score = tl.full((1,), own, tl.int32).to(tl.float32, bitcast=True)
        chosen = tl.where(slot == turn, best, chosen)
        kept = tl.where(slot == turn, tl.broadcast_to(score, (SLOTS,)), kept)
        total += score
        keys = tl.where(expert == best, BARRED, keys)
    if RENORMALISE:
        kept = tl.div_rn(kept, tl.broadcast_to(total + SMALL, (SLOTS,)))
    kept = (kept * scale).to(weights.dtype.element_ty)
    tl.store(ids + token * K + slot, chosen, mask=slot < K)
    tl.store(weights + token * K + slot, kept, mask=slot < K)


@triton.jit
def _activate(
    shared, at, part, inner, token, first, width,
    GATED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fills BLOCK columns of a token's inner, from `first` on, out of sums of PARTS partials."""
    dtype: tl.constexpr = inner.dtype.element_ty
    column = first + tl.arange(0, BLOCK)
    live = column < width
    one = tree_load(shared, at + column, part, live, PARTS).to(dtype)
    if GATED:
        up = tree_load(shared, at + width + column, part, live, PARTS).to(dtype)
        product = silu_product(one, up, dtype)
    else:
        product = relu2(one.to(tl.float32)).to(dtype)
    tl.store(inner + token * width + column, product, mask=live)


@triton.jit(do_not_specialize=["part", "gate_part", "shared_part"])
def _route_kernel(
    logits, bias, ids, weights, stride, part, scale, gate, gate_stride, gate_part, gates,
    shared, shared_stride, shared_part, inner, width,
    SOFTMAX: tl.constexpr, RENORMALISE: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr,
    GROUP_COUNT: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr,
    GATE_PARTS: tl.constexpr, GATED: tl.constexpr, SHARED_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A token's choice and the shared expert's gate, or BLOCK columns of that expert."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if block == 0:
        _choose(
            logits, token * stride, part.to(tl.int64), bias, ids, weights, token, scale,
            SOFTMAX, RENORMALISE, EXPERTS, K, GROUP_COUNT, TOP_GROUPS, GROUPS, SIZE, SLOTS, PARTS,
        )  # fmt: skip
        if gate is not None:
            one = tl.zeros((1,), tl.int64)
            at = token * gate_stride + one
            found = tree_load(gate, at, gate_part.to(tl.int64), one == 0, GATE_PARTS)
            tl.store(gates + token + one, found.to(gates.dtype.element_ty))
    elif shared is not None:
        _activate(
            shared, token * shared_stride, shared_part.to(tl.int64), inner, token,
            (block - 1) * BLOCK, width, GATED, SHARED_PARTS, BLOCK,
        )  # fmt: skip


def _supports(**traits: Any) -> str | None:
    experts = traits.get("experts", 1)
    if experts > MOST_EXPERTS:
        return f"{experts} experts are above {MOST_EXPERTS}"
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
    """See lockstep.kernels.route.route. The last strides of logits and shared are 1."""
    tokens, experts = logits.shape[-2:]
    device = logits.device
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    weights = torch.empty(tokens, top_k, dtype=dtype, device=device)
    gated = act == "silu_mul"
    width = 0 if shared is None else shared.shape[-1] // (1 + gated)
    inner = None if shared is None else shared.new_empty(tokens, width, dtype=shared_dtype)
    gates = None if shared_gate is None else shared_gate.new_empty(tokens, dtype=dtype)
    stride, part, parts = _lines(logits)
    gate_stride, gate_part, gate_parts = _lines(shared_gate)
    shared_stride, shared_part, shared_parts = _lines(shared)
    power = triton.next_power_of_2
    if tokens:
        _route_kernel[(tokens, 1 + triton.cdiv(width, COLUMNS))](
            logits, bias, ids, weights, stride, part, float(scale),
            shared_gate, gate_stride, gate_part, gates,
            shared, shared_stride, shared_part, inner, width,
            SOFTMAX=scoring == "softmax", RENORMALISE=renormalize, EXPERTS=experts, K=top_k,
            GROUP_COUNT=groups, TOP_GROUPS=top_groups,
            GROUPS=power(groups), SIZE=power(experts // groups), SLOTS=power(top_k), PARTS=parts,
            GATE_PARTS=gate_parts, GATED=gated, SHARED_PARTS=shared_parts, BLOCK=COLUMNS,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return RouterOutput(ids, weights, inner, gates)


def _lines(product: Tensor | None) -> tuple[int, int, int]:
    """Numbers from one token's line to the next's, and from a partial to the next; how many."""
    if product is None:
        return 0, 0, 1
    return product.stride(-2), product.stride(0), product.shape[0] if product.dim() > 2 else 1
