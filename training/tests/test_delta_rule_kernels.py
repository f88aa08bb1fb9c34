"""Tests of the trainer's Triton kernels against PyTorch."""

import pytest
import torch

from training.models.functional import CHUNK
from training.models.qwen3_5 import invert, walk

pytestmark = pytest.mark.gpu


def _grads(function, *inputs: torch.Tensor, device: str) -> list[torch.Tensor]:
    leaves = [x.detach().to(device, copy=True).requires_grad_() for x in inputs]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), device=device).view(out.shape)
    (out * weights).sum().backward()
    return [out.detach().cpu(), *(x.grad.cpu() for x in leaves if x.grad is not None)]


def test_inverse_and_its_gradient() -> None:
    torch.manual_seed(0)
    a = torch.randn(5, 2, CHUNK, CHUNK).tril(-1) * 0.2
    wanted = _grads(lambda x: invert(x.tril(-1)), a, device="cpu")
    got = _grads(lambda x: invert(x.tril(-1)), a, device="cuda")
    for g, w in zip(got, wanted, strict=True):
        assert float((g - w).norm() / w.norm()) < 1e-3


def test_walk_and_its_gradients() -> None:
    torch.manual_seed(0)
    a = torch.randn(2, 7, 3, CHUNK, CHUNK) * 0.1
    b = torch.randn(2, 7, 3, CHUNK, CHUNK)
    for g, w in zip(
        _grads(walk, a, b, device="cuda"), _grads(walk, a, b, device="cpu"), strict=True
    ):
        assert float((g - w).norm() / w.norm()) < 1e-3
