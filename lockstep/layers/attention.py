"""Softmax attention over paged KV, plain (Qwen3) or with an output gate (Qwen3-Next, Qwen3.5)."""

from torch import Tensor, nn

from lockstep.cache.specs import PagedSpec
from lockstep.kernels.attention import paged_attention
from lockstep.kernels.rotary import rope_and_cache
from lockstep.layers.build import Build
from lockstep.layers.linear import Linear, ResidualLinear
from lockstep.layers.norm import Norm
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
        self.q_norm, self.k_norm = (Norm(build, head_dim, eps, norm_offset) for _ in range(2))
        self.out = ResidualLinear(build, heads * head_dim, hidden)
        self.rope = build.op(rope_and_cache, head_dim=head_dim)
        self.attend = build.op(paged_attention, heads=heads, kv_heads=kv_heads, head_dim=head_dim)

    def keep(self, x: Tensor, step: Step) -> None:
        """Writes the keys and values of x [T, H] and makes nothing else. For drafters."""
        self._place(self.qkv.from_part(1, x), step)

    def _place(self, qkv: Tensor, step: Step) -> Tensor:
        """Projections [T, N] -> their queries [T, H, D]; their keys and values are written."""
        return self.rope(
            qkv,
            self.q_norm.weight,
            self.k_norm.weight,
            self.rotary.cos,
            self.rotary.sin,
            step.positions,
            step.slot_mapping,
            self.k_cache,
            self.v_cache,
            self.q_norm.eps,
            self.q_norm.offset,
            gated=self.gated,
        )

    def forward(self, x: Tensor, step: Step) -> Tensor:
        qkv = self.qkv(x)
        q = self._place(qkv, step)
        mixed = self.attend(
            q,
            self.k_cache,
            self.v_cache,
            step.page_table,
            step.cu_seqlens,
            step.starts,
            step.shape.query_len,
            self.head_dim**-0.5,
            qkv if self.gated else None,
        )
        return self.out(mixed.flatten(1))

    def cache_spec(self) -> PagedSpec:
        return PagedSpec(self.kv_heads, self.head_dim, self.dtype)

    def bind(self, storage: tuple[Tensor, Tensor]) -> None:
        self.k_cache, self.v_cache = storage

    def cache_tensors(self) -> list[Tensor]:
        return [self.k_cache, self.v_cache]
