"""Feed-forwards of a layer: dense, and mixtures of experts.

Each class has `weights()`, the tensors and sizes for its function, and `function`, which takes x,
the weight of the preceding norm and these, and returns x + delta and the expert imbalance (0
without experts).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.models.functional import centered_rms, linear, matrix, rms

ALIGNED = 16
"""Alignment of columns of a bf16 product, which its fast kernels need."""


def swiglu(
    x: Tensor, norm: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """Return x + SwiGLU(norm(x)), and 0. offset: 1 if the norm's weight is stored as weight - 1."""
    h = rms(x, offset + norm)
    out = x + linear(F.silu(linear(h, w_gate)) * linear(h, w_up), w_down)
    return out, x.new_zeros((), dtype=torch.float32)


def top_k_mask(p: Tensor, top_k: int) -> Tensor:
    """Return the mask of the top_k largest values of each row of p [N, E]; ties go to lower
    indices.

    It counts the larger values of each, which is elementwise; a sort would be a separate kernel.
    """
    index = torch.arange(p.shape[1], device=p.device)
    value = p[:, :, None]
    other = p[:, None, :]
    tied = (other == value) & (index[None, :] < index[:, None])
    return ((other > value) | tied).sum(-1) < top_k


def mixture(
    x: Tensor, norm: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, shared_router: Tensor,
    shared_gate: Tensor, shared_up: Tensor, shared_down: Tensor, top_k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return x + mixture(norm(x)), and the load-balancing loss.

    x [N, hidden], gate_up [E, 2 I, hidden], down [E, hidden, I]. All experts are computed, the
    shared one too, as one wide SwiGLU whose columns are scaled by the weight of their expert, 0 if
    it is not chosen. The loss is E / top_k * sum_e f_e P_e, with f_e the share of tokens that chose
    e and P_e its mean probability; 1 for even use.
    Source: Switch Transformer, arXiv 2101.03961, (4) to (6).
    """
    experts = gate_up.shape[0]
    inner = down.shape[2]
    shared = shared_gate.shape[0]
    wide = experts * inner + shared
    gates, ups = gate_up.split(inner, 1)
    parts = [gates.flatten(0, 1), shared_gate, ups.flatten(0, 1), shared_up, router, shared_router]
    rest = -(experts + 1) % ALIGNED
    h = centered_rms(x, norm)
    product = linear(h, F.pad(torch.cat(parts), (0, 0, 0, rest)))
    gate, up, logits, shared_weight, _ = product.split([wide, wide, experts, 1, rest], 1)
    p = torch.softmax(logits.float(), -1)
    picked = top_k_mask(p.detach(), top_k)
    weights = torch.where(picked, p, 0.0)
    weights = weights / weights.sum(-1, keepdim=True)
    shared_weight = torch.sigmoid(shared_weight.float()).expand(-1, shared)
    expert_weights = weights[:, :, None].expand(-1, -1, inner).flatten(1)
    scale = torch.cat([expert_weights, shared_weight], 1)
    act = (F.silu(gate.float()) * up.float() * scale).to(x.dtype)
    out = x + linear(act, torch.cat([down.transpose(0, 1).flatten(1), shared_down], 1))
    imbalance = (picked.float().mean(0) * p.mean(0)).sum() * (experts / top_k)
    return out, imbalance


def mask_groups(scores: Tensor, groups: int, top_groups: int) -> Tensor:
    """Return scores [N, E] with -inf outside of the top_groups best of `groups` groups.

    The score of a group is the sum of its two best experts.
    """
    if groups == 1:
        return scores
    grouped = scores.unflatten(1, (groups, -1))
    best = torch.where(top_k_mask(grouped.flatten(0, 1), 2).view_as(grouped), grouped, 0.0).sum(-1)
    in_top_groups = top_k_mask(best, top_groups)
    return grouped.masked_fill(~in_top_groups[:, :, None], -torch.inf).flatten(1)


def sigmoid_mixture(
    x: Tensor, norm: Tensor, router: Tensor, bias: Tensor, gate: Tensor | None, up: Tensor,
    down: Tensor, shared_gate: Tensor | None, shared_up: Tensor, shared_down: Tensor,
    routing_arguments: tuple[int, int, int, float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return x + mixture(norm(x)), and the expert imbalance.

    x [N, hidden], gate, up [E, I, hidden], down [E, hidden, I]; SwiGLU, or squared ReLU without
    gates. routing_arguments: (top_k, groups, top_groups, scale) of config.json. Scores are sigmoids
    in fp32. Experts are chosen by scores + bias, and weighted by scores / their sum * scale; the
    shared expert has weight 1.

    The value of the imbalance is the mean of (E / top_k * f_e)^2, f_e the share of tokens that
    chose e: 1 for even use. Its gradient differs: on the router it is that of E / top_k * sum_e f_e
    P_e, P_e the mean of normalized scores, as in the Switch Transformer; on the bias it is the
    excess use of e, so that the optimizer moves the bias, which no loss reaches.
    Source: DeepSeek-V3, arXiv 2412.19437, 2.1.2.
    """
    (experts, inner) = up.shape[:2]
    (top_k, groups, top_groups, scale) = routing_arguments
    h = rms(x, norm)
    scores = torch.sigmoid(F.linear(h.float(), router))
    picked = top_k_mask(mask_groups((scores + bias).detach(), groups, top_groups), top_k)
    weights = torch.where(picked, scores, 0.0)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale
    expert_weights = weights[:, :, None].expand(-1, -1, inner).flatten(1)
    counts = torch.cat(
        [expert_weights, torch.ones_like(expert_weights[:, :1]).expand(-1, len(shared_up))], 1
    )
    wide = linear(h, torch.cat([up.flatten(0, 1), shared_up])).float()
    if gate is None or shared_gate is None:
        act = F.relu(wide).square()
    else:
        act = F.silu(linear(h, torch.cat([gate.flatten(0, 1), shared_gate])).float()) * wide
    into = torch.cat([down.transpose(0, 1).flatten(1), shared_down], 1)
    out = x + linear((act * counts).to(x.dtype), into)
    used = picked.float().mean(0) * (experts / top_k)
    parts = (scores / scores.sum(-1, keepdim=True)).mean(0)
    pull = (used * parts).sum() + ((used - 1) * bias).sum()
    return out, used.square().mean() + pull - pull.detach()


class MLP(nn.Module):
    """Weights of a SwiGLU."""

    function = staticmethod(swiglu)

    def __init__(self, h: int, inner: int, offset: float = 0.0) -> None:
        super().__init__()
        self.offset = offset
        self.gate_proj = matrix(h, inner)
        self.up_proj = matrix(h, inner)
        self.down_proj = matrix(inner, h)

    def weights(self) -> list[Any]:
        """Return the arguments of its function after the norm."""
        return [*self.tensors(), self.offset]

    def tensors(self) -> list[Tensor]:
        """Return the weights of gate, up and down."""
        return [self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight]


class Experts(nn.Module):
    """Weights of all experts; gate and up are one tensor."""

    def __init__(self, h: int, inner: int, count: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, h))
        self.down_proj = nn.Parameter(torch.empty(count, h, inner))


