"""Which layers keep keys and values in which format, and the static scales of a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import CheckpointError, ConfigError, choice_error
from lockstep.kernels.formats.kv import KVFormat
from lockstep.quantization import TensorInfo
from lockstep.quantization.weight_sink import FLOAT_DTYPES, WeightSink

ENDS = {"first": 0, "last": -1}
"""Names of layers: the first and the last one that attends."""
SCALE_TENSORS = (
    ("", "k_scale", "k"),
    ("", "v_scale", "v"),
    ("k_proj", "k_scale", "k"),
    ("v_proj", "v_scale", "v"),
    ("k_proj", "output_scale", "k"),
    ("v_proj", "output_scale", "v"),
    ("", "kv_scale", "kv"),
)
"""Where a checkpoint may have a static scale, the newest way first: a module of the layer, "" for
its own; the tensor; the sides that it is of. AutoFP8 has the last, compressed-tensors and ModelOpt
the others."""
MIN_SCALE = torch.finfo(torch.float32).tiny
"""Below it a scale is subnormal, and a quotient by it may overflow."""


@dataclass(frozen=True)
class LayerKVFormats:
    """format: of the layers that attend, None for the model's dtype. skip: those that keep it in
    the model's dtype all the same, by number, or first and last until settled(). setting: the one
    that chose the format, for messages."""

    format: KVFormat | None = None
    skip: tuple[str, ...] = ()
    setting: str = "kv_cache_dtype"

    def settled(self, attending: Sequence[int]) -> "LayerKVFormats":
        """The same with numbers alone, of a model in which these layers attend. Raises
        ConfigError."""
        numbers = []
        for name in self.skip:
            number = attending[ENDS[name]] if name in ENDS else int(name)
            if number not in attending:
                allowed = f"first, last, {', '.join(map(str, attending))}"
                remedy = "Name layers that attend."
                raise choice_error(ConfigError, "kv_cache_dtype_skip_layers", name, allowed, remedy)
            numbers.append(str(number))
        return replace(self, skip=tuple(numbers))

    def of(self, layer: str) -> KVFormat | None:
        """The format of the layer of this name, "layers.3"; of a draft module's, any other."""
        if self.format is None or layer.rpartition(".")[2] in self.skip:
            return None
        return self.format.for_layer(layer)


class StaticScales:
    """k_scale and v_scale of one attention layer, where its checkpoint has them and its format is
    scaled by them. A code times the scale is the number. SCALE_TENSORS says where they stand.

    other: the setting by which the checkpoint's are of another format. Raises CheckpointError where
    there are some all the same.
    """

    def __init__(
        self,
        name: str,
        format: KVFormat | None,
        tensors: Mapping[str, Mapping[str, TensorInfo]],
        other: str | None = None,
    ) -> None:
        self.name = name
        self.scales: dict[str, float] = {}
        self.slots: dict[str, WeightSink] = {}
        if format is None or not format.has_static_scales:
            return
        told: set[str] = set()
        for module, name, sides in SCALE_TENSORS:
            info = tensors.get(module, {}).get(name)
            own = set(sides) - told
            if info is None or not own:
                continue
            told |= own
            key = f"{module}.{name}".lstrip(".")
            if other is not None:
                raise self._error(key, f"a scale under {other}", "scales of fp8")
            if prod(info.shape) != 1:
                raise self._error(key, f"shape {list(info.shape)}", "one number")
            self.slots[key] = WeightSink(
                None, FLOAT_DTYPES, torch.device("cpu"), self._taking(own, key)
            )

    def _taking(self, sides: set[str], key: str) -> Any:
        def take(tensor: Tensor) -> None:
            scale = tensor.float().item()
            if not MIN_SCALE <= scale < inf:
                allowed = f"a finite number of {MIN_SCALE:.2g} or more"
                raise self._error(key, str(scale), allowed)
            self.scales |= dict.fromkeys(sides, scale)

        return take

    def _error(self, key: str, found: str, allowed: str) -> CheckpointError:
        return CheckpointError(
            f"{self.name}.{key}={found} is not allowed; allowed: {allowed}. Mend the "
            "checkpoint, or choose another kv_cache_dtype."
        )

    def applied(self, format: KVFormat | None) -> KVFormat | None:
        """The format with the scales that were loaded."""
        if format is None or not self.scales:
            return format
        sides = {s: replace(getattr(format, s), scale=x) for s, x in self.scales.items()}
        return replace(format, **sides)
