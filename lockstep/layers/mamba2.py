"""The Mamba-2 mixer (Dao and Gu, 2024), in the layout of Nemotron-H checkpoints."""

from math import inf

import torch
from torch import Tensor, nn

from lockstep.cache.specs import Spec
from lockstep.cache.state import state_spec
from lockstep.kernels.mamba2 import Mamba2Weights, mamba2_chunk, mamba2_step
from lockstep.kernels.recurrent.state import RecurrentState
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Linear, PartialLinear, Target
from lockstep.layers.norm import GatedGroupNorm
from lockstep.layers.sharding import Columns, Part, row_sink
from lockstep.step import ForwardContext, StepContext, flush_after


class Mamba2(nn.Module):
    """Mamba-2 mixer: x [T, H] -> [T, H].

    Args:
        heads, head_dim: heads and their channels.
        groups, state_dim: groups of B and C, which the heads share evenly, and their width.
        kernel: taps of the causal convolution.
        bias, conv_bias: whether both projections, and the convolution, have biases.
        limits: range to which time steps are clamped.
    """

    state: RecurrentState

    def __init__(
        self,
        build: BuildContext,
        hidden: int,
        heads: int,
        head_dim: int,
        groups: int,
        state_dim: int,
        kernel: int,
        eps: float,
        *,
        bias: bool = False,
        conv_bias: bool = True,
        limits: tuple[float, float] = (0.0, inf),
    ) -> None:
        super().__init__()
        # Heads stay on the rank of their group, and the gated norm is of a group.
        heads_per_group = heads // groups
        inner_part = Part(groups, heads_per_group * head_dim)
        state_part = Part(groups, state_dim)
        self.inner_columns = Columns((inner_part,))
        self.conv_columns = Columns((inner_part, state_part, state_part))
        self.head_columns = Columns.heads(groups, heads_per_group)
        projected = Columns((inner_part, *self.conv_columns.parts, *self.head_columns.parts))
        self.rank = build.rank
        groups = len(build.rank.heads(groups))
        heads = groups * heads_per_group
        self.sizes = (groups, heads, state_dim, head_dim)
        self.kernel = kernel
        self.limits = limits
        self.dtype = build.dtype
        self.window = build.window
        self.flush = flush_after(build.device)
        self.state_dtype = build.state_dtype
        inner = heads * head_dim
        self.channels = inner + 2 * groups * state_dim
        self.parts = (inner, self.channels, heads)
        self.in_proj = Linear(build, hidden, {"in_proj": projected}, bias=bias)
        taps = build.empty(kernel, 1, self.channels)  # the layout in which the op reads it
        self.conv = nn.Parameter(taps.permute(2, 1, 0), requires_grad=False)
        self.conv_bias = build.empty(self.channels) if conv_bias else None
        self.a_log = build.empty(heads, dtype=torch.float32)
        self.dt_bias = build.empty(heads, dtype=torch.float32)
        self.d = build.empty(heads, dtype=torch.float32)
        self.norm = GatedGroupNorm(build, groups, inner // groups, eps)
        conv = self.conv_columns
        for parameter in (self.conv, self.conv_bias):
            build.cut(parameter, conv.ranges(build.rank), conv.total)
        for parameter in (self.a_log, self.dt_bias, self.d):
            build.cut(parameter, self.head_columns.ranges(build.rank), self.head_columns.total)
        build.cut(self.norm.weight, self.inner_columns.ranges(build.rank), self.inner_columns.total)
        outputs = {"out_proj": Columns.of(hidden)}
        self.out = PartialLinear(build, self.inner_columns, outputs, bias=bias)
        traits = dict(heads=heads, head_dim=head_dim, groups=groups, state_dim=state_dim)
        traits.update(window=build.window)
        self.step_op = build.op(mamba2_step, **traits, kernel=kernel)
        self.chunk_op = build.op(mamba2_chunk, **traits, kernel=kernel)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        z, mixed, dt = self.in_proj(x, ctx).split(self.parts, dim=-1)
        return self.out(self.norm(ctx.mix(self._mix, mixed, dt), z), ctx)

    def _mix(self, mixed: Tensor, dt: Tensor, ctx: StepContext) -> Tensor:
        """Run the recurrence: inputs [T, channels] and time steps [T, heads] of one step -> [T,
        heads head_dim].
        """
        weights = Mamba2Weights(
            self.conv.flatten(1), self.conv_bias, self.a_log, self.dt_bias, self.d, *self.limits
        )
        run = self._prompt if ctx.shape.prompt else self._generated
        return run(mixed, dt, weights, ctx)

    def _prompt(
        self, mixed: Tensor, dt: Tensor, weights: Mamba2Weights, ctx: StepContext
    ) -> Tensor:
        where = (ctx.cu_seqlens, ctx.starts, ctx.state_src, ctx.state_slots)
        y = self.chunk_op(mixed, dt, weights, self.state, *where, ctx.snapshot_slots)
        return y.flatten(-2)

    def _generated(
        self, mixed: Tensor, dt: Tensor, weights: Mamba2Weights, ctx: StepContext
    ) -> Tensor:
        window = (ctx.shape.rows, ctx.shape.query_len)
        mixed, dt = (t.unflatten(0, window) for t in (mixed, dt))
        where = (ctx.state_slots, ctx.starts, ctx.folded)
        committed = ctx.committed if ctx.shape.forced else None
        y = self.step_op(
            mixed, dt, weights, self.state, *where, flush=ctx.flush, committed=committed
        )
        return y.flatten(-2).flatten(0, 1)

    def weights(self) -> dict[str, Target]:
        """Map the checkpoint's tensors, by name within the module, to their destinations."""
        table = self.in_proj.weights() | self.out.weights()
        table.update(
            {
                "conv1d.weight": row_sink(self.conv, self.conv_columns, self.rank),
                "A_log": row_sink(self.a_log, self.head_columns, self.rank),
                "dt_bias": row_sink(self.dt_bias, self.head_columns, self.rank),
                "D": row_sink(self.d, self.head_columns, self.rank),
                "norm.weight": row_sink(self.norm.weight, self.inner_columns, self.rank),
            }
        )
        if self.conv_bias is not None:
            table["conv1d.bias"] = row_sink(self.conv_bias, self.conv_columns, self.rank)
        return table

    def cache_spec(self) -> Spec:
        kept = (self.window, self.flush, self.dtype, self.state_dtype)
        return state_spec(self.sizes, self.channels, self.kernel, *kept)

    def bind(self, storage: dict[str, Tensor]) -> None:
        self.state = RecurrentState(**storage)

    def cache_tensors(self) -> list[Tensor]:
        return self.state.tensors()
