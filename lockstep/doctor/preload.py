"""Imports of an examination's process, done once: the fork server imports this module."""

import torch

from lockstep.doctor import examine
from lockstep.kernels.backends import load
from lockstep.kernels.canaries import Canaries

__all__ = ["examine"]
load()
# The first call under a dispatch mode imports torch's compiler, which takes longer than most jobs.
with Canaries():
    torch.empty(1)
