"""route: the router of a mixture of experts, fused with what must be ready before `experts` runs.

Besides the top-k choice that is the shared expert's activation and the shared expert's gate.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lockstep.kernels.activations import ACTS, Act, sigmoid
from lockstep.kernels.linear import sum_partials
from lockstep.kernels.registry import op

Scoring = Literal["softmax", "sigmoid"]
TINY = 1e-20
"""Added to the sum that renormalization divides by (DeepSeek-V3, Nemotron-H). It changes no softmax
score: the largest of E probabilities is 1 / E at least, so fp32 rounds the addition away."""
SIGN_OFF = 0x7FFFFFFF
"""Mask of all bits of an fp32 number except its sign."""
NAN_KEY = -(2**31) + 1
"""Sort key of NaN: below every number, -inf included."""
BARRED_KEY = -(2**31)
"""Sort key of an expert whose group was not chosen: below NaN's."""


def sortable_keys(scores: Tensor) -> Tensor:
    """Map fp32 to int32 keys in the order of the numbers: -0 below 0, NaN lowest and all equal."""
    bits = scores.contiguous().view(torch.int32)
    # The bits of negative floats ascend with magnitude: flipping all but the sign reverses them.
    keys = torch.where(bits < 0, bits ^ SIGN_OFF, bits)
    return torch.where(scores.isnan(), NAN_KEY, keys)


def top_indices(keys: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest keys: [..., N] -> [..., count] int64.

    They are in descending order of key; equal keys are in ascending order of index.
    """
    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :count]


class RouterOutput(NamedTuple):
    """Experts of each token, and the shared expert's inputs to its down projection and the sum.

    ids [T, top_k] int32, weights [T, top_k]. inner [T, I] and gate [T] are None where `shared` or
    `shared_gate` was None.
    """

    ids: Tensor
    weights: Tensor
    inner: Tensor | None
    gate: Tensor | None


@op(needed_for="experts")
def route(
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
    """Choose the top_k experts of each token and compute their weights.

    Scores are the softmax over all E logits, or the sigmoid of each, in fp32. Experts are chosen by
    score + bias; their weights are the scores without the bias, in the order of choice: descending,
    ties by the lower index. A weight is the score, divided by (the sum of the chosen scores +
    1e-20) if `renormalize` (added in the order of choice), times `scale`, rounded once.

    The order is that of integers (sortable_keys) with NaN last: ids are valid and distinct whatever
    the logits are. A row's weights may be NaN where one of its logits is; no other row changes.

    Each of logits, shared and shared_gate may be the partials [P, T, ...] fp32 of a linear, P 2 or
    more. Their tree_sum, rounded to `dtype` (`shared_dtype` for shared), is the input.

    Args:
        logits: [T, E], read as fp32. E is a multiple of groups.
        top_k: at most top_groups * E / groups.
        bias: [E] fp32, DeepSeek-V3's e_score_correction_bias.
        groups: experts form `groups` groups of E / groups neighbours (2 or more where groups > 1).
            Only the experts of the `top_groups` best groups are eligible. A group is ranked by the
            sum of its two best scores + bias.
        dtype: of weights and gate.
        shared: [T, U], the up projection of the shared expert; inner = act(shared), shared_dtype.
        shared_gate: [T, 1], the gate logit of the shared expert, returned as gate [T].
    """
    x = sum_partials(logits, dtype).float()
    scores = softmax(x) if scoring == "softmax" else sigmoid(x)
    choice = scores if bias is None else scores + bias
    keys = sortable_keys(choice)
    if groups > 1:
        grouped = choice.unflatten(1, (groups, -1))
        best_two = grouped.gather(2, top_indices(keys.unflatten(1, (groups, -1)), 2))
        group_ids = top_indices(sortable_keys(best_two[..., 0] + best_two[..., 1]), top_groups)
        barred = torch.ones_like(best_two[..., 0], dtype=torch.bool)
        barred.scatter_(1, group_ids, False)
        keys = keys.masked_fill(barred.repeat_interleave(grouped.shape[2], 1), BARRED_KEY)
    ids = top_indices(keys, top_k)
    weights = scores.gather(1, ids)
    if renormalize:
        # Slot by slot: torch.sum promises no order.
        total = torch.zeros_like(weights[:, 0])
        for slot in range(top_k):
            total = total + weights[:, slot]
        weights = weights / (total + TINY)[:, None]
    inner = None if shared is None else ACTS[act](sum_partials(shared, shared_dtype))
    gate = None if shared_gate is None else sum_partials(shared_gate, dtype)[:, 0]
    return RouterOutput(ids.int(), (weights * scale).to(dtype), inner, gate)


def softmax(x: Tensor) -> Tensor:
    """Return the softmax of x [T, E] fp32, from exp and IEEE arithmetic as in kernels.activations.

    The sum is a binary tree over neighbours; E is padded with zeros to a power of two.
    """
    powers = torch.exp(x - x.amax(-1, keepdim=True))
    width = 1 << (x.shape[1] - 1).bit_length()
    total = torch.nn.functional.pad(powers, (0, width - x.shape[1]))
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    return powers / total
