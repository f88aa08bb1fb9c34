"""Softmax attention over a paged KV cache, with the options of several families."""

from torch import Tensor, nn

from lockstep.cache.kv import kv_caches, kv_spec, kv_tensors
from lockstep.cache.specs import Spec
from lockstep.kernels.attention import paged_attention
from lockstep.kernels.formats.kv import KVCache
from lockstep.kernels.formats.kv.table import head_quantizers
from lockstep.kernels.fp8_linear import QuantizedRows
from lockstep.kernels.rotary import rope_and_cache
from lockstep.layers.build_context import BuildContext
from lockstep.layers.kv_format import StaticScales
from lockstep.layers.linear import Linear, PartialLinear, Target
from lockstep.layers.norm import Norm
from lockstep.layers.rotary import Rotary
from lockstep.layers.sharding import Columns, count_columns
from lockstep.step import ForwardContext, StepContext


class Attention(nn.Module):
    """Attention mixer: x [T, H] -> [T, H].

    Projections, norms of q and k, rotary positions, paged attention, gate, output projection.

    Args:
        hidden: H, or the widths of input and output if they differ.
        rotary: cos and sin tables; None for attention without positions.
        qk_norm: apply an RMS norm with `eps` to every query and key head; the weights are stored
            around 1 - norm_offset.
        bias, out_bias: whether q, k, v and the output projection have biases.
        gated: q_proj returns head_dim of q, then head_dim of a gate for each head; sigmoid(gate)
            multiplies the head's output.
        scale: factor of the scores, head_dim^-0.5 for None.
    """

    k_cache: KVCache
    v_cache: KVCache

    def __init__(
        self,
        build: BuildContext,
        hidden: int | tuple[int, int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        rotary: Rotary | None,
        qk_norm: bool = False,
        eps: float = 1e-6,
        norm_offset: float = 0.0,
        bias: bool = False,
        out_bias: bool = False,
        gated: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        queries = Columns.heads(heads, head_dim * (2 if gated else 1))
        # Ranks that outnumber the KV heads hold copies of them.
        keys = Columns.heads(heads, head_dim, heads // kv_heads)
        mixed = Columns.heads(heads, head_dim)
        heads = len(build.rank.heads(heads))
        kv_heads = count_columns(keys, build.rank) // head_dim
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.gated = gated
        self.eps = eps
        self.norm_offset = norm_offset
        self.scale = head_dim**-0.5 if scale is None else scale
        self.dtype = build.dtype
        self.rotary = rotary
        projections = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        inputs, outputs = (hidden, hidden) if isinstance(hidden, int) else hidden
        self.qkv = Linear(build, inputs, projections, bias=bias)
        self.q_norm = Norm(build, head_dim, eps, norm_offset) if qk_norm else None
        self.k_norm = Norm(build, head_dim, eps, norm_offset) if qk_norm else None
        self.out = PartialLinear(build, mixed, {"o_proj": Columns.of(outputs)}, bias=out_bias)
        self.kv_format = build.kv.of(build.layer)
        quantizers = head_quantizers(self.kv_format, head_dim, build.kv.setting)
        scale_tensors = build.module_tensors("k_proj", "v_proj")
        other = None if build.weight_format is None else build.weight_format.other_kv
        self.static = StaticScales(build.path, self.kv_format, scale_tensors, other)
        sizes = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim, gated=gated)
        self.rope = build.op(rope_and_cache, **sizes, quantizers=quantizers)
        self.attend = build.op(paged_attention, **sizes, quantizers=quantizers)

    def write_cache(self, x: Tensor, ctx: StepContext) -> None:
        """Write the cache entries of x [T, H] without computing any output. For drafters."""
        self._rotate_and_cache(self.qkv.from_part(1, x), ctx)

    def _rotate_and_cache(self, qkv: Tensor, ctx: StepContext) -> Tensor:
        """Return queries [T, H, D] of the projections [T, N], and write their keys and values."""
        return self.rope(
            qkv,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            None if self.rotary is None else self.rotary.cos,
            None if self.rotary is None else self.rotary.sin,
            ctx.positions,
            ctx.slot_mapping,
            self.k_cache,
            self.v_cache,
            self.eps,
            self.norm_offset,
            gated=self.gated,
        )

    @property
    def first_linear(self) -> Linear:
        """Linear layer that alone reads the input."""
        return self.qkv

    def forward(self, x: Tensor | QuantizedRows, ctx: ForwardContext) -> Tensor:
        return self.out(ctx.mix(self._mix, self.qkv(x, ctx)), ctx)

    def _mix(self, qkv: Tensor, ctx: StepContext) -> Tensor:
        """Write the cache and attend: projections [T, N] of one step -> [T, H D]."""
        q = self._rotate_and_cache(qkv, ctx)
        mixed = self.attend(
            q,
            self.k_cache,
            self.v_cache,
            ctx.page_table,
            ctx.cu_seqlens,
            ctx.starts,
            ctx.shape.query_len,
            self.scale,
            # The op reads the gates from the projections themselves, without a copy.
            qkv if self.gated else None,
        )
        return mixed.flatten(1)

    def weights(self) -> dict[str, Target]:
        """Map the checkpoint's tensors, by name within the module, to their destinations."""
        table = self.qkv.weights() | self.out.weights()
        table.update(self.static.slots)
        if self.q_norm is not None and self.k_norm is not None:
            table["q_norm.weight"] = self.q_norm.weight
            table["k_norm.weight"] = self.k_norm.weight
        return table

    def cache_spec(self) -> Spec:
        return kv_spec(self.kv_heads, self.head_dim, self.dtype, self.kv_format)

    def finish(self) -> None:
        """Set the checkpoint's static KV scales. Call once after loading."""
        self.kv_format = self.static.with_scales(self.kv_format)

    def bind(self, storage: dict[str, Tensor]) -> None:
        self.k_cache, self.v_cache = kv_caches(storage, self.head_dim, self.kv_format)

    def cache_tensors(self) -> list[Tensor]:
        return [*kv_tensors(self.k_cache), *kv_tensors(self.v_cache)]
