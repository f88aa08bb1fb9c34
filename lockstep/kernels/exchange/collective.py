"""exchange by the all-gather of a library: gloo on CPUs, NCCL on GPUs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.exchange import exchange, exchange_add_rms_norm
from lockstep.kernels.exchange.contract import Activation, AddNorm, gather_columns
from lockstep.kernels.exchange.group import RankGroup
from lockstep.kernels.linear.triton import reduce_partials


def _serves(device: str) -> Any:
    """Return the `supports` of a backend for one kind of device."""

    def supports(**traits: Any) -> str | None:
        kind = str(traits.get("device", "cpu")).partition(":")[0]
        return None if kind == device else f"it serves {device}, this is {kind}"

    return supports


exchange.backend("cpu", supports=_serves("cpu"))(exchange.reference)
exchange_add_rms_norm.backend("cpu", supports=_serves("cpu"))(exchange_add_rms_norm.reference)


@exchange.backend("nccl", supports=_serves("cuda"))
def exchange_nccl(
    local: Tensor,
    widths: Sequence[int],
    group: RankGroup,
    dtype: torch.dtype | None = None,
    act: Activation | None = None,
    needed: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.exchange.contract.exchange. All columns are sent."""
    if local.dim() == 3:
        local = reduce_partials(local, dtype or local.dtype)
    return gather_columns(local if act is None else act.run(local), widths, group)


@exchange_add_rms_norm.backend("nccl", supports=_serves("cuda"))
def exchange_add_rms_norm_nccl(
    x: Tensor,
    delta: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    widths: Sequence[int],
    group: RankGroup,
    add_norm: AddNorm,
) -> tuple[Tensor, Tensor]:
    """See lockstep.kernels.exchange.contract.exchange_add_rms_norm."""
    return add_norm(x, exchange_nccl(delta, widths, group, x.dtype), weight, eps, offset)
