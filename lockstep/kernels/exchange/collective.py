"""exchange by the all-gather of a library: gloo on CPUs, NCCL on GPUs."""

from typing import Any

from lockstep.kernels.exchange import exchange
from lockstep.kernels.exchange.contract import gather_columns


def _serves(device: str) -> Any:
    """Return the `supports` of a backend for one kind of device."""

    def supports(**traits: Any) -> str | None:
        kind = str(traits.get("device", "cpu")).partition(":")[0]
        return None if kind == device else f"it serves {device}, this is {kind}"

    return supports


exchange.backend("cpu", supports=_serves("cpu"))(gather_columns)
exchange.backend("nccl", supports=_serves("cuda"))(gather_columns)
