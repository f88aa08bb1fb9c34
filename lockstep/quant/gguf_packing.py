"""The weight format of GGUF files, whose tensors say themselves how they are quantized."""

from collections.abc import Mapping
from typing import Any

from lockstep.kernels.packed import PackedWeight
from lockstep.quant.packing import Layout, Module, Packing
from lockstep.quant.reading import SettingsReader, read_strictly
from lockstep.quant.slot import Slot


class GGUFPacking(Packing):
    """Packing of a checkpoint that lockstep.models.gguf reads. Its loader dequantizes."""

    name = "gguf"

    def __init__(self, settings: SettingsReader) -> None:
        pass

    def layout(self, module: Module) -> Layout | None:
        return None

    def slots(self, module: Module, weight: PackedWeight) -> dict[str, Slot]:
        raise AssertionError("no weight is packed")


def read(settings: Mapping[str, Any]) -> Packing:
    """Return the format. Raises CheckpointError on settings that are not built."""
    return read_strictly(settings, GGUFPacking)
