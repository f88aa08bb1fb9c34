"""The feed-forwards that a layer may have: a dense one, and mixtures of experts.

All have `weights()`, the tensors and sizes for their function, and `function`, which takes x, the
norm before it and these, and gives x + delta and how unevenly experts are used (0 where there are
none).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.models.functional import centred, linear, matrix, rms

ALIGNED = 16
"""Columns of a bf16 product in multiples of this many: the fast kernels want them."""


def swiglu(
    x: Tensor, norm: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """x [N, hidden] -> x + SwiGLU(norm(x)), and 0. offset: 1 where the norm is stored around 0."""
    h = rms(x, offset + norm)
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


def barred(worth: Tensor, groups: int, top_groups: int) -> Tensor:
    """worth [N, E] -> the same with -inf but for the top_groups of `groups` neighbourhoods whose
    two best experts are worth most together."""
    if groups == 1:
        return worth
    grouped = worth.unflatten(1, (groups, -1))
    best = torch.where(chosen(grouped.flatten(0, 1), 2).view_as(grouped), grouped, 0.0).sum(-1)
    kept = chosen(best, top_groups)
    return grouped.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)


def sigmoid_mixture(
    x: Tensor, norm: Tensor, router: Tensor, bias: Tensor, gate: Tensor | None, up: Tensor,
    down: Tensor, shared_gate: Tensor | None, shared_up: Tensor, shared_down: Tensor,
    choice: tuple[int, int, int, float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [N, hidden] -> x + the mixture of norm(x), and how unevenly experts are used.

    gate, up [E, I, hidden], down [E, hidden, I]; SwiGLU, or squared ReLU without gates. choice:
    top_k, groups, top_groups, scale, as config.json has them. Scores are
    sigmoids in fp32; scores + bias choose, the chosen scores / their sum * scale count, and the
    shared expert counts 1 (DeepSeek-V3, arXiv 2412.19437, 2.1.2).

    Unevenness is the mean of (E / top_k * f_e)^2, f_e the share of tokens that chose e: 1 where all
    are used alike. Its gradient is another one: that of E / top_k * sum_e f_e P_e, P_e the mean of
    scores / their sum, and on the bias how much more than its share e is used. So the router learns
    as with the Switch Transformer's loss, and the optimizer's steps move the bias, which no loss
    reaches.
    """
    (experts, inner) = up.shape[:2]
    (top_k, groups, top_groups, scale) = choice
    h = rms(x, norm)
    scores = torch.sigmoid(F.linear(h.float(), router))
    picked = chosen(barred((scores + bias).detach(), groups, top_groups), top_k)
    weights = torch.where(picked, scores, 0.0)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale
    each = weights[:, :, None].expand(-1, -1, inner).flatten(1)
    counts = torch.cat([each, torch.ones_like(each[:, :1]).expand(-1, len(shared_up))], 1)
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
    """SwiGLU's weights."""

    function = staticmethod(swiglu)

    def __init__(self, h: int, inner: int, offset: float = 0.0) -> None:
        super().__init__()
        self.offset = offset
        self.gate_proj = matrix(h, inner)
        self.up_proj = matrix(h, inner)
        self.down_proj = matrix(inner, h)

    def weights(self) -> list[Any]:
        """What its function takes behind the norm."""
        return [*self.tensors(), self.offset]

    def tensors(self) -> list[Tensor]:
        """Gate, up, down."""
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
            *self.shared_expert.tensors(),
            self.top_k,
        ]


class Router(nn.Module):
    """Its matrix, and the bias that is for the choice alone."""

    def __init__(self, h: int, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, h))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(count))


class ExpertsApart(nn.Module):
    """All experts' weights, [E, ...] each; in checkpoints every expert's are tensors of their own.

    gate_proj is None where `gated` is off.
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
            whole = torch.stack([state_dict.pop(one) for one in names])
            state_dict[prefix + name] = whole
        super()._load_from_state_dict(state_dict, prefix, *rest)


class ReluMLP(nn.Module):
    """The weights of an MLP without a gate."""

    def __init__(self, h: int, inner: int) -> None:
        super().__init__()
        self.up_proj = matrix(h, inner)
        self.down_proj = matrix(inner, h)

    def tensors(self) -> list[Tensor | None]:
        """None for a gate, up, down."""
        return [None, self.up_proj.weight, self.down_proj.weight]


class SigmoidMixture(nn.Module):
    """A mixture as DeepSeek-V3 and Nemotron-H have it: gated with SwiGLU, or squared ReLU."""

    function = staticmethod(sigmoid_mixture)

    def __init__(self, c: dict[str, Any], shared_inner: int, gated: bool) -> None:
        super().__init__()
        h = c["hidden_size"]
        count = c["n_routed_experts"]
        names = ("num_experts_per_tok", "n_group", "topk_group", "routed_scaling_factor")
        self.choice = tuple(c[name] for name in names)
        self.gate = Router(h, count)
        self.experts = ExpertsApart(h, c["moe_intermediate_size"], count, gated)
        self.shared_experts = MLP(h, shared_inner) if gated else ReluMLP(h, shared_inner)

    def weights(self) -> list[Any]:
        """What its function takes behind the norm."""
        experts = self.experts
        return [
            self.gate.weight,
            self.gate.e_score_correction_bias,
            experts.gate_proj,
            experts.up_proj,
            experts.down_proj,
            *self.shared_experts.tensors(),
            self.choice,
        ]


def feed_forward(c: dict[str, Any]) -> MLP | Mixture:
    """The one that config.json describes."""
    return Mixture(c) if "num_experts" in c else MLP(c["hidden_size"], c["intermediate_size"], 1.0)
