"""The processes of one training run, one for each GPU, as torchrun starts them; or one alone."""

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


class Peers:
    """Of `count` processes this is number `rank`; number 0 speaks for all."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.count = int(os.environ.get("WORLD_SIZE", 1))
        if self.count > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")

    @property
    def first(self) -> bool:
        """Whether this process writes, prints and evaluates."""
        return self.rank == 0

    def device(self) -> str:
        """This process's own GPU, or the CPU."""
        if not torch.cuda.is_available():
            return "cpu"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        return "cuda"

    def wait(self) -> None:
        """Until all are here."""
        self.agree(0.0)

    def leave(self) -> None:
        """The end, for all at once: none goes while another still speaks to it."""
        self.wait()
        if self.count > 1:
            dist.destroy_process_group()

    def agree(self, number: float) -> float:
        """The first process's number."""
        if self.count == 1:
            return number
        told = torch.tensor([number], dtype=torch.float64)
        dist.broadcast(told, 0)
        return float(told)

    @torch.no_grad()
    def average(self, parameters: Iterable[Tensor]) -> None:
        """The gradients become the mean of all processes' gradients."""
        if self.count == 1:
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        flat /= self.count
        for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))
