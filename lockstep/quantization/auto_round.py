"""AutoRound (Cheng et al., 2023): integers of 4 or 8 bits, stored in GPTQ's or AWQ's tensors.

    packing_format            tensors
    auto_round:auto_gptq      GPTQ version 1 (zero - 1), mostly without g_idx
    auto_round:gptqmodel      GPTQ version 2 (the zero itself)
    auto_round                GPTQ's shapes, the zero itself
    auto_round:auto_awq       AWQ

Versions before 0.5 call the setting `backend`, and may append a kernel's name, as in
auto_round:gptq:exllamav2. The kernel's name does not change the tensors.

Entries of extra_config, which name a module or a pattern of names, override the other settings; a
module with 16 bits or more is not quantized. Tensors that the exporter could not attach to its
model are in a separate file, model_extra_tensors.safetensors, which is read like any other.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lockstep.kernels.formats.weights import IntWeight
from lockstep.quantization.awq import AWQ_BITS, awq_sinks
from lockstep.quantization.gptq import gptq_sinks
from lockstep.quantization.integers import BITS, GROUPS, IntWeightFormat, ModuleScheme, Scheme
from lockstep.quantization.settings_reader import (
    SETTINGS_PREFIX,
    SUPPORTED_REMEDY,
    NamePattern,
    SettingsReader,
    read_strictly,
)
from lockstep.quantization.weight_format import (
    CheckpointLinear,
    WeightFormat,
    is_usually_unquantized,
)
from lockstep.quantization.weight_sink import WeightSink

PLAIN_BITS = 16
"""Minimum bits of a module that is not quantized."""
STORED_LESS = {
    "auto_round:auto_gptq": 1,
    "auto_round:gptq": 1,
    "auto_gptq": 1,
    "gptq": 1,
    "auto": 1,
    "auto_round:gptqmodel": 0,
    "auto_round": 0,
}
"""packing_format with GPTQ's tensors -> offset subtracted from stored zero points."""
AS_AWQ = ("auto_round:auto_awq", "auto_round:awq", "auto_awq", "awq")
"""packing_formats with AWQ's tensors."""
KERNELS = frozenset({"exllamav2", "triton", "tritonv2"})
"""Kernel names that may follow a packing_format."""
ROTATIONS = ("rotation_config", "rotation_configs")
"""Settings of transforms in front of a weight, which are not supported."""
SPECIAL = frozenset("*+?^$()[]{}|\\")
"""Characters that make a name of extra_config a pattern."""


class AutoRound(IntWeightFormat):
    """AutoRound weight format.

    extra: scheme by a module's exact name, None for a plain module. patterns: the same by a pattern
    of names. blocks: prefixes of the names of quantized modules, empty for all.
    """

    def __init__(self, c: SettingsReader) -> None:
        scheme = Scheme(
            bits=c.one_of("bits", *BITS),
            group=c.one_of("group_size", *GROUPS, default=128),
            symmetric=c.get("sym", bool, True),
        )
        super().__init__("auto-round", scheme)
        c.one_of("data_type", "int", default="int")
        _check_plain(c)
        self.packing_format = _packing_format(c)
        self._check_bits(c, scheme)
        act_bits = c.get("act_bits", int, PLAIN_BITS)
        if act_bits < PLAIN_BITS:
            note = (
                f"{SETTINGS_PREFIX}act_bits={act_bits} is not followed: activations are not rounded"
            )
            self.activation_notes = (note,)
        self.blocks = c.names("block_name_to_quantize") or c.names("to_quant_block_names")
        self.extra: dict[str, Scheme | None] = {}
        self.patterns: list[tuple[str, NamePattern, Scheme | None]] = []
        for name, options in c.parts("extra_config").items():
            entry = self._scheme(options)
            if SPECIAL.isdisjoint(name):
                self.extra[name] = entry
            else:
                self.patterns.append((name, c.pattern("extra_config", name), entry))

    def _scheme(self, c: SettingsReader) -> Scheme | None:
        """Return the scheme of an entry of extra_config, with the checkpoint's as defaults."""
        _check_plain(c)
        bits = c.get("bits", int, self.scheme.bits)
        if bits >= PLAIN_BITS:
            c.ignore("data_type", "group_size", "sym", "packing_format")
            return None
        if c.one_of("data_type", "int", "fp", "float", default="int") != "int":
            c.ignore("group_size", "sym", "packing_format")
            return None
        # overridden() reads desc_act too, but AutoRound does not reorder columns.
        scheme = replace(self.scheme.overridden(c), act_order=False)
        self._check_bits(c, scheme)
        return scheme

    def _check_bits(self, c: SettingsReader, scheme: Scheme) -> None:
        if self.packing_format in AS_AWQ and scheme.bits != AWQ_BITS:
            raise c.error(
                "bits", scheme.bits, f"{AWQ_BITS} with {self.packing_format}", SUPPORTED_REMEDY
            )

    def module_scheme(self, module: CheckpointLinear) -> ModuleScheme:
        # Exact names override patterns.
        for name in module.names:
            if name in self.extra:
                return self._entry_scheme(name, self.extra[name], exact=True)
        inside = not is_usually_unquantized(module)
        setting = ""
        if self.blocks:
            inside = any(name.startswith(self.blocks) for name in module.names)
            setting = "" if inside else f"{SETTINGS_PREFIX}block_name_to_quantize"
        for text, pattern, scheme in self.patterns:
            if pattern.search(module):
                return self._entry_scheme(text, scheme, exact=False)
        return ModuleScheme(self.scheme, inside, setting)

    def _entry_scheme(self, name: str, scheme: Scheme | None, *, exact: bool) -> ModuleScheme:
        """Return what an entry of extra_config says about a module.

        A pattern with a scheme may also match modules that are not quantized.
        """
        setting = f"{SETTINGS_PREFIX}extra_config[{name[:100]!r}]"
        if scheme is None:
            return ModuleScheme(self.scheme, False, setting)
        return ModuleScheme(scheme, True, setting if exact else "")

    def weight_sinks(
        self, module: CheckpointLinear, weight: IntWeight, scheme: Scheme
    ) -> dict[str, WeightSink]:
        if self.packing_format in AS_AWQ:
            return awq_sinks(module, weight)
        return gptq_sinks(module, weight, scheme, STORED_LESS[self.packing_format])


def read(settings: Mapping[str, Any]) -> WeightFormat:
    """Return the weight format of a checkpoint's settings.

    Raises:
        CheckpointError: a setting is not supported.
    """
    return read_strictly(settings, "auto-round", AutoRound)


def _check_plain(c: SettingsReader) -> None:
    """Raise CheckpointError if a weight consists of more than integers, scales and zero points."""
    c.one_of("super_bits", None)
    for name in ROTATIONS:
        c.one_of(name, None, [], {})


def _packing_format(c: SettingsReader) -> str:
    """Return the packing_format without a kernel name."""
    name = c.present_name("packing_format", "backend")
    written = c.get(name, str, "auto_round:auto_gptq")
    packing_format = ":".join(part for part in written.split(":") if part not in KERNELS)
    known = (*STORED_LESS, *AS_AWQ)
    if packing_format not in known:
        raise c.error(name, written, ", ".join(map(repr, known)), SUPPORTED_REMEDY)
    return packing_format
