"""A weight format that packs weights while they are loaded, for tests of layers."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.kernels.formats.weights import IntWeight, QuantizedWeight, quantize_int
from lockstep.quantization import Layout, Module, Packing, Slot
from lockstep.quantization.weight_sink import PLAIN


@dataclass
class Rounding(Packing):
    """Integers in groups of 4. of: in the path of what is packed; odd: a
    module that is left as it is."""

    of: str = ".experts."
    odd: str = ""
    asked: list[Module] = field(default_factory=list)

    def layout(self, module: Module) -> Layout | None:
        if self.of not in module.path or module.path == self.odd:
            return None
        self.asked.append(module)
        return Layout.of(IntWeight, bits=4, group=4, scale_dtype=torch.float32)

    def slots(self, module: Module, weight: QuantizedWeight) -> dict[str, Slot]:
        def fill(tensor: Tensor) -> None:
            weight.copy_(quantize_int(tensor, 4, 4))

        return {"weight": Slot((module.outputs, module.inputs), PLAIN, weight.device, fill)}
