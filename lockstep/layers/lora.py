"""LoRA adapters of a linear layer (Hu et al., 2021)."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from lockstep.kernels.lora import lora, padded_rank
from lockstep.layers.build_context import BuildContext
from lockstep.layers.sharding import column_sink
from lockstep.quantization import CheckpointLinear, WeightSink
from lockstep.step import ForwardContext

AddAdapters = Callable[[Tensor, Tensor, ForwardContext | None], Tensor]
"""Function that adds the adapters of tokens: (y [T, N], x [T, K], step) -> [T, N]."""


class LoRA(nn.Module):
    """Adapters of one linear layer: y [T, N] -> y + s B (A x), by the adapter of each token.

    A is whole on every rank, since x is. B has the columns of this rank, like the weight.

    Args:
        sources: the layer's fused modules.
        orders: order of a module's rows in the layer, where it differs from the checkpoint's.

    Attributes:
        a [L, P R, K], b [L, R, N], scales [L, P], parts [N]: see lockstep.kernels.lora.lora. Not
            parameters, since a base model with random weights keeps them.
    """

    a: Tensor
    b: Tensor
    scales: Tensor
    parts: Tensor

    def __init__(
        self,
        build: BuildContext,
        sources: Sequence[CheckpointLinear],
        inputs: int,
        orders: Mapping[int, Tensor],
    ) -> None:
        super().__init__()
        self.table = build.adapters
        self.sources = tuple(sources)
        self.orders = orders
        self.rank = padded_rank(build.adapters.rank, build.device)
        count = len(build.adapters.modules) + 1
        widths = [module.outputs for module in sources]
        self.begins = tuple(accumulate(widths, initial=0))
        self.register_buffer("a", build.empty(count, len(sources) * self.rank, inputs).data.zero_())
        self.register_buffer("b", build.empty(count, self.rank, self.begins[-1]).data.zero_())
        scales = build.empty(count, len(sources), dtype=torch.float32)
        self.register_buffer("scales", scales.data.zero_())
        parts = [part for part, width in enumerate(widths) for _ in range(width)]
        self.register_buffer("parts", torch.tensor(parts, dtype=torch.int32, device=build.device))
        self.add = build.op(lora)

    def forward(self, y: Tensor, x: Tensor, ctx: ForwardContext | None) -> Tensor:
        """Add each token's adapter to y in place and return it."""
        assert ctx is not None and ctx.adapter_ids is not None, (
            "every token has an adapter's number"
        )
        return self.add(y, x, self.a, self.b, self.scales, self.parts, ctx.adapter_ids)

    def changes(self, adapter: int) -> dict[int, str]:
        """Map the parts that an adapter changes to the names of their modules in the adapter."""
        names = (
            (part, self.table.module_name(adapter, m.names)) for part, m in enumerate(self.sources)
        )
        return {part: name for part, name in names if name is not None}

    def targets(self, adapter: int, part: int, rank: int) -> tuple[Tensor, Tensor | WeightSink]:
        """Return the destinations of an adapter's A [R, K] and B [N, R] of one part."""
        first = part * self.rank
        columns = slice(self.begins[part], self.begins[part + 1])
        b = self.b[adapter, :rank, columns].t()
        order = self.orders.get(part)
        return self.a[adapter, first : first + rank], column_sink(b, self.sources[part], order)


def no_adapters(y: Tensor, x: Tensor, ctx: ForwardContext | None) -> Tensor:
    """Return y: no adapter changes the layer."""
    return y
