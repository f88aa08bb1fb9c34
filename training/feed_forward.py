"""The two feed-forwards that a layer may have: a dense one, and a mixture of experts.

Both have `weights()`, the tensors and sizes for their function, and `function`, which takes x, the
norm before it and these, and gives x + delta and how unevenly experts are used (0 where there are
none).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALIGNED = 16
"""Columns of a bf16 product in multiples of this many: the fast kernels want them."""


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm over the last dim; `weight` is the full factor."""
    y = x.float()
    y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6)
    return (y * weight.float()).to(x.dtype)


def centred(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm whose weight is stored around 0."""
    return rms(x, 1 + weight)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in x's dtype."""
    return F.linear(x, weight.to(x.dtype))


def matrix(k: int, n: int) -> nn.Linear:
    """A bias-free linear layer."""
    return nn.Linear(k, n, bias=False)


def swiglu(
    x: Tensor, norm: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor
) -> tuple[Tensor, Tensor]:
    """x [N, hidden] -> x + SwiGLU(norm(x)), and 0."""
    h = centred(x, norm)
    out = x + linear(F.silu(linear(h, w_gate)) * linear(h, w_up), w_down)
    return out, x.new_zeros((), dtype=torch.float32)


def chosen(p: Tensor, top_k: int) -> Tensor:
    """p [N, E] -> bool [N, E]: the top_k largest of a row, of equal ones those of lower index.

    By counting who stands before each: elementwise, where a sort would be a kernel of its own.
    """
    index = torch.arange(p.shape[1], device=p.device)
    mine = p[:, :, None]
    other = p[:, None, :]
    tied = (other == mine) & (index[None, :] < index[:, None])
    return ((other > mine) | tied).sum(-1) < top_k


def mixture(
    x: Tensor, norm: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, shared_router: Tensor,
    shared_gate: Tensor, shared_up: Tensor, shared_down: Tensor, top_k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [N, hidden] -> x + the mixture of norm(x), and the load-balancing loss.

    gate_up [E, 2 I, hidden], down [E, hidden, I]. All experts are computed, the shared one too, as
    one wide SwiGLU whose columns are scaled by what their expert counts: 0 if it is not chosen. The
    loss is E / top_k * sum_e f_e P_e: f_e the share of tokens that chose e, P_e its mean
    probability; 1 where all are used alike (Switch Transformer, arXiv 2101.03961, (4) to (6)).
    """
    experts = gate_up.shape[0]
    inner = down.shape[2]
    shared = shared_gate.shape[0]
    wide = experts * inner + shared
    gates, ups = gate_up.split(inner, 1)
    parts = [gates.flatten(0, 1), shared_gate, ups.flatten(0, 1), shared_up, router, shared_router]
    rest = -(experts + 1) % ALIGNED
    h = centred(x, norm)
    product = linear(h, F.pad(torch.cat(parts), (0, 0, 0, rest)))
    gate, up, logits, own, _ = product.split([wide, wide, experts, 1, rest], 1)
    p = torch.softmax(logits.float(), -1)
    picked = chosen(p.detach(), top_k)
    weights = torch.where(picked, p, 0.0)
    weights = weights / weights.sum(-1, keepdim=True)
    own = torch.sigmoid(own.float()).expand(-1, shared)
    each = weights[:, :, None].expand(-1, -1, inner).flatten(1)
    scale = torch.cat([each, own], 1)
    act = (F.silu(gate.float()) * up.float() * scale).to(x.dtype)
    out = x + linear(act, torch.cat([down.transpose(0, 1).flatten(1), shared_down], 1))
    uneven = (picked.float().mean(0) * p.mean(0)).sum() * (experts / top_k)
    return out, uneven


class MLP(nn.Module):
    """SwiGLU's weights."""

    function = staticmethod(swiglu)

    def __init__(self, h: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = matrix(h, inner)
        self.up_proj = matrix(h, inner)
        self.down_proj = matrix(inner, h)

    def weights(self) -> list[Any]:
        """What its function takes behind the norm."""
        return [self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight]


class Experts(nn.Module):
    """All experts' weights, gate above up."""

    def __init__(self, h: int, inner: int, count: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, h))
        self.down_proj = nn.Parameter(torch.empty(count, h, inner))


class Mixture(nn.Module):
    """A router, its experts, and one that every token goes to, as far as its own gate lets it."""

    function = staticmethod(mixture)

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h = c["hidden_size"]
        count = c["num_experts"]
        self.top_k = c["num_experts_per_tok"]
        self.gate = matrix(h, count)
        self.experts = Experts(h, c["moe_intermediate_size"], count)
        self.shared_expert = MLP(h, c["shared_expert_intermediate_size"])
        self.shared_expert_gate = matrix(h, 1)

    def weights(self) -> list[Any]:
        """What its function takes behind the norm."""
        return [
            self.gate.weight,
            self.experts.gate_up_proj,
            self.experts.down_proj,
            self.shared_expert_gate.weight,
            *self.shared_expert.weights(),
            self.top_k,
        ]


def feed_forward(c: dict[str, Any]) -> MLP | Mixture:
    """The one that config.json describes."""
    return Mixture(c) if "num_experts" in c else MLP(c["hidden_size"], c["intermediate_size"])
