"""Interface of weight formats, and the storage layout of quantized weights on the device."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from lockstep.errors import CheckpointError
from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.quantization.weight_sink import Ranges, WeightSink

UNQUANTIZED_NAMES = (
    "in_proj_a",
    "in_proj_b",
    "in_proj_ba",
    "gate",
    "shared_expert_gate",
    "lm_head",
    "eh_proj",
)
"""Linear layers that checkpoints usually keep unquantized."""

NOT_NN_LINEAR = ("gate", "eh_proj")
"""Layers that are no nn.Linear in the modeling code that quantization tools see.

A rule for all linear layers does not cover them, and published checkpoints do not list them.
"""

EXPERT_PATH = ".experts."
"""Part of the names of experts.

Tools skip the experts if all of a layer's are one tensor, and do not list them as skipped.
"""


@dataclass(frozen=True)
class TensorInfo:
    """Header entry of one tensor. name: with the architecture's prefix."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class CheckpointLinear:
    """Linear layer as a checkpoint stores it, [N, K] = [outputs, inputs].

    path: name less the architecture's prefix, e.g. layers.0.mlp.down_proj. names: the names with
    each possible prefix, which the lists in a checkpoint's settings refer to. tensors: the
    checkpoint's tensors by suffix ("qweight"), None without files (dummy weights). outputs: columns
    of this rank. whole_outputs: columns in the checkpoint (0: outputs). ranges: those of
    this rank, () for all.
    """

    path: str
    names: tuple[str, ...]
    outputs: int
    inputs: int
    tensors: Mapping[str, TensorInfo] | None
    whole_outputs: int = 0
    ranges: Ranges = ()

    def __post_init__(self) -> None:
        if not self.whole_outputs:
            object.__setattr__(self, "whole_outputs", self.outputs)

    @property
    def whole(self) -> "CheckpointLinear":
        """The layer as a single rank stores it."""
        return replace(self, outputs=self.whole_outputs, ranges=())

    @cached_property
    def joined_names(self) -> str:
        """Names of the layer, one per line, in which a substring of a name is searched."""
        return "\n".join(self.names)


@dataclass(frozen=True)
class Layout:
    """Storage layout of a quantized weight on the device: its class and the options of `empty`.

    fusion_key: weights with different values are not fused. It identifies data that all rows of a
    quantized weight share, such as an order of columns.
    """

    kind: type[QuantizedWeight]
    options: tuple[tuple[str, Any], ...] = ()
    fusion_key: str = ""

    @classmethod
    def of(cls, kind: type[QuantizedWeight], **options: Any) -> "Layout":
        return cls(kind, tuple(sorted(options.items())))

    def __str__(self) -> str:
        """Return the layout as text: IntWeight(bits=4, group=128)."""
        options = ", ".join(
            f"{name}={value}".replace("torch.", "")
            for name, value in self.options
            if value is not False
        )
        return f"{self.kind.__name__}({options})"

    def by_rows(self) -> "Layout":
        """Return the layout with scales per output column instead of blocks of columns."""
        options = dict(self.options)
        if "block_n" in options:
            options["block_n"] = 1
        return replace(self, options=tuple(sorted(options.items())))

    def empty(self, n: int, k: int, device: str | torch.device) -> QuantizedWeight:
        """Return an unfilled weight [n, k]."""
        return self.kind.empty(n, k, **dict(self.options), device=device)  # type: ignore[attr-defined]


class WeightFormat(ABC):
    """Weight format of a checkpoint, read from its settings.

    name: the format's name in numerics. quantizes_activations: whether the user chose to quantize
    the activations of its e4m3 weights to e4m3. unused: last parts of tensor names that may occur
    and are not read. activation_notes: settings that are not followed while activations are not
    quantized, one line each. other_notes: settings that are never followed. other_kv: the setting
    that says that the static KV scales are of another format than fp8, None if they are fp8.
    reader_dequantizes: whether the checkpoint's reader dequantizes a tensor for a plain weight.
    """

    name: str
    quantizes_activations: bool = False
    unused: frozenset[str] = frozenset()
    activation_notes: tuple[str, ...] = ()
    other_notes: tuple[str, ...] = ()
    other_kv: str | None = None
    reader_dequantizes: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        """Settings that are not followed, one line each."""
        of_activations = () if self.quantizes_activations else self.activation_notes
        return (*of_activations, *self.other_notes)

    def activation_refusal(self) -> str | None:
        """Return why activations cannot be quantized to e4m3, as a sentence's end; None if they
        can.
        """
        return f"the weight format {self.name}, which has no e4m3 weights"

    @abstractmethod
    def layout(self, module: CheckpointLinear) -> Layout | None:
        """Return the device layout of a linear layer's weight; None if it is plain.

        Raises:
            CheckpointError: settings and tensors contradict each other, or are not supported.
        """

    @abstractmethod
    def sinks(self, module: CheckpointLinear, weight: QuantizedWeight) -> dict[str, WeightSink]:
        """Map the suffix of each tensor of the layer to the sink that fills these rows."""


def is_usually_unquantized(module: CheckpointLinear) -> bool:
    """Return whether checkpoints usually keep this linear layer unquantized.

    It is so for UNQUANTIZED_NAMES and for the whole draft module.
    """
    return module.path.startswith("mtp.") or module.path.rpartition(".")[2] in UNQUANTIZED_NAMES


def contradiction_error(module: CheckpointLinear, requirement: str) -> CheckpointError:
    """Return the error for tensors that contradict the settings, which ask for `requirement`."""
    tensors = (module.tensors or {}).values()
    tensors_found = [f"{info.name} ({info.dtype} {list(info.shape)})" for info in tensors]
    listed = ", ".join(sorted(tensors_found)[:8]) or "none"
    return CheckpointError(
        f"{module.path} has the tensors {listed[:600]}, but {requirement}. "
        "Correct the settings, or fetch the checkpoint again."
    )


def damaged_error(module: CheckpointLinear, suffix: str, problem: str) -> CheckpointError:
    """Return the error for a tensor with impossible contents."""
    return CheckpointError(f"{module.path}.{suffix} {problem}. Fetch the checkpoint again.")
