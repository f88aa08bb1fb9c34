"""compressed-tensors (llm-compressor): integers, e4m3fn or NVFP4, by groups of modules.

    pack-quantized          weight_packed: 4 or 8 bits in words; W = (q - zero point) * scale
    int-quantized           weight: int8
    float-quantized         weight: e4m3fn; W = fp32(code) * scale
    naive-quantized         either of these two
    nvfp4-pack-quantized    W = (e2m1(code) * fp32(weight_scale)) * (1 / weight_global_scale)
    dense                   no weights: scales of keys and values alone

Activations are rounded only where the user chose it, with dynamic scales, so `input_activations`
and the scales that belong to them are not used. The KV cache has the format that the user chose,
whatever `kv_cache_scheme` says; fp8 takes `k_scale` and `v_scale` (lockstep.layers.kv_format).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.quantization.settings_reader import (
    EDIT_REMEDY,
    SETTINGS_PREFIX,
    SUPPORTED_REMEDY,
    NamePattern,
    SettingsReader,
    read_strictly,
)
from lockstep.quantization.storage import (
    FP4_GROUP,
    FP8_BLOCK,
    KV_SCHEME,
    SCALES_OF_KV,
    Fp4Storage,
    Fp8Storage,
    IntStorage,
    Storage,
    StoredWeightFormat,
    non_fp8_kv_setting,
    resolve_storage,
)
from lockstep.quantization.weight_format import CheckpointLinear

CLASS = "Linear"
"""Class of every linear layer in targets."""
CLASS_RANK = 2
"""Rank of a target that is a class: the least specific one."""
PATTERN = "re:"
"""Prefix of a target that is a regular expression, matched from the name's start."""
MIXED = "mixed-precision"
DENSE = "dense"
MAX_GROUP_SIZE = 1 << 20
"""Maximum columns that share a scale."""


def read(settings: Mapping[str, Any]) -> "CompressedTensors":
    """Return the weight format of a checkpoint's settings.

    Raises:
        CheckpointError: a setting is not supported.
    """
    return read_strictly(settings, "compressed-tensors", CompressedTensors)


@dataclass(frozen=True)
class Targets:
    """Targets that a setting lists: module names, regular expressions, or a class of layers.

    The most specific target that matches a module decides, and of regular expressions the first in
    alphabetical order, as in the library.

    names: exact names. patterns: (text, compiled). all: whether the class of linear layers is
    listed.
    """

    names: frozenset[str]
    patterns: tuple[tuple[str, NamePattern], ...]
    all: bool

    @classmethod
    def read(cls, settings: SettingsReader, name: str) -> "Targets":
        """Read a setting that lists targets.

        Raises:
            CheckpointError: it is no list of names.
        """
        texts: list[str] = settings.get(name, list, [])
        if not all(isinstance(text, str) for text in texts):
            raise settings.error(name, texts, "a list of names", EDIT_REMEDY)
        spelled = sorted({text for text in texts if text.startswith(PATTERN)})
        patterns = ((x, settings.pattern(name, x.removeprefix(PATTERN))) for x in spelled)
        names = frozenset(texts) - {CLASS, *spelled}
        return cls(names, tuple(patterns), CLASS in texts)

    def find(self, module: CheckpointLinear) -> tuple[int, str] | None:
        """Return (rank, text) of the most specific target that matches the module; None without
        one.
        """
        named = [name for name in module.names if name in self.names]
        if named:
            return 0, min(named)
        for text, pattern in self.patterns:
            if pattern.match(module):
                return 1, text
        return (CLASS_RANK, CLASS) if self.all else None


@dataclass(frozen=True)
class Group:
    """Entry of config_groups: the modules that it quantizes, and their storage."""

    name: str
    targets: Targets
    storage: Storage


class CompressedTensors(StoredWeightFormat):
    """compressed-tensors weight format, named "compressed-tensors-pack-quantized" and so on."""

    unused = frozenset(
        {
            "input_scale",
            "input_zero_point",
            "input_global_scale",
            "output_scale",
            "output_zero_point",
            "k_scale",
            "v_scale",
            "q_scale",
            "k_zero_point",
            "v_zero_point",
            "q_zero_point",
            "k_global_scale",
            "v_global_scale",
            "q_global_scale",
        }
    )

    def __init__(self, settings: SettingsReader) -> None:
        self.format = settings.one_of("format", *FORMATS, MIXED, DENSE)
        self.name = f"compressed-tensors-{self.format}"
        transforms = settings.get("transform_config", dict, {})
        if transforms:
            raise settings.error("transform_config", transforms, "none", SUPPORTED_REMEDY)
        settings.part("sparsity_config").one_of("format", "dense", default="dense")
        self.left_out = Targets.read(settings, "ignore")
        parts = settings.parts("config_groups")
        if not parts and not settings.has(KV_SCHEME):
            expected = "an object of groups of modules"
            raise settings.error(
                "config_groups", settings.raw.get("config_groups"), expected, EDIT_REMEDY
            )
        groups = [group(name, part, self.format) for name, part in parts.items()]
        self.groups = [group for group in groups if group is not None]
        self.activation_notes = tuple(activation_notes(parts))
        self.other_notes = tuple(kv_notes(settings))
        self.static = static_activations(parts, self.groups)
        self.other_kv = non_fp8_kv_setting(settings)

    def activation_refusal(self) -> str | None:
        if not any(isinstance(group.storage, Fp8Storage) for group in self.groups):
            return super().activation_refusal()
        return self.static

    def storage(self, module: CheckpointLinear) -> Storage | None:
        entry = self.left_out.find(module)
        if entry is not None:
            return resolve_storage(module, None, f"{SETTINGS_PREFIX}ignore ({entry[1]!r})")
        matches = [(group.targets.find(module), -index) for index, group in enumerate(self.groups)]
        ranked = [(target, index) for target, index in matches if target is not None]
        groups = f"{SETTINGS_PREFIX}config_groups"
        if not ranked:
            return resolve_storage(module, None, f"{groups}, of which no target names it,")
        # The most specific target decides; if several groups have it, the last group.
        ((rank, _), index) = min(ranked)
        chosen = self.groups[-index]
        setting = f"{groups}[{chosen.name!r}]"
        return resolve_storage(module, chosen.storage, setting, covers_all=rank == CLASS_RANK)


