"""ModelOpt (NVIDIA): e4m3fn weights, NVFP4, and checkpoints with some of each.

FP8: W = fp32(code) * weight_scale. NVFP4: W = (e2m1(code) * fp32(weight_scale)) * weight_scale_2.
Settings are in config.json (quant_method modelopt, modelopt_fp4 or modelopt_mixed) or in
hf_quant_config.json. Activations are rounded only where the user chose it, with dynamic scales, so
`input_scale` is not used. The KV cache has the format that the user chose; fp8 takes `k_scale` and
`v_scale` (lockstep.layers.kv_format).
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import translate
from functools import partial
from typing import Any

from lockstep.quantization.settings_reader import (
    EDIT_REMEDY,
    SETTINGS_PREFIX,
    SettingsReader,
    read_strictly,
)
from lockstep.quantization.storage import (
    FP4_GROUP,
    KV_ALGORITHM,
    KV_SCHEME,
    SCALES_OF_KV,
    Fp4Storage,
    Fp8Storage,
    Storage,
    StoredWeightFormat,
    enclosing_modules,
    is_stored_quantized,
    non_fp8_kv_setting,
    resolve_storage,
)
from lockstep.quantization.weight_format import CheckpointLinear

MIXED = "MIXED_PRECISION"
STATIC = "FP8"
"""quant_algo with static scales of activations."""
ACTIVATION_NOTE = "activations are not rounded, whatever quant_algo says of them"
_NVFP4 = Fp4Storage("weight", "weight_scale_2", divides=False)
STORAGES: Mapping[str, Storage] = {
    STATIC: Fp8Storage("weight_scale", ("tensor",)),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Storage("weight_scale", ("channel",)),
    "FP8_PB_WO": Fp8Storage("weight_scale", ("block",), other_scale="weight_scale_inv"),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
}
"""Storage of each quant_algo."""
HEAD = "lm_head"
WILDCARDS = "*?["
"""Characters that make an entry a wildcard pattern."""
LISTS = ("exclude_modules", "ignore")
"""Settings that list unquantized modules."""


def read(settings: Mapping[str, Any]) -> "ModelOpt":
    """Return the weight format of settings, some of which may be within `quantization`.

    Raises:
        CheckpointError: a setting is not supported.
    """
    inner = settings.get("quantization")
    merged = settings
    if isinstance(inner, dict):
        merged = inner | {name: value for name, value in settings.items() if value is not None}
    # null is not the same as absent: the tool writes null if it quantized the KV cache alone.
    only_kv = merged.get("quant_algo", "") is None
    return read_strictly(merged, "modelopt", partial(ModelOpt, only_kv=only_kv))


class ModelOpt(StoredWeightFormat):
    """ModelOpt weight format, named "modelopt-NVFP4" and so on by quant_algo.

    only_kv: quant_algo is null, since only the KV cache was quantized. quantized: modules with a
    format of their own in a mixed checkpoint. excluded: unquantized modules; setting_by_entry: the
    setting that lists each of them.
    """

    unused = frozenset({"input_scale", "k_scale", "v_scale", "q_scale", "output_scale"})

    def __init__(self, settings: SettingsReader, only_kv: bool) -> None:
        allowed = (*STORAGES, MIXED, *([None] if only_kv else []))
        self.algorithm = upper_case_algorithm(settings).one_of("quant_algo", *allowed)
        self.name = "modelopt" if self.algorithm is None else f"modelopt-{self.algorithm}"
        self.setting_by_entry = {entry: name for name in LISTS for entry in settings.names(name)}
        self.layers: dict[str, SettingsReader] = {}
        if self.algorithm == MIXED:
            self.layers = settings.parts("quantized_layers")
            if not self.layers:
                name = "quantized_layers"
                value = settings.raw.get(name)
                raise settings.error(
                    name, value, "an object of modules and their formats", EDIT_REMEDY
                )
            for layer in self.layers.values():
                read_algorithm(layer)
        else:
            settings.ignore("quantized_layers")  # only a mixed checkpoint has formats by layer
            if self.algorithm is not None:
                read_algorithm(settings)
        self.quantized = ModuleList(self.layers)
        self.excluded = ModuleList(self.setting_by_entry)
        # The tool repeats in config_groups what quant_algo says of the weights.
        settings.ignore("config_groups")
        self.activation_notes = (ACTIVATION_NOTE,)
        self.other_notes = tuple(kv_notes(settings))
        self.other_kv = non_fp8_kv_setting(settings)

    def activation_refusal(self) -> str | None:
        kinds = {read_algorithm(layer) for layer in self.layers.values()}
        if self.algorithm in STORAGES:
            kinds.add(self.algorithm)
        if STATIC in kinds:
            return f"quant_algo={STATIC!r}, whose scales of activations are static"
        if any(isinstance(STORAGES[kind], Fp8Storage) for kind in kinds):
            return None
        return super().activation_refusal()

    def storage(self, module: CheckpointLinear) -> Storage | None:
        name = self.quantized.find(module)
        if name is not None:
            layer = self.layers[name]
            kind = read_algorithm(layer)
            return resolve_storage(module, STORAGES[kind], f"{layer.within}quant_algo={kind!r}")
        entry = self.excluded.find(module)
        # The tool lists the head as excluded even where it has quantized it.
        is_listed_head = module.path == HEAD and is_stored_quantized(module)
        if entry is not None and not is_listed_head:
            setting = f"{SETTINGS_PREFIX}{self.setting_by_entry[entry]} ({entry!r})"
            return resolve_storage(module, None, setting)
        if self.algorithm == MIXED:
            setting = f"{SETTINGS_PREFIX}quantized_layers, which does not name it,"
            return resolve_storage(module, None, setting)
        setting = f"{SETTINGS_PREFIX}quant_algo={self.algorithm!r}"
        if self.algorithm is None:
            return resolve_storage(module, None, setting)
        setting += ", with no list to except it,"
        return resolve_storage(module, STORAGES[self.algorithm], setting, covers_all=True)


def upper_case_algorithm(settings: SettingsReader) -> SettingsReader:
    """Return the settings with quant_algo in capitals; the tool itself writes fp8_pb_wo."""
    name = settings.raw.get("quant_algo")
    return settings.replaced("quant_algo", name.upper()) if isinstance(name, str) else settings


def read_algorithm(settings: SettingsReader) -> str:
    """Return quant_algo of one module or of all.

    Raises:
        CheckpointError: it is not supported.
    """
    kind: str = upper_case_algorithm(settings).one_of("quant_algo", *STORAGES)
    if isinstance(STORAGES[kind], Fp4Storage):
        settings.one_of("group_size", FP4_GROUP, default=FP4_GROUP)
    settings.ignore("group_size")  # FP8 formats have none, whatever the tool wrote
    return kind


class ModuleList:
    """List of modules whose names may have wildcards; an entry covers submodules too.

    names: exact names. entry_by_prefix: prefix -> entry, for entries with one star at the end.
    patterns: compiled patterns of the other entries. A checkpoint may have an entry per layer and
    tens of thousands of experts to match, so names and prefixes are tried first.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        known = tuple(entries)
        self.names = frozenset(entry for entry in known if not any(c in entry for c in WILDCARDS))
        ends = [entry for entry in known if entry.endswith("*")]
        self.entry_by_prefix = {x[:-1]: x for x in ends if not any(c in x[:-1] for c in WILDCARDS)}
        self.prefixes = tuple(self.entry_by_prefix)
        self.patterns = {
            entry: re.compile(f"{translate(entry)}|{translate(entry + '.*')}")
            for entry in known
            if entry not in self.names and entry not in self.entry_by_prefix.values()
        }

    def find(self, module: CheckpointLinear) -> str | None:
        """Return the entry that covers the module, or None."""
        # Sets and prefixes before regular expressions: there may be thousands of experts.
        for name in module.names:
            for part in enclosing_modules(name):
                if part in self.names:
                    return part
            if name.startswith(self.prefixes):
                return next(
                    entry for x, entry in self.entry_by_prefix.items() if name.startswith(x)
                )
        for entry, pattern in self.patterns.items():
            if any(pattern.match(name) for name in module.names):
                return entry
        return None


def kv_notes(settings: SettingsReader) -> list[str]:
    """Return notes, for the user, on the settings of the KV cache, which are not followed."""
    return [
        f"{SETTINGS_PREFIX}{name} is not followed: {SCALES_OF_KV}"
        for name in (KV_ALGORITHM, KV_SCHEME)
        if settings.has(name)
    ]
