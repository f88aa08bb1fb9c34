"""ModelOpt (NVIDIA): e4m3fn weights, NVFP4, and checkpoints with some of each.

FP8: W = fp32(code) * weight_scale. NVFP4: W = (e2m1(code) * fp32(weight_scale)) * weight_scale_2.
Settings are in config.json (quant_method modelopt, modelopt_fp4 or modelopt_mixed) or in
hf_quant_config.json. Only weights are quantized: activations are never rounded, so `input_scale` is
not used. The KV cache has the format that the user chose; fp8 takes `k_scale` and
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
    non_fp8_kv_setting,
    resolve_storage,
)
from lockstep.quantization.weight_format import CheckpointLinear

MIXED = "MIXED_PRECISION"
_NVFP4 = Fp4Storage("weight", "weight_scale_2", divides=False)
STORAGES: Mapping[str, Storage] = {
    "FP8": Fp8Storage("weight_scale", ("tensor",)),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Storage("weight_scale", ("channel",)),
    "FP8_PB_WO": Fp8Storage("weight_scale", ("block",), also="weight_scale_inv"),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
}
"""Storage of each quant_algo."""
WILD = "*?["
"""Characters of wildcards."""
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
    # null is not the same as absent: the tool writes it where it only quantized the KV cache.
    only_keys = merged.get("quant_algo", "") is None
    return read_strictly(merged, "modelopt", partial(ModelOpt, only_keys=only_keys))


class ModelOpt(StoredWeightFormat):
    """ModelOpt weight format, named "modelopt-NVFP4" and so on by quant_algo.

    only_keys: quant_algo is null, so that only the KV cache was quantized.
    """

    unused = frozenset({"input_scale", "k_scale", "v_scale", "q_scale", "output_scale"})

    def __init__(self, settings: SettingsReader, only_keys: bool) -> None:
        allowed = (*STORAGES, MIXED, *([None] if only_keys else []))
        self.algorithm = in_capitals(settings).only("quant_algo", *allowed)
        self.name = "modelopt" if self.algorithm is None else f"modelopt-{self.algorithm}"
        self.left_out = {entry: name for name in LISTS for entry in settings.names(name)}
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
                algorithm(layer)
        else:
            settings.ignore("quantized_layers")  # only a mixed checkpoint has formats by layer
            if self.algorithm is not None:
                algorithm(settings)
        self.named = Entries(self.layers)
        self.excluded = Entries(self.left_out)
        # The tool repeats in config_groups what quant_algo says of the weights.
        settings.ignore("config_groups")
        self.notes = tuple(notes(settings))
        self.other_kv = non_fp8_kv_setting(settings)

    def storage(self, module: CheckpointLinear) -> Storage | None:
        name = self.named.find(module)
        if name is not None:
            layer = self.layers[name]
            kind = algorithm(layer)
            return resolve_storage(module, STORAGES[kind], f"{layer.within}quant_algo={kind!r}")
        entry = self.excluded.find(module)
        if entry is not None:
            setting = f"{SETTINGS_PREFIX}{self.left_out[entry]} ({entry!r})"
            return resolve_storage(module, None, setting)
        if self.algorithm == MIXED:
            setting = f"{SETTINGS_PREFIX}quantized_layers, which does not name it,"
            return resolve_storage(module, None, setting)
        setting = f"{SETTINGS_PREFIX}quant_algo={self.algorithm!r}"
        if self.algorithm is None:
            return resolve_storage(module, None, setting)
        setting += ", with no list to except it,"
        return resolve_storage(module, STORAGES[self.algorithm], setting, of_all=True)


def in_capitals(settings: SettingsReader) -> SettingsReader:
    """Return the settings with quant_algo in capitals; the tool itself writes fp8_pb_wo."""
    kind = settings.raw.get("quant_algo")
    return settings.replaced("quant_algo", kind.upper()) if isinstance(kind, str) else settings


def algorithm(settings: SettingsReader) -> str:
    """Return quant_algo of one module or of all.

    Raises:
        CheckpointError: it is not supported.
    """
    kind: str = in_capitals(settings).only("quant_algo", *STORAGES)
    if isinstance(STORAGES[kind], Fp4Storage):
        settings.only("group_size", FP4_GROUP, default=FP4_GROUP)
    settings.ignore("group_size")  # FP8 formats have none, whatever the tool wrote
    return kind


class Entries:
    """List of modules whose names may have wildcards; submodules are covered too.

    plain: exact names. begins: prefix -> entry, for entries with one star at the end. wild: other
    entries with compiled patterns. There may be an entry per layer and tens of thousands of experts
    to match.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        known = tuple(entries)
        self.plain = frozenset(entry for entry in known if not any(c in entry for c in WILD))
        ends = [entry for entry in known if entry.endswith("*")]
        self.begins = {x[:-1]: x for x in ends if not any(c in x[:-1] for c in WILD)}
        self.prefixes = tuple(self.begins)
        self.wild = {
            entry: re.compile(f"{translate(entry)}|{translate(entry + '.*')}")
            for entry in known
            if entry not in self.plain and entry not in self.begins.values()
        }

    def find(self, module: CheckpointLinear) -> str | None:
        """Return the entry that covers the module, or None."""
        # Sets and prefixes before regular expressions: there may be thousands of experts.
        for name in module.names:
            for part in enclosing_modules(name):
                if part in self.plain:
                    return part
            if name.startswith(self.prefixes):
                return next(entry for x, entry in self.begins.items() if name.startswith(x))
        for entry, pattern in self.wild.items():
            if any(pattern.match(name) for name in module.names):
                return entry
        return None


def notes(settings: SettingsReader) -> list[str]:
    """Return notes on the settings that are not followed."""
    messages = ["activations are not rounded, whatever quant_algo says of them"]
    for name in (KV_ALGORITHM, KV_SCHEME):
        if settings.has(name):
            messages.append(f"{SETTINGS_PREFIX}{name} is not followed: {SCALES_OF_KV}")
    return messages
