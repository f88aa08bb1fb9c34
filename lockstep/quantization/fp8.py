"""fp8: e4m3fn weights with one scale per block of 128 x 128, per output, or per tensor.

The format of DeepSeek-V3's and Qwen's FP8 checkpoints. W = fp32(code) * scale; scales of blocks are
called `weight_scale_inv`, but multiply all the same. Activations are rounded only where the user
chose it, with dynamic scales, so `activation_scheme` and `input_scale` are not used.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.quantization.settings_reader import SETTINGS_PREFIX, SettingsReader, read_strictly
from lockstep.quantization.storage import (
    FP8_BLOCK,
    Fp8Storage,
    Storage,
    StoredWeightFormat,
    enclosing_modules,
    resolve_storage,
)
from lockstep.quantization.weight_format import CheckpointLinear

LISTS = ("modules_to_not_convert", "ignored_layers")
"""Settings that list unquantized modules.

An entry is an exact name, an enclosing module, the end of a name, or a regular expression that
transformers matches from the start of a name up to a dot.
"""
SPECIAL = frozenset("*+?^$()[]{}|\\")
"""Characters that make an entry a regular expression."""
UP_TO_A_DOT = r"(?:(?<=\.)|(?=\.|$))"
"""End of a match, at a dot or the end of a name: "layers.1" must not match layers.10."""


def read(settings: Mapping[str, Any]) -> "Fp8":
    """Return the weight format of a checkpoint's settings.

    Raises:
        CheckpointError: a setting is not supported.
    """
    return read_strictly(settings, "fp8", Fp8)


class Fp8(StoredWeightFormat):
    """fp8 weight format. name: "fp8-128x128" for blocks, else "fp8"."""

    unused = frozenset(
        {"input_scale", "activation_scale", "output_scale", "k_scale", "v_scale", "q_scale",
         "kv_scale"}
    )  # fmt: skip

    def __init__(self, settings: SettingsReader) -> None:
        settings.one_of("fmt", "e4m3", default="e4m3")
        settings.one_of("scale_fmt", None, "float", "ue8m0")
        self.scheme = settings.one_of("activation_scheme", "dynamic", "static", default="dynamic")
        block = settings.one_of("weight_block_size", None, [FP8_BLOCK, FP8_BLOCK])
        self.settings = settings
        listed = {entry: name for name in LISTS for entry in settings.names(name)}
        self.left_out = {x: name for x, name in listed.items() if SPECIAL.isdisjoint(x)}
        self.patterns = [
            (x, name, settings.pattern(name, f"(?:{x.removeprefix('re:')}){UP_TO_A_DOT}"))
            for x, name in listed.items()
            if x not in self.left_out
        ]
        self.name = "fp8" if block is None else "fp8-128x128"
        self.storage_of_all = (
            Fp8Storage("weight_scale", ("tensor", "channel"))
            if block is None
            else Fp8Storage("weight_scale_inv", ("block",))
        )
        self.activation_notes = (
            f"{SETTINGS_PREFIX}activation_scheme={self.scheme!r} is not followed: "
            "activations are not rounded",
        )

    def activation_refusal(self) -> str | None:
        if self.scheme == "static":
            return f"{SETTINGS_PREFIX}activation_scheme={self.scheme!r}"
        return None

    def storage(self, module: CheckpointLinear) -> Storage | None:
        setting = self._left_out_by(module)
        if setting is not None:
            return resolve_storage(module, None, setting)
        # Dummy weights: the head is plain in published checkpoints, whether they list it or not.
        if module.tensors is None and module.path == "lm_head":
            return None
        return resolve_storage(module, self.storage_of_all, self._reason(), covers_all=True)

    def _left_out_by(self, module: CheckpointLinear) -> str | None:
        """Return the setting and its entry that exclude a module; None if none does."""
        for name in module.names:
            for part in (*enclosing_modules(name), *ends(name)):
                if part in self.left_out:
                    return f"{SETTINGS_PREFIX}{self.left_out[part]} ({part!r})"
        for entry, setting, pattern in self.patterns:
            if pattern.match(module):
                return f"{SETTINGS_PREFIX}{setting} ({entry[:100]!r})"
        return None

    def _reason(self) -> str:
        """Return the setting that quantizes modules which no list excludes."""
        block = self.settings.raw.get("weight_block_size")
        return f"{SETTINGS_PREFIX}weight_block_size={block}, with no list to except it,"


def ends(name: str) -> Iterator[str]:
    """Yield what follows each dot of a name."""
    while "." in name:
        name = name.partition(".")[2]
        yield name
