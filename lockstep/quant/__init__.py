"""Weight formats, one file each: how a checkpoint packs its weights, and where they go.

A format says of a linear map how its weight lies on the device (a Layout of
lockstep.kernels.packed), and what fills it: the map's tensors in the checkpoint, each through a
Slot. FORMATS maps what config.json calls a format to its file.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from lockstep.errors import CheckpointError, choice_error
from lockstep.quant.packing import Layout, Module, Packing, TensorInfo
from lockstep.quant.slot import Slot

__all__ = ["FORMATS", "Layout", "Module", "Packing", "Slot", "TensorInfo", "packing_of"]

FORMATS: dict[str, str] = {
    "fp8": "lockstep.quant.fp8",
    "compressed-tensors": "lockstep.quant.compressed_tensors",
    "modelopt": "lockstep.quant.modelopt",
    "modelopt_fp4": "lockstep.quant.modelopt",
    "modelopt_mixed": "lockstep.quant.modelopt",
}


def packing_of(settings: Mapping[str, Any] | None) -> Packing | None:
    """The weight format that a checkpoint's quantization_config names; None without one.

    Raises CheckpointError where it is not built, or asks for what is not.
    """
    if settings is None:
        return None
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise choice_error(
            CheckpointError,
            "config.json quantization_config.quant_method",
            method,
            ", ".join(FORMATS),
            "Serve a checkpoint in one of these formats, or one that is not packed.",
        )
    return import_module(FORMATS[method]).read(settings)
