"""The Gated DeltaNet mixer (Yang et al., 2024), in the layout of Qwen3.5 checkpoints."""

import torch
from torch import Tensor, nn

from lockstep.cache.specs import StateSpec
from lockstep.kernels.activations import sigmoid, softplus
from lockstep.kernels.gated_delta_rule import (
    GatedDeltaState,
    gated_delta_chunk,
    gated_delta_step,
)
from lockstep.layers.build import Build
from lockstep.layers.linear import Linear
from lockstep.layers.norm import GatedRMSNorm
from lockstep.step import Step


class GatedDeltaNet(nn.Module):
    """x [T, H] -> [T, H]. HK key heads of K, HV value heads of V, causal conv of `kernel` taps."""

    state: GatedDeltaState

    def __init__(
        self,
        build: Build,
        hidden: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        eps: float,
    ) -> None:
        super().__init__()
        self.key_heads, self.value_heads = key_heads, value_heads
        self.key_dim, self.value_dim, self.kernel = key_dim, value_dim, kernel
        self.dtype, self.window = build.dtype, build.window
        self.channels = 2 * key_heads * key_dim + value_heads * value_dim
        inner = value_heads * value_dim
        self.in_proj = Linear(build, hidden, self.channels, inner, value_heads, value_heads)
        self.conv = build.empty(self.channels, 1, kernel)
        self.a_log = build.empty(value_heads, dtype=torch.float32)
        self.dt_bias = build.empty(value_heads, dtype=torch.float32)
        self.norm = GatedRMSNorm(build, value_dim, eps)
        self.out = Linear(build, inner, hidden)
        traits = dict(key_dim=key_dim, value_dim=value_dim, key_heads=key_heads, kernel=kernel)
        traits.update(value_heads=value_heads)
        self.step_op = build.op(gated_delta_step, **traits)
        self.chunk_op = build.op(gated_delta_chunk, **traits)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        mixed, z, b, a = self.in_proj(x).split(self.in_proj.outputs, dim=-1)
        beta = sigmoid(b.float())
        g = -torch.exp(self.a_log) * softplus(a.float() + self.dt_bias)
        law = self._prompt if step.shape.prompt else self._generated
        o = law(mixed, g, beta, step)
        z = z.unflatten(-1, (self.value_heads, self.value_dim))
        return self.out(self.norm(o, z).flatten(1))

    def _prompt(self, mixed: Tensor, g: Tensor, beta: Tensor, step: Step) -> Tensor:
        return self.chunk_op(
            mixed,
            g,
            beta,
            self.conv.flatten(1),
            self.state,
            step.cu_seqlens,
            step.starts,
            step.state_src,
            step.state_slots,
            step.snapshot_slots,
        )

    def _generated(self, mixed: Tensor, g: Tensor, beta: Tensor, step: Step) -> Tensor:
        window = (step.shape.rows, step.shape.query_len)
        mixed, g, beta = (t.unflatten(0, window) for t in (mixed, g, beta))
        taps = self.conv.flatten(1)
        o = self.step_op(mixed, g, beta, taps, self.state, step.state_slots, step.pending)
        return o.flatten(0, 1)

    def cache_spec(self) -> StateSpec:
        hv, dk, dv, w = self.value_heads, self.key_dim, self.value_dim, self.window
        f32 = torch.float32
        return StateSpec(
            (
                ("recurrent", (hv, dk, dv), f32),
                ("conv", (self.kernel - 1 + w, self.channels), self.dtype),
                ("u", (w, hv, dv), f32),
                ("k", (w, self.key_heads, dk), f32),
                ("decay", (w, hv), f32),
            )
        )

    def bind(self, storage: dict[str, Tensor]) -> None:
        self.state = GatedDeltaState(**storage)

    def cache_tensors(self) -> list[Tensor]:
        return self.state.tensors()
