"""Rotary positions (Su et al., RoFormer, 2021), over the whole head or its first dimensions."""

import torch
from torch import Tensor, nn

from lockstep.layers.build_context import BuildContext


class Rotary(nn.Module):
    """Tables cos and sin [positions, pairs] fp32 of position * inverse_frequencies[pair].

    inverse_frequencies [pairs]: radians per token, rounded to fp32 first. factor: multiplies cos
    and sin, and so the rotated queries and keys (YaRN, LongRoPE).
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, build: BuildContext, inverse_frequencies: Tensor, factor: float = 1.0
    ) -> None:
        super().__init__()
        # Bytes per angle: 8 in fp64, and 4 each in fp32 for the rounded angle, cos and sin.
        size = 20 * build.max_positions * len(inverse_frequencies)
        build.memory_budget.take(size, "the rotary table", "Lower max_model_len.")
        positions = torch.arange(build.max_positions, dtype=torch.float64)
        # The product is rounded once: in fp32 angles of late positions would lose bits twice.
        angles = (positions[:, None] * inverse_frequencies.float()).float()
        cos = angles.cos() * factor
        sin = angles.sin() * factor
        self.register_buffer("cos", cos.to(build.device), persistent=False)
        self.register_buffer("sin", sin.to(build.device), persistent=False)
