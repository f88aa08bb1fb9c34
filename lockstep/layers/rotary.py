"""Rotary positions (Su et al., 2021), over the whole head or its first dimensions."""

import torch
from torch import Tensor, nn

from lockstep.layers.build import Build


class Rotary(nn.Module):
    """Rotates the first `width` dims of q and k in NeoX pairs (j, j + width/2); the rest passes."""

    cos: Tensor
    sin: Tensor

    def __init__(self, build: Build, width: int, theta: float) -> None:
        super().__init__()
        self.width = width
        inverse = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(build.max_positions, dtype=torch.float64)[:, None] * inverse.float()
        angles = angles.float()
        self.register_buffer("cos", angles.cos().to(build.device), persistent=False)
        self.register_buffer("sin", angles.sin().to(build.device), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, H, D], positions [T] -> rotated in fp32, of x's dtype."""
        cos, sin = (t.index_select(0, positions).unsqueeze(1) for t in (self.cos, self.sin))
        half = self.width // 2
        a, b = x[..., :half].float(), x[..., half : self.width].float()
        turned = ((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype))
        return torch.cat([*turned, x[..., self.width :]], dim=-1)
