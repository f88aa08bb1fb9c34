"""The Gated DeltaNet mixer, in the layout of Qwen3.5 checkpoints.

Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024, arXiv 2412.06464. The ops of
lockstep.kernels.gated_delta_rule have the formulas.
"""

from functools import partial

import torch
from torch import Tensor, nn

from lockstep.cache.specs import Spec
from lockstep.cache.state import state_spec
from lockstep.kernels.fp8_linear import QuantizedRows
from lockstep.kernels.gated_delta_rule import (
    GatedDeltaWeights,
    gated_delta_chunk,
    gated_delta_step,
)
from lockstep.kernels.recurrent.state import RecurrentState
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Linear, PartialLinear, Target
from lockstep.layers.norm import GatedRMSNorm
from lockstep.layers.sharding import Columns, Part, row_sink
from lockstep.step import ForwardContext, StepContext, flush_after


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet mixer: x [T, H] -> [T, H].

    Args:
        hidden: H.
        key_heads, key_dim: heads of q and k, and their width.
        value_heads, value_dim: heads of v, and their width.
        kernel: taps of the causal convolution.
        eps: of the gated norm of each head's output.
        grouped: the checkpoint orders the projections' rows by key head, as Qwen3-Next does.
    """

    state: RecurrentState

    def __init__(
        self,
        build: BuildContext,
        hidden: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        eps: float,
        *,
        grouped: bool = False,
    ) -> None:
        super().__init__()
        # A rank has its value heads, and the key heads that these read.
        values_per_key = value_heads // key_heads
        keys = Part(value_heads, key_dim, values_per_key)
        values = Part(value_heads, value_dim)
        self.conv_columns = Columns((keys, keys, values))
        self.head_columns = Columns.heads(value_heads)
        value_columns = Columns((values,))
        self.rank = build.rank
        whole_key_heads = key_heads
        key_heads = len(build.rank.heads(key_heads) if grouped else keys.units(build.rank))
        value_heads = len(build.rank.heads(value_heads))
        self.key_heads = key_heads
        self.value_heads = value_heads
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.kernel = kernel
        self.dtype = build.dtype
        self.window = build.window
        self.flush = flush_after(build.device)
        self.state_dtype = build.state_dtype
        self.channels = 2 * key_heads * key_dim + value_heads * value_dim
        self.parts = (self.channels, value_heads * value_dim)
        projections = {
            "in_proj_qkv": self.conv_columns,
            "in_proj_z": value_columns,
            "in_proj_b": self.head_columns,
            "in_proj_a": self.head_columns,
        }
        orders = {}
        if grouped:
            projections = {
                "in_proj_qkvz": Columns.heads(
                    whole_key_heads, 2 * (key_dim + values_per_key * value_dim)
                ),
                "in_proj_ba": Columns.heads(whole_key_heads, 2 * values_per_key),
            }
            orders = {
                "in_proj_qkvz": partial(
                    grouped_rows, key_heads, (key_dim, key_dim, *[values_per_key * value_dim] * 2)
                ),
                "in_proj_ba": partial(grouped_rows, key_heads, (values_per_key, values_per_key)),
            }
        first_gate = len(projections) // 2
        self.in_proj = Linear(build, hidden, projections, orders=orders, partials_from=first_gate)
        taps = build.empty(kernel, 1, self.channels)  # the layout in which the op reads it
        self.conv = nn.Parameter(taps.permute(2, 1, 0), requires_grad=False)
        self.a_log = build.empty(value_heads, dtype=torch.float32)
        self.dt_bias = build.empty(value_heads, dtype=torch.float32)
        conv = self.conv_columns
        build.cut(self.conv, conv.ranges(build.rank), conv.total)
        for parameter in (self.a_log, self.dt_bias):
            build.cut(parameter, self.head_columns.ranges(build.rank), self.head_columns.total)
        self.norm = GatedRMSNorm(build, value_dim, eps)
        self.out = PartialLinear(build, value_columns, {"out_proj": Columns.of(hidden)})
        traits = dict(key_dim=key_dim, value_dim=value_dim, key_heads=key_heads, kernel=kernel)
        traits.update(value_heads=value_heads, window=build.window)
        self.step_op = build.op(gated_delta_step, **traits)
        self.chunk_op = build.op(gated_delta_chunk, **traits)

    @property
    def first_linear(self) -> Linear:
        """Linear layer that alone reads the input."""
        return self.in_proj

    def forward(self, x: Tensor | QuantizedRows, ctx: ForwardContext) -> Tensor:
        projected, gates = self.in_proj.split_partials(x, ctx)
        if gates.dim() > 2:
            gates = gates.transpose(0, 1)
        return self.out(ctx.mix(self._mix, projected, gates), ctx)

    def _mix(self, projected: Tensor, gates: Tensor, ctx: StepContext) -> Tensor:
        """Run the recurrence and the gated norm of one step -> [T, HV V].

        projected: [T, channels + HV V], raw q, k and v, then the output gate z. gates: [T, 2 HV], b
        and a, or their split-K partials [T, P, 2 HV] fp32, which the ops add. Tokens come first,
        since a pass over several steps cuts them.
        """
        mixed, z = projected.split(self.parts, dim=-1)
        if gates.dim() > 2:
            gates = gates.transpose(0, 1)
        b, a = gates.split(self.value_heads, dim=-1)
        weights = GatedDeltaWeights(
            self.conv.flatten(1), self.a_log, self.dt_bias, self.norm.weight, self.norm.eps
        )
        run = self._prompt if ctx.shape.prompt else self._generated
        o = run(mixed, z, b, a, weights, ctx)
        return o.reshape(len(projected), -1)

    def _prompt(
        self,
        mixed: Tensor,
        z: Tensor,
        b: Tensor,
        a: Tensor,
        weights: GatedDeltaWeights,
        ctx: StepContext,
    ) -> Tensor:
        o = self.chunk_op(
            mixed,
            b,
            a,
            weights,
            self.state,
            ctx.cu_seqlens,
            ctx.starts,
            ctx.state_src,
            ctx.state_slots,
            ctx.snapshot_slots,
        )
        return self.norm(o, z.unflatten(-1, (self.value_heads, self.value_dim)))

    def _generated(
        self,
        mixed: Tensor,
        z: Tensor,
        b: Tensor,
        a: Tensor,
        weights: GatedDeltaWeights,
        ctx: StepContext,
    ) -> Tensor:
        # Generated steps are uniform: every row has query_len tokens.
        window = (ctx.shape.rows, ctx.shape.query_len)
        mixed = mixed.view(*window, -1)
        b, a = (t.unflatten(-2, window) for t in (b, a))
        z = z.view(*window, self.value_heads, self.value_dim)
        where = (ctx.state_slots, ctx.starts, ctx.folded)
        committed = ctx.committed if ctx.shape.forced else None
        return self.step_op(
            mixed, z, b, a, weights, self.state, *where, flush=ctx.flush, committed=committed
        )

    def weights(self) -> dict[str, Target]:
        """Map the checkpoint's tensors, by name within the module, to their destinations."""
        return (
            self.in_proj.weights()
            | self.out.weights()
            | {
                "conv1d.weight": row_sink(self.conv, self.conv_columns, self.rank),
                "A_log": row_sink(self.a_log, self.head_columns, self.rank),
                "dt_bias": row_sink(self.dt_bias, self.head_columns, self.rank),
                "norm.weight": self.norm.weight,
            }
        )

    def cache_spec(self) -> Spec:
        sizes = (self.key_heads, self.value_heads, self.key_dim, self.value_dim)
        kept = (self.window, self.flush, self.dtype, self.state_dtype)
        return state_spec(sizes, self.channels, self.kernel, *kept)

    def bind(self, storage: dict[str, Tensor]) -> None:
        self.state = RecurrentState(**storage)

    def cache_tensors(self) -> list[Tensor]:
        return self.state.tensors()


def grouped_rows(groups: int, parts: tuple[int, ...]) -> Tensor:
    """Return the checkpoint row of each row of a weight [part 0 | part 1 | ...].

    The checkpoint is ordered by group: its rows of part 0, then of part 1, and so on. parts: rows
    of each part in one group.
    """
    rows = torch.arange(groups * sum(parts)).view(groups, -1)
    return torch.cat([part.flatten() for part in rows.split(parts, dim=1)])
