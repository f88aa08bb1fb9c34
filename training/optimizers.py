"""Muon for matrices (Jordan et al., 2024), AdamW for the rest."""

import torch
from torch import Tensor, nn


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Return the nearest semi-orthogonal matrices to g [N, R, C], by Newton-Schulz in bf16."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Optimizer with orthogonalised momentum. Matrices of one shape are one batch.

    A tensor of more than two dims is a stack of matrices, which are updated independently.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.groups: dict[torch.Size, list[nn.Parameter]] = {}
        for p in params:
            self.groups.setdefault(p.shape[-2:], []).append(p)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        options = self.param_groups[0]
        lr = options["lr"]
        momentum = options["momentum"]
        for shape, params in self.groups.items():
            grads = torch.cat([p.grad.reshape(-1, *shape) for p in params])
            state = self.state[params[0]]
            if "m" not in state:
                state["m"] = torch.zeros_like(grads)
            state["m"].lerp_(grads, 1 - momentum)
            update = orthogonalise(grads.lerp(state["m"], momentum))
            scale = lr * max(1.0, shape[0] / shape[1]) ** 0.5
            counts = [p.numel() // shape.numel() for p in params]
            for p, u in zip(params, update.split(counts), strict=True):
                p.mul_(1 - lr * 0.01).add_(u.reshape(p.shape).to(p.dtype), alpha=-scale)


def optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices and experts, and AdamW for embedding, convolution, vectors."""
    matrices = []
    rest = []
    for name, p in model.named_parameters():
        flat = p.dim() == 2 and "embed" not in name
        (matrices if flat or "experts" in name else rest).append(p)
    adam = torch.optim.AdamW(rest, lr=lr * 0.2, betas=(0.9, 0.98), weight_decay=0.0, eps=1e-10)
    return [Muon(matrices, lr=lr), adam]
