"""KV cache format of each layer, and the static scales of a checkpoint."""

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
"""Names of layers in kv_cache_dtype_skip_layers: the first and the last attention layer."""
SCALE_TENSORS = (
    ("", "k_scale", "k"),
    ("", "v_scale", "v"),
    ("k_proj", "k_scale", "k"),
    ("v_proj", "v_scale", "v"),
    ("k_proj", "output_scale", "k"),
    ("v_proj", "output_scale", "v"),
    ("", "kv_scale", "kv"),
)
"""Tensors that may be static scales, the newest convention first.

(submodule, "" for the attention module itself; tensor; sides that it scales). The last one is
AutoFP8's, the others are those of compressed-tensors and ModelOpt.
"""
MIN_SCALE = torch.finfo(torch.float32).tiny
"""Smallest scale; a quotient by a subnormal number may overflow."""


@dataclass(frozen=True)
class LayerKVFormats:
    """KV cache format of each attention layer.

    format: None for the model's dtype. skip: layers that use the model's dtype nevertheless, by
    number, or "first" and "last" until resolved(). setting: the option that chose the format, for
    messages.
    """

    format: KVFormat | None = None
    skip: tuple[str, ...] = ()
    setting: str = "kv_cache_dtype"

    def resolved(self, attention_layers: Sequence[int]) -> "LayerKVFormats":
        """Return a copy whose skipped layers are numbers, given the model's attention layers.

        Raises:
            ConfigError: a skipped layer is no attention layer.
        """
        numbers = []
        for name in self.skip:
            number = attention_layers[ENDS[name]] if name in ENDS else int(name)
            if number not in attention_layers:
                allowed = f"first, last, {', '.join(map(str, attention_layers))}"
                remedy = "Name layers that attend."
                raise choice_error(ConfigError, "kv_cache_dtype_skip_layers", name, allowed, remedy)
            numbers.append(str(number))
        return replace(self, skip=tuple(numbers))

    def of(self, layer: str) -> KVFormat | None:
        """Return the format of a layer such as "layers.3"; draft modules have other names."""
        if self.format is None or layer.rpartition(".")[2] in self.skip:
            return None
        return self.format.for_layer(layer)


class StaticScales:
    """Static k_scale and v_scale of one attention layer (value = code * scale).

    They are read if the checkpoint has them and the cache format is scaled by them; see
    SCALE_TENSORS.

    Args:
        other: the setting that says that the checkpoint's scales are of another format than fp8.

    Raises:
        CheckpointError: a scale is of another format, or not one number.
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
        known_sides: set[str] = set()
        for module, name, sides in SCALE_TENSORS:
            info = tensors.get(module, {}).get(name)
            new_sides = set(sides) - known_sides
            # A side that a newer convention scales keeps that scale.
            if info is None or not new_sides:
                continue
            known_sides |= new_sides
            key = f"{module}.{name}".lstrip(".")
            if other is not None:
                raise self._error(key, f"a scale under {other}", "scales of fp8")
            if prod(info.shape) != 1:
                raise self._error(key, f"shape {list(info.shape)}", "one number")
            self.slots[key] = WeightSink(
                None, FLOAT_DTYPES, torch.device("cpu"), self._fill_function(new_sides, key)
            )

    def _fill_function(self, sides: set[str], key: str) -> Any:
        def take(tensor: Tensor) -> None:
            scale = tensor.float().item()
            if not MIN_SCALE <= scale < inf:
                allowed = f"a finite number of {MIN_SCALE:.2g} or more"
                raise self._error(key, str(scale), allowed)
            self.scales |= dict.fromkeys(sides, scale)

        return take

    def _error(self, key: str, value: str, allowed: str) -> CheckpointError:
        return CheckpointError(
            f"{self.name}.{key}={value} is not allowed; allowed: {allowed}. Correct the "
            "checkpoint, or choose another kv_cache_dtype."
        )

    def with_scales(self, format: KVFormat | None) -> KVFormat | None:
        """Return the format with the loaded scales."""
        if format is None or not self.scales:
            return format
        sides = {s: replace(getattr(format, s), scale=x) for s, x in self.scales.items()}
        return replace(format, **sides)
