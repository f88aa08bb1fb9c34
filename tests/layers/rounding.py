"""A weight format for tests that quantizes weights while they are loaded."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.kernels.formats.weights import IntWeight, QuantizedWeight, quantize_int
from lockstep.quantization import CheckpointLinear, Layout, WeightFormat, WeightSink
from lockstep.quantization.weight_sink import FLOAT_DTYPES


@dataclass
class Rounding(WeightFormat):
    """Integers in groups of 4. of: part of the names of quantized weights; odd: a module that stays
    dense."""

    of: str = ".experts."
    odd: str = ""
    requested: list[CheckpointLinear] = field(default_factory=list)

    def layout(self, module: CheckpointLinear) -> Layout | None:
        if self.of not in module.path or module.path == self.odd:
            return None
        self.requested.append(module)
        return Layout.of(IntWeight, bits=4, group=4, scale_dtype=torch.float32)

    def sinks(self, module: CheckpointLinear, weight: QuantizedWeight) -> dict[str, WeightSink]:
        def fill(tensor: Tensor) -> None:
            weight.copy_(quantize_int(tensor, 4, 4))

        return {
            "weight": WeightSink((module.outputs, module.inputs), FLOAT_DTYPES, weight.device, fill)
        }
