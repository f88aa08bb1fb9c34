"""Weight formats, one file each: how a checkpoint packs its weights, and where they go.

A format says of a module how its weight lies on the device (a Layout of lockstep.kernels.packed),
and what fills it: the module's tensors in the checkpoint, each through a Slot.
"""

from lockstep.quant.packing import Layout, Module, Packing, TensorInfo
from lockstep.quant.slot import Slot

__all__ = ["Layout", "Module", "Packing", "Slot", "TensorInfo"]
