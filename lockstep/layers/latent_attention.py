"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), absorbed, over paged latents."""

from torch import Tensor, nn

from lockstep.cache.kv import kv_tensors, latent_caches, latent_spec
from lockstep.cache.specs import Spec
from lockstep.kernels.formats.kv import HadamardRotation, KVCache
from lockstep.kernels.formats.kv.table import latent_quantizer
from lockstep.kernels.head_linear import head_linear
from lockstep.kernels.latent_attention import latent_attention, latent_rope_and_cache
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Linear, PartialLinear, Target, weight_sinks
from lockstep.layers.norm import Norm, RMSNorm
from lockstep.layers.rotary import Rotary
from lockstep.layers.sharding import Columns
from lockstep.quantization import WeightSink
from lockstep.quantization.weight_sink import FLOAT_DTYPES
from lockstep.step import ForwardContext, StepContext

NORM_EPS = 1e-6
"""Epsilon of both latent norms; DeepSeek's modeling code does not use rms_norm_eps here."""


class AbsorbedHeads(nn.Module):
    """kv_b_proj split into two maps per head, so that attention works on latents.

    keys [H, C, N] maps a query's N dims without position to the C dims of a latent. values [H, V,
    C] maps an attention-weighted latent to the head's output. The checkpoint's weight [H (N + V),
    C] has N rows of keys, then V rows of values for each head. A quantized one is dequantized after
    loading, since the keys' map is read along its rows.

    rotation: Hadamard rotation in which the cache stores latents, None for none. It is applied to
    every row of the weight at load time, so that queries come out rotated and outputs need no
    inverse.
    """

    def __init__(
        self,
        build: BuildContext,
        heads: int,
        nope_dim: int,
        latent: int,
        value: int,
        rotation: HadamardRotation | None,
    ) -> None:
        super().__init__()
        self.rotation = rotation
        self.widths = (nope_dim, value)
        columns = Columns.heads(heads, nope_dim + value)
        total_heads = heads
        heads = len(build.rank.heads(heads))
        self.dtype = build.dtype
        self.keys = build.matrices(heads, latent, nope_dim)
        self.values = build.matrices(heads, value, latent)
        owned = Columns.heads(total_heads).ranges(build.rank)
        build.cut(self.keys, owned, total_heads)
        build.cut(self.values, owned, total_heads)
        self.weight_format = build.weight_format
        self.module = build.module("kv_b_proj", columns, latent)
        layout = build.layout(self.module)
        sizes = (self.module.outputs, latent)
        self.quantized_parts = [] if layout is None else [build.quantized_weight(*sizes, layout)]
        for part in self.quantized_parts:
            layout = build.layout(self.module.whole)
            build.cut_quantized(part, layout, self.module.ranges, self.module.whole_outputs)
        self.query = build.op(head_linear, heads=heads, inputs=nope_dim, outputs=latent)
        self.out = build.op(head_linear, heads=heads, inputs=latent, outputs=value)

    def absorb(self, q: Tensor) -> Tensor:
        """Return the query in latent space: q [T, H, N] -> [T, H, C]."""
        return self.query(q, self.keys)

    def expand(self, latents: Tensor) -> Tensor:
        """Return the heads' outputs: attention-weighted latents [T, H, C] -> [T, H, V]."""
        return self.out(latents, self.values)

    def weights(self) -> dict[str, Target]:
        """Map the checkpoint's tensors, by name within the module, to their destinations."""
        if self.quantized_parts:
            return weight_sinks(
                "kv_b_proj", self.quantized_parts[0], self.weight_format, self.module
            )
        shape = (self.module.whole_outputs, self.module.inputs)
        sink = WeightSink(
            shape, FLOAT_DTYPES, self.keys.device, self._fill, ranges=self.module.ranges
        )
        return {"kv_b_proj.weight": sink}

    def _fill(self, weight: Tensor) -> None:
        """Fill both maps from kv_b_proj [H (N + V), C]."""
        if self.rotation is not None:
            weight = self.rotation.rotate(weight)
        heads = weight.unflatten(0, (-1, sum(self.widths)))
        keys, values = heads.split(self.widths, dim=1)
        # head_linear takes [outputs, inputs]: absorbing a query multiplies by the keys transposed.
        self.keys.data.copy_(keys.transpose(1, 2))
        self.values.data.copy_(values)

    def finish(self) -> None:
        """Dequantize kv_b_proj into both maps. Call once after loading."""
        for part in self.quantized_parts:
            self._fill(part.dequantize(self.dtype))
        self.quantized_parts = []


