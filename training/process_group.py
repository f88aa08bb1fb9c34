"""Processes of one training run, one per GPU, started by torchrun; or a single process."""

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


class ProcessGroup:
    """`count` processes, of which this is number `rank`. Process 0 writes, prints and evaluates."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.count = int(os.environ.get("WORLD_SIZE", 1))
        if self.count > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")

    @property
    def first(self) -> bool:
        """Return whether this is process 0."""
        return self.rank == 0

    def device(self) -> str:
        """Return this process's GPU, or the CPU."""
        if not torch.cuda.is_available():
            return "cpu"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        return "cuda"

    def wait(self) -> None:
        """Wait for all processes."""
        self.agree(0.0)

    def leave(self) -> None:
        """Leave the group when all processes do, so that none loses a peer in a collective."""
        self.wait()
        if self.count > 1:
            dist.destroy_process_group()

    def agree(self, number: float) -> float:
        """Return the number of process 0."""
        if self.count == 1:
            return number
        shared = torch.tensor([number], dtype=torch.float64)
        dist.broadcast(shared, 0)
        return float(shared)

    @torch.no_grad()
    def average(self, parameters: Iterable[Tensor]) -> None:
        """Replace the gradients by the mean of all processes' gradients."""
        if self.count == 1:
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        flat /= self.count
        for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))
