"""Rotary positions (Su et al., 2021), over the whole head or its first dimensions."""

import torch
from torch import Tensor, nn

from lockstep.layers.build import Build


class Rotary(nn.Module):
    """cos and sin [positions, width / 2] fp32: pair j turns by position * theta^(-2j / width)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, build: Build, width: int, theta: float) -> None:
        super().__init__()
        size = build.max_positions * width * 10  # cos and sin, and the angles they are made of
        build.room.take(size, "the rotary table", "Lower max_model_len.")
        inverse = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(build.max_positions, dtype=torch.float64)[:, None] * inverse.float()
        angles = angles.float()
        self.register_buffer("cos", angles.cos().to(build.device), persistent=False)
        self.register_buffer("sin", angles.sin().to(build.device), persistent=False)