def group(name: str, settings: SettingsReader, default: str) -> Group | None:
    """Return the group of these settings; None if it quantizes no weights."""
    # Both count as read in a group of activations too, which quantizes no weight.
    named = Targets.read(settings, "targets")
    weights = settings.part("weights")
    if not settings.has("weights"):
        return None
    kind = settings.one_of("format", *FORMATS, MIXED, default=default)
    if kind == MIXED:
        kind = infer_format(weights)
    weights.one_of("dynamic", False, default=False)
    return Group(name, named, FORMATS[kind](weights))


def infer_format(weights: SettingsReader) -> str:
    """Return the format of a group without one, in a checkpoint of several formats."""
    kind = weights.one_of("type", "int", "float", default="int")
    if kind == "int":
        return "pack-quantized"
    return "float-quantized" if weights.one_of("num_bits", 4, 8) == 8 else "nvfp4-pack-quantized"


def strategy(weights: SettingsReader, *allowed: str) -> str:
    """Return the unit that shares a scale; without a strategy group_size decides, as in the
    library.
    """
    if not weights.has("strategy"):
        size = weights.raw.get("group_size")
        unit = "tensor" if size is None else "channel" if size == -1 else "group"
        if unit not in allowed:
            raise weights.error("strategy", unit, ", ".join(map(repr, allowed)), SUPPORTED_REMEDY)
        return unit
    return weights.one_of("strategy", *allowed)


def integers(weights: SettingsReader, in_words: bool) -> Storage:
    """Return the storage of integers, in words or int8."""
    weights.one_of("type", "int", default="int")
    bits = weights.one_of("num_bits", *((4, 8) if in_words else (8,)), default=8)
    known = ("channel", "group") if in_words else ("tensor", "channel", "group")
    grain = strategy(weights, *known)
    size = {"tensor": 0, "channel": -1}.get(grain)
    if size is None:
        size = weights.get("group_size", int, 0)
        if not 1 <= size <= MAX_GROUP_SIZE:
            raise weights.error("group_size", size, f"1 to {MAX_GROUP_SIZE}", EDIT_REMEDY)
    symmetric = weights.one_of("symmetric", True, False, default=True)
    allowed = (None, True, False, "group", "weight", "static", "dynamic")
    ordered = weights.one_of("actorder", *allowed) in (True, "group", "dynamic")
    return IntStorage(bits, size, in_words, symmetric, ordered and grain == "group")


def floats(weights: SettingsReader) -> Storage:
    """Return the storage of e4m3fn codes."""
    weights.one_of("type", "float")
    weights.one_of("num_bits", 8, default=8)
    weights.one_of("symmetric", True, default=True)
    grain = strategy(weights, "tensor", "channel", "block")
    if grain == "block":
        weights.one_of("block_structure", [FP8_BLOCK, FP8_BLOCK])
    return Fp8Storage("weight_scale", (grain,))


def naive(weights: SettingsReader) -> Storage:
    """Return the storage of 8-bit integers or floats."""
    kind = weights.one_of("type", "int", "float", default="int")
    return floats(weights) if kind == "float" else integers(weights, in_words=False)


def nvfp4(weights: SettingsReader) -> Storage:
    """Return the storage of e2m1 codes."""
    weights.one_of("type", "float")
    weights.one_of("num_bits", 4)
    weights.one_of("symmetric", True, default=True)
    weights.one_of("group_size", FP4_GROUP)
    strategy(weights, "tensor_group", "group")
    return Fp4Storage("weight_packed", "weight_global_scale", divides=True)


FORMATS: Mapping[str, Callable[[SettingsReader], Storage]] = {
    "pack-quantized": lambda weights: integers(weights, in_words=True),
    "int-quantized": lambda weights: integers(weights, in_words=False),
    "naive-quantized": naive,
    "float-quantized": floats,
    "nvfp4-pack-quantized": nvfp4,
}
"""Storage of a group's weights by format. mxfp4 and mxfp8 are not supported."""


def activation_notes(groups: Mapping[str, SettingsReader]) -> list[str]:
    """Return notes on the settings of activations, which are not followed."""
    return [
        f"{part.within}{name} is not used: activations are not rounded"
        for part in groups.values()
        for name in ("input_activations", "output_activations")
        if part.has(name)
    ]


def kv_notes(settings: SettingsReader) -> list[str]:
    """Return notes on the settings of the KV cache, which are not followed."""
    if not settings.has(KV_SCHEME):
        return []
    return [f"{SETTINGS_PREFIX}{KV_SCHEME} is not followed: {SCALES_OF_KV}"]


def static_activations(parts: Mapping[str, SettingsReader], groups: Sequence[Group]) -> str | None:
    """Return the setting that gives activations of e4m3 weights static scales; None without one."""
    for group in groups:
        if isinstance(group.storage, Fp8Storage):
            activations = parts[group.name].raw.get("input_activations")
            # Without the setting they are static, as in the library.
            if isinstance(activations, dict) and not activations.get("dynamic", False):
                return f"{parts[group.name].within}input_activations, whose scales are static"
    return None