class LatentAttention(nn.Module):
    """Multi-head latent attention mixer: x [T, H] -> [T, H].

    Args:
        q_rank: width of the queries' latent; None if one projection makes the queries.
        latent: width of the cached latent (kv_lora_rank).
        nope_dim, rope_dim: dims of a head's query without and with rotary position
            (qk_nope_head_dim, qk_rope_head_dim).
        value: dims of a head's output.
        scale: factor of the scores.
    """

    latents: KVCache
    ropes: Tensor

    def __init__(
        self,
        build: BuildContext,
        hidden: int | tuple[int, int],
        heads: int,
        *,
        q_rank: int | None,
        latent: int,
        nope_dim: int,
        rope_dim: int,
        value: int,
        rotary: Rotary,
        scale: float,
    ) -> None:
        super().__init__()
        queries = Columns.heads(heads, nope_dim + rope_dim)
        values = Columns.heads(heads, value)
        self.heads = len(build.rank.heads(heads))
        self.latent = latent
        self.nope_dim = nope_dim
        self.rope_dim = rope_dim
        self.scale = scale
        self.dtype = build.dtype
        self.rotary = rotary
        query_down: dict[str, int | Columns] = {"q_a_proj": q_rank or 0}
        if q_rank is None:
            query_down = {"q_proj": queries}
        inputs, outputs = (hidden, hidden) if isinstance(hidden, int) else hidden
        # One GEMM reads x: the query's (latent) projection and the latents with their rotary keys.
        self.down = Linear(build, inputs, query_down | {"kv_a_proj_with_mqa": latent + rope_dim})
        self.q_norm = None if q_rank is None else RMSNorm(build, q_rank, NORM_EPS)
        self.q_up = None if q_rank is None else Linear(build, q_rank, {"q_b_proj": queries})
        self.kv_norm = Norm(build, latent, NORM_EPS)
        self.quantizer = latent_quantizer(build.kv.of(build.layer), latent, build.kv.setting)
        rotation = None if self.quantizer is None else self.quantizer.rotation
        self.absorbed = AbsorbedHeads(build, heads, nope_dim, latent, value, rotation)
        self.out = PartialLinear(build, values, {"o_proj": Columns.of(outputs)})
        sizes = dict(latent=latent, rope=rope_dim)
        quantizers = None if self.quantizer is None else (self.quantizer,)
        self.rope = build.op(
            latent_rope_and_cache, heads=self.heads, nope=nope_dim, **sizes, quantizers=quantizers
        )
        self.attend = build.op(latent_attention, heads=self.heads, **sizes, quantizers=quantizers)

    def write_cache(self, x: Tensor, ctx: StepContext) -> None:
        """Write the cache entries of x [T, H] without computing any output. For drafters."""
        # Queries without heads: the op writes the cache and rotates nothing else.
        kv = self.down.from_part(1, x)
        self._rotate_and_cache(kv.new_empty(len(kv), 0, self.nope_dim + self.rope_dim), kv, ctx)

    def _rotate_and_cache(self, q: Tensor, kv: Tensor, ctx: StepContext) -> Tensor:
        """Return the rotated part [T, H, R] of queries [T, H, N + R], and write the latents kv [T,
        C + R].
        """
        return self.rope(
            q,
            kv,
            self.kv_norm.weight,
            self.rotary.cos,
            self.rotary.sin,
            ctx.positions,
            ctx.slot_mapping,
            self.latents,
            self.ropes,
            self.kv_norm.eps,
        )

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        q, kv = self.down.parts(x, ctx)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up(self.q_norm(q), ctx)
        q = q.unflatten(1, (self.heads, self.nope_dim + self.rope_dim))
        absorbed = self.absorbed.absorb(q[..., : self.nope_dim])
        mixed = ctx.mix(self._mix, q, absorbed, kv)
        return self.out(self.absorbed.expand(mixed).flatten(1), ctx)

    def _mix(self, q: Tensor, absorbed: Tensor, kv: Tensor, ctx: StepContext) -> Tensor:
        """Write the cache and attend: queries [T, H, N + R], the same in latent space [T, H, C],
        and latents [T, C + R] of one step -> attention-weighted latents [T, H, C].
        """
        return self.attend(
            absorbed,
            self._rotate_and_cache(q, kv, ctx),
            self.latents,
            self.ropes,
            ctx.page_table,
            ctx.cu_seqlens,
            ctx.starts,
            ctx.shape.query_len,
            self.scale,
        )

    def weights(self) -> dict[str, Target]:
        """Map the checkpoint's tensors, by name within the module, to their destinations."""
        table = self.down.weights() | self.absorbed.weights() | self.out.weights()
        table["kv_a_layernorm.weight"] = self.kv_norm.weight
        if self.q_norm is not None and self.q_up is not None:
            table |= self.q_up.weights() | {"q_a_layernorm.weight": self.q_norm.weight}
        return table

    @property
    def key_flops(self) -> int:
        """Operations per token and key: C + R (score) and C (output) multiply-adds per head."""
        return 2 * self.heads * (2 * self.latent + self.rope_dim)

    def cache_spec(self) -> Spec:
        return latent_spec(self.latent, self.rope_dim, self.dtype, self.quantizer)

    def bind(self, storage: dict[str, Tensor]) -> None:
        self.latents, self.ropes = latent_caches(storage, self.latent, self.quantizer)

    def cache_tensors(self) -> list[Tensor]:
        return [*kv_tensors(self.latents), self.ropes]
