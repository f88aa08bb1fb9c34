"""route: all that stands between the first products of a mixture of experts and its second ones."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lockstep.kernels.activations import ACTS, Act, sigmoid
from lockstep.kernels.linear import tree_sum
from lockstep.kernels.registry import op

Scoring = Literal["softmax", "sigmoid"]
TINY = 1e-20
"""Added to the sum that renormalising divides by (DeepSeek-V3, Nemotron-H). It changes no softmax:
the largest of E probabilities is 1 / E at least, so fp32 rounds it away."""
SIGN_OFF = 0x7FFFFFFF
NAN_KEY = -(2**31) + 1
"""Below the key of every number, -inf among them."""
BARRED_KEY = -(2**31)
"""Of an expert whose group was not chosen: below NaN's."""


def order_of(scores: Tensor) -> Tensor:
    """fp32 -> int32 that are in the order of the numbers, -0 below 0; all NaN alike, and below."""
    bits = scores.contiguous().view(torch.int32)
    keys = torch.where(bits < 0, bits ^ SIGN_OFF, bits)
    return torch.where(scores.isnan(), NAN_KEY, keys)


def best(keys: Tensor, count: int) -> Tensor:
    """[..., N] -> [..., count] int64: places of the largest, in descending order, ties by place."""
    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :count]


class Routed(NamedTuple):
    """Where tokens go, and what the shared expert's second product and the sum are given of it.

    ids [T, top_k] int32, weights [T, top_k], inner [T, I], gate [T]: None where nothing of them was
    given.
    """

    ids: Tensor
    weights: Tensor
    inner: Tensor | None
    gate: Tensor | None


@op
def route(
    logits: Tensor,
    top_k: int,
    scoring: Scoring = "softmax",
    renormalise: bool = True,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    dtype: torch.dtype = torch.float32,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    act: Act = "silu_mul",
    shared_dtype: torch.dtype = torch.float32,
) -> Routed:
    """logits [T, E], taken as fp32 -> ids [T, top_k] int32, weights [T, top_k] of `dtype`.

    Each of logits, shared and shared_gate may be partials [P, T, ...] fp32 of a linear instead, P 2
    or more: their tree_sum is meant, rounded to what the linear rounds to, `dtype`, or
    `shared_dtype`.

    shared [T, U]: what the shared expert's first product gave; inner [T, I] is its `act`, of
    `shared_dtype`. shared_gate [T, 1]: that expert's gate; gate [T] is it, of `dtype`.

    scores: softmax over all E, or the sigmoid of each, in fp32. The choice goes by scores + bias
    (bias [E] fp32, DeepSeek-V3's e_score_correction_bias); the weights are scores without it. With
    `groups` of E / groups neighbours each, only the `top_groups` best stand for choice; a group is
    worth the sum of its two best scores + bias. Weights in the order of choice, descending, ties by
    the lower index: the score, divided by the sum of the chosen ones + 1e-20 if `renormalise`
    (added in the order of choice), times `scale`; rounded once.

    The order is that of integers (order_of), NaN last: ids are valid and distinct whatever the
    logits hold. A row's weights may be NaN where one of its logits is; no other row sees it.

    E is a multiple of groups; top_k is at most top_groups * E / groups. With groups above 1, a
    group holds two experts at least.
    """
    x = summed(logits, dtype).float()
    scores = softmax(x) if scoring == "softmax" else sigmoid(x)
    choice = scores if bias is None else scores + bias
    keys = order_of(choice)
    if groups > 1:
        grouped = choice.unflatten(1, (groups, -1))
        two = grouped.gather(2, best(keys.unflatten(1, (groups, -1)), 2))
        chosen = best(order_of(two[..., 0] + two[..., 1]), top_groups)
        barred = torch.ones_like(two[..., 0], dtype=torch.bool).scatter_(1, chosen, False)
        keys = keys.masked_fill(barred.repeat_interleave(grouped.shape[2], 1), BARRED_KEY)
    ids = best(keys, top_k)
    weights = scores.gather(1, ids)
    if renormalise:
        total = torch.zeros_like(weights[:, 0])
        for slot in range(top_k):
            total = total + weights[:, slot]
        weights = weights / (total + TINY)[:, None]
    inner = None if shared is None else ACTS[act](summed(shared, shared_dtype))
    gate = None if shared_gate is None else summed(shared_gate, dtype)[:, 0]
    return Routed(ids.int(), (weights * scale).to(dtype), inner, gate)


def summed(product: Tensor, dtype: torch.dtype) -> Tensor:
    """A linear's result [T, N], of its partials [P, T, N] where it left those."""
    return tree_sum(product).to(dtype) if product.dim() > 2 else product


def softmax(x: Tensor) -> Tensor:
    """x [T, E] fp32 -> its softmax, out of exp and IEEE arithmetic as in kernels.activations.

    The sum adds neighbours, then those sums, and so on, E filled up with zeros to a power of two.
    """
    powers = torch.exp(x - x.amax(-1, keepdim=True))
    width = 1 << (x.shape[1] - 1).bit_length()
    total = torch.nn.functional.pad(powers, (0, width - x.shape[1]))
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    return powers / total
