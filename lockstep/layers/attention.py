"""Softmax attention over paged KV, plain (Qwen3) or with an output gate (Qwen3-Next, Qwen3.5)."""

import torch
from torch import Tensor, nn

from lockstep.cache.specs import PagedSpec
from lockstep.kernels.activations import sigmoid
from lockstep.kernels.attention import paged_attention
from lockstep.layers.build import Build
from lockstep.layers.linear import Linear
from lockstep.layers.norm import RMSNorm
from lockstep.layers.rotary import Rotary
from lockstep.step import Step


class Attention(nn.Module):
    """x [T, H] -> [T, H]: q/k norm, rotary, paged attention, sigmoid output gate, projection.

    Where `gated`, q_proj gives, head by head, head_dim of q then head_dim of gate. norm_offset: 1
    where the q and k norms are stored around zero.
    """

    k_cache: Tensor
    v_cache: Tensor

    def __init__(
        self,
        build: Build,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary: Rotary,
        eps: float,
        *,
        gated: bool,
        norm_offset: float,
    ) -> None:
        super().__init__()
        self.gated = gated
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.dtype, self.rotary = build.dtype, rotary
        kv = kv_heads * head_dim
        self.qkv = Linear(build, hidden, heads * head_dim * (2 if gated else 1), kv, kv)
        self.q_norm = RMSNorm(build, head_dim, eps, norm_offset)
        self.k_norm = RMSNorm(build, head_dim, eps, norm_offset)
        self.out = Linear(build, heads * head_dim, hidden)
        self.attend = build.op(paged_attention, heads=heads, kv_heads=kv_heads, head_dim=head_dim)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        qg, k, v = self.qkv(x).split(self.qkv.outputs, dim=-1)
        q, *gate = qg.unflatten(-1, (self.heads, -1)).split(self.head_dim, dim=-1)
        k, v = (t.unflatten(-1, (self.kv_heads, self.head_dim)) for t in (k, v))
        turned = self.rotary(torch.cat([self.q_norm(q), self.k_norm(k)], dim=1), step.positions)
        q, k = turned.split([self.heads, self.kv_heads], dim=1)
        self.k_cache.flatten(0, 1).index_put_((step.slot_mapping,), k)
        self.v_cache.flatten(0, 1).index_put_((step.slot_mapping,), v)
        mixed = self.attend(
            q.contiguous(),
            self.k_cache,
            self.v_cache,
            step.page_table,
            step.cu_seqlens,
            step.starts,
            step.shape.query_len,
            self.head_dim**-0.5,
        )
        if self.gated:
            mixed = mixed * sigmoid(gate[0])
        return self.out(mixed.flatten(1))

    def cache_spec(self) -> PagedSpec:
        return PagedSpec(self.kv_heads, self.head_dim, self.dtype)

    def bind(self, storage: tuple[Tensor, Tensor]) -> None:
        self.k_cache, self.v_cache = storage

    def cache_tensors(self) -> list[Tensor]:
        return [self.k_cache, self.v_cache]
