"""What every weight format implements and says, and how a weight lies on the device."""

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
"""Maps that checkpoints leave unpacked in practice: small ones, routers, the head, and what
DeepSeek's MTP module mixes its inputs by."""

NOT_NN_LINEAR = ("gate", "eh_proj")
"""Maps that are no linear layers in the code that checkpoints are packed with: a rule for all
linear layers does not mean them, and published checkpoints do not list them."""

EXPERT_PATH = ".experts."
"""In the names of experts. Tools that pack linear layers pass them by where all of a layer's are
one tensor, and do not list them either."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint, as its file's header has it. name: unstripped."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class CheckpointLinear:
    """Linear layer as a checkpoint stores it, [N, K] = [outputs, inputs].

    path: name less the architecture's prefix, e.g. layers.0.mlp.down_proj. names: the names with
    each possible prefix, which the lists in a checkpoint's settings refer to. tensors: the
    checkpoint's tensors by suffix ("qweight"), None without files (dummy weights). outputs: columns
    of this rank. whole_outputs: columns in the checkpoint (0: outputs). ranges: which of them the
    rank holds, () for all.
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

    @cached_property
    def lines(self) -> str:
        """Names of the layer, one per line."""
        return "\n".join(self.names)


@dataclass(frozen=True)
class Layout:
    """How a weight is packed on the device: a kind, and the options of its `empty`.

    apart: weights of other values of it share nothing, and are not fused. It is for what all rows
    of a packed weight have in common but may differ between the checkpoint's.
    """

    kind: type[QuantizedWeight]
    options: tuple[tuple[str, Any], ...] = ()
    apart: str = ""

    @classmethod
    def of(cls, kind: type[QuantizedWeight], **options: Any) -> "Layout":
        return cls(kind, tuple(sorted(options.items())))

    def __str__(self) -> str:
        """For people: IntWeight(bits=4, group=128)."""
        options = ", ".join(
            f"{name}={value}".replace("torch.", "")
            for name, value in self.options
            if value is not False
        )
        return f"{self.kind.__name__}({options})"

    def by_rows(self) -> "Layout":
        """The same with scales of their own for every output, which rows of any blocks can lie in;
        itself where no rows share any."""
        options = dict(self.options)
        if "block_n" in options:
            options["block_n"] = 1
        return replace(self, options=tuple(sorted(options.items())))

    def empty(self, n: int, k: int, device: str | torch.device) -> QuantizedWeight:
        """Room for a weight [n, k]."""
        return self.kind.empty(n, k, **dict(self.options), device=device)  # type: ignore[attr-defined]


class WeightFormat(ABC):
    """The weight format of a checkpoint, read from its settings. name: what numerics call it.

    unused: last parts of the names of tensors that it may have and that nothing here asks for.
    notes: what its settings ask for and is not done, a line each. other_kv: the setting by which
    its static scales of the KV cache are of another format than fp8; None: of fp8.
    plain_on_cpu: weights are plain on a CPU, filled with what the checkpoint's reader dequantizes.
    """

    name: str
    unused: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    other_kv: str | None = None
    plain_on_cpu: bool = False

    @abstractmethod
    def layout(self, module: CheckpointLinear) -> Layout | None:
        """How the module's weight lies on the device; None: as it is.

        Raises CheckpointError where settings and tensors contradict each other, or ask for what is
        not built.
        """

    @abstractmethod
    def sinks(self, module: CheckpointLinear, weight: QuantizedWeight) -> dict[str, WeightSink]:
        """Suffix of each of the module's tensors -> the slot that fills these rows with it."""


def is_usually_unquantized(module: CheckpointLinear) -> bool:
    """Return whether checkpoints usually keep this linear layer unquantized.

    It is so for UNQUANTIZED_NAMES and for the whole draft module.
    """
    return module.path.startswith("mtp.") or module.path.rpartition(".")[2] in UNQUANTIZED_NAMES


def contradiction_error(module: CheckpointLinear, said: str) -> CheckpointError:
    """Tensors and settings do not agree about a module. said: what the settings ask for."""
    tensors = (module.tensors or {}).values()
    found = [f"{info.name} ({info.dtype} {list(info.shape)})" for info in tensors]
    listed = ", ".join(sorted(found)[:8]) or "none"
    return CheckpointError(
        f"{module.path} has the tensors {listed[:600]}, but {said}. "
        "Mend the settings, or fetch the checkpoint again."
    )


def damaged_error(module: CheckpointLinear, suffix: str, said: str) -> CheckpointError:
    """A tensor of a module holds what it cannot."""
    return CheckpointError(f"{module.path}.{suffix} {said}. Fetch the checkpoint again.")
