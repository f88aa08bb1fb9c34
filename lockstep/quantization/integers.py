"""Common parts of GPTQ, AWQ and AutoRound: integers of 4 or 8 bits in groups.

The tensors of a checkpoint decide which modules are quantized. The settings' lists of modules must
agree, and decide alone without tensors (dummy weights).
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.kernels.formats.weights import IntWeight, QuantizedWeight, pack_codes, row_chunks
from lockstep.quantization.settings_reader import SettingsReader
from lockstep.quantization.weight_format import (
    CheckpointLinear,
    Layout,
    WeightFormat,
    contradiction_error,
    damaged_error,
)
from lockstep.quantization.weight_sink import WeightSink

BITS = (4, 8)
GROUPS = (-1, 32, 64, 128)
"""Supported numbers of columns that share a scale; -1: all columns."""
SIDECARS = frozenset({"qweight", "qzeros", "scales", "g_idx"})
"""Tensors of a quantized layer."""
SCALES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""Supported dtypes of scales, by their safetensors names."""
WORD = 32
"""Bits of a word of codes."""


@dataclass(frozen=True)
class Scheme:
    """Quantization scheme of a weight.

    group: columns that share a scale, -1 for all. symmetric: all zero points are 2^(bits - 1).
    act_order: columns were quantized in the order of their activations. static: groups were formed
    before that, so that each column keeps its group.
    """

    bits: int
    group: int
    symmetric: bool
    act_order: bool = False
    static: bool = False

    @property
    def in_order(self) -> bool:
        """Return whether column k belongs to group k // group; otherwise g_idx gives the groups."""
        return self.static or not self.act_order

    @property
    def name(self) -> str:
        """Return the name in numerics, such as int4-g128 or int8-channel."""
        return f"int{self.bits}-" + ("channel" if self.group == -1 else f"g{self.group}")

    def overridden(self, c: SettingsReader, group_name: str = "group_size") -> "Scheme":
        """Return the scheme with the settings of some modules applied."""
        return replace(
            self,
            bits=c.one_of("bits", *BITS, default=self.bits),
            group=c.one_of(group_name, *GROUPS, default=self.group),
            symmetric=c.get("sym", bool, self.symmetric),
            act_order=c.get("desc_act", bool, self.act_order),
            static=c.get("static_groups", bool, self.static),
        )


@dataclass(frozen=True)
class ModuleScheme:
    """Scheme of one module according to the settings, and whether it is quantized.

    setting: the setting that names the module, which its tensors must not contradict; "" if none
    does.
    """

    scheme: Scheme
    quantized: bool
    setting: str = ""


class IntWeightFormat(WeightFormat):
    """Integer weight format that IntWeight stores, in the checkpoint's column order.

    _schemes: cache of the settings' answer per module; each is needed more than once.
    """

    def __init__(self, name: str, scheme: Scheme) -> None:
        self.name = f"{name}-{scheme.name}"
        self.scheme = scheme
        self._schemes: dict[tuple[str, ...], ModuleScheme] = {}

    @abstractmethod
    def module_scheme(self, module: CheckpointLinear) -> ModuleScheme:
        """Return the scheme that the settings give the module."""

    def scheme_of(self, module: CheckpointLinear) -> Scheme | None:
        """Return the scheme of a quantized module; None for a plain one.

        Raises:
            CheckpointError: tensors and settings contradict each other.
        """
        answer = self._schemes.get(module.names)
        if answer is None:
            answer = self._schemes[module.names] = self.module_scheme(module)
        if module.tensors is None:
            return answer.scheme if answer.quantized else None
        sidecars = SIDECARS & module.tensors.keys()
        if sidecars and "weight" in module.tensors:
            raise contradiction_error(module, "a module has one or the other")
        if answer.setting and module.tensors and answer.quantized != bool(sidecars):
            word = "quantized" if answer.quantized else "not quantized"
            raise contradiction_error(
                module, f"config.json {answer.setting} says that it is {word}"
            )
        return answer.scheme if sidecars else None

    def layout(self, module: CheckpointLinear) -> Layout | None:
        scheme = self.scheme_of(module)
        if scheme is None:
            return None
        ordered = not scheme.in_order and 0 < scheme.group < module.inputs
        layout = Layout.of(
            IntWeight,
            bits=scheme.bits,
            group=scheme.group,
            scale_dtype=_scale_dtype(module),
            zeros=not scheme.symmetric,
            g_idx=ordered,
        )
        # All rows of a weight share one g_idx, so layers with different orders cannot be fused.
        return replace(layout, fusion_key=module.path) if ordered else layout

    def sinks(self, module: CheckpointLinear, weight: QuantizedWeight) -> dict[str, WeightSink]:
        scheme = self.scheme_of(module)
        assert isinstance(weight, IntWeight) and scheme is not None, "the layout said so"
        sinks = self.weight_sinks(module, weight, scheme)
        if "bias" in (module.tensors or ()):
            sinks["bias"] = _no_bias(module, weight)
        return sinks

    @abstractmethod
    def weight_sinks(
        self, module: CheckpointLinear, weight: IntWeight, scheme: Scheme
    ) -> dict[str, WeightSink]:
        """Return the sinks of the module's quantized weight."""