class Mixture(nn.Module):
    """Router, experts, and a gated shared expert."""

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
        """Return the arguments of its function after the norm."""
        return [
            self.gate.weight,
            self.experts.gate_up_proj,
            self.experts.down_proj,
            self.shared_expert_gate.weight,
            *self.shared_expert.tensors(),
            self.top_k,
        ]


class Router(nn.Module):
    """Router weight, and the bias that only influences the choice of experts."""

    def __init__(self, h: int, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, h))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(count))


class SeparateExperts(nn.Module):
    """Weights of all experts [E, ...], which checkpoints store as one tensor per expert.

    gate_proj is None without `gated`.
    """

    def __init__(self, h: int, inner: int, count: int, gated: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(count, inner, h)) if gated else None
        self.up_proj = nn.Parameter(torch.empty(count, inner, h))
        self.down_proj = nn.Parameter(torch.empty(count, h, inner))

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for name, stack in self.named_parameters():
            for e, one in enumerate(stack if keep_vars else stack.detach()):
                destination[f"{prefix}{e}.{name}.weight"] = one

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        for name, stack in self.named_parameters():
            names = [f"{prefix}{e}.{name}.weight" for e in range(len(stack))]
            stacked = torch.stack([state_dict.pop(one) for one in names])
            state_dict[prefix + name] = stacked
        super()._load_from_state_dict(state_dict, prefix, *rest)


class ReluMLP(nn.Module):
    """Weights of an MLP without a gate."""

    def __init__(self, h: int, inner: int) -> None:
        super().__init__()
        self.up_proj = matrix(h, inner)
        self.down_proj = matrix(inner, h)

    def tensors(self) -> list[Tensor | None]:
        """Return None for the gate, and the weights of up and down."""
        return [None, self.up_proj.weight, self.down_proj.weight]


class SigmoidMixture(nn.Module):
    """Mixture of DeepSeek-V3 and Nemotron-H: gated with SwiGLU, or with squared ReLU."""

    function = staticmethod(sigmoid_mixture)

    def __init__(self, c: dict[str, Any], shared_inner: int, gated: bool) -> None:
        super().__init__()
        h = c["hidden_size"]
        count = c["n_routed_experts"]
        names = ("num_experts_per_tok", "n_group", "topk_group", "routed_scaling_factor")
        self.routing_arguments = tuple(c[name] for name in names)
        self.gate = Router(h, count)
        self.experts = SeparateExperts(h, c["moe_intermediate_size"], count, gated)
        self.shared_experts = MLP(h, shared_inner) if gated else ReluMLP(h, shared_inner)

    def weights(self) -> list[Any]:
        """Return the arguments of its function after the norm."""
        experts = self.experts
        return [
            self.gate.weight,
            self.gate.e_score_correction_bias,
            experts.gate_proj,
            experts.up_proj,
            experts.down_proj,
            *self.shared_experts.tensors(),
            self.routing_arguments,
        ]


def feed_forward(c: dict[str, Any]) -> MLP | Mixture:
    """Return the feed-forward that config.json describes."""
    return Mixture(c) if "num_experts" in c else MLP(c["hidden_size"], c["intermediate_size"], 1.0)