def _scale_dtype(module: CheckpointLinear) -> torch.dtype:
    """Return the dtype of the module's scales; float16 without files."""
    info = (module.tensors or {}).get("scales")
    if info is None:
        return torch.float16
    if info.dtype not in SCALES:
        allowed = ", ".join(SCALES)
        raise damaged_error(module, "scales", f"is {info.dtype}, allowed: {allowed}")
    return SCALES[info.dtype]


def unpack_words(words: Tensor, shifts: tuple[int, ...], bits: int, dim: int) -> Tensor:
    """Unpack int32 words [R, C] to uint8 codes along dim (0: [R * codes, C], 1: [R, C * codes])."""
    first_bits = torch.tensor(shifts, dtype=torch.int32, device=words.device)
    shift = first_bits[:, None] if dim == 0 else first_bits
    # int32 shifts are arithmetic: the mask also removes the sign bits that they bring in.
    return ((words.unsqueeze(dim + 1) >> shift) & (2**bits - 1)).byte().flatten(dim, dim + 1)


def ascending(bits: int) -> tuple[int, ...]:
    """Return the first bit of each code of a word, lowest first."""
    return tuple(range(0, WORD, bits))


def fill_words(weight: IntWeight, unit: int, codes: Callable[[int, int], Tensor]) -> None:
    """Fill the codes of a weight. codes(begin, end) returns rows as uint8 [end - begin, K]."""
    (n, k) = weight.shape
    # By chunks: the codes of a fused expert weight as bytes would take twice its memory.
    for begin, end in row_chunks(n, k, unit):
        weight.words[begin:end].copy_(pack_codes(codes(begin, end).contiguous(), weight.bits))


def fill_scales(module: CheckpointLinear, weight: IntWeight, scales: Tensor) -> None:
    """Fill the scales from finite scales [G, N]."""
    if not bool(torch.isfinite(scales).all()):
        raise damaged_error(module, "scales", "has infinities or NaN")
    weight.scales.copy_(scales.t())


def fill_zeros(module: CheckpointLinear, weight: IntWeight, zeros: Tensor) -> None:
    """Fill the zero points from uint8 [G, N]; those of a symmetric weight must be the middle."""
    if weight.zeros is not None:
        weight.zeros.copy_(zeros.t())
        return
    # A symmetric weight has no stored zero points: kernels subtract the middle.
    middle = 2 ** (weight.bits - 1)
    if not bool((zeros == middle).all()):
        problem = f"has zero points other than {middle}, but config.json says that it is symmetric"
        raise damaged_error(module, "qzeros", problem)


def _no_bias(module: CheckpointLinear, weight: IntWeight) -> WeightSink:
    """Return a sink that accepts only zeros: older tools write biases that no model has."""

    def check(bias: Tensor) -> None:
        if bool(bias.any()):
            raise damaged_error(module, "bias", "is not zero, but the model has no bias here")

    return WeightSink((module.whole_outputs,), tuple(SCALES.values()), weight.device, check)
