"""Checkpoint folder: its config.json and its tensors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import CheckpointError, choice_error
from lockstep.models import architecture
from lockstep.models.config_overrides import overridden
from lockstep.models.gguf.tensors import GGUFWeightFile
from lockstep.models.json_files import read_config, read_object
from lockstep.models.weight_files import WeightFile, find_weight_files
from lockstep.quantization import TensorInfo, is_same_format

SETTINGS = ("quantization_config", "compression_config")
"""Keys of the weight format's settings in config.json; the second is an older one."""
OWN_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files with settings of a weight format outside config.json, and the format of each."""


OBJECT = "an object"


def settings_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint folder that say how its model is built."""
    paths = [folder / name for name in ("config.json", *OWN_FILES)]
    return [path for path in paths if path.exists()]


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint folder. raw: object of config.json, whose model_type is supported."""

    folder: Path
    raw: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, overrides: Mapping[str, Any] | None = None) -> "Checkpoint":
        """Read the checkpoint of a folder.

        Args:
            overrides: settings that replace those of config.json; objects are merged key by key.

        Raises:
            CheckpointError: config.json is missing or unsound.
        """
        remedy = "Name a folder that holds a checkpoint: config.json and *.safetensors."
        raw = read_config(folder, remedy)
        raw = overridden(raw, overrides or {})
        architecture(raw.get("model_type"))
        return cls(folder, raw)

    @property
    def architecture(self) -> ModuleType:
        """Module that builds the model."""
        return architecture(self.raw["model_type"])

    @cached_property
    def prefixes(self) -> tuple[str, ...]:
        """Prefixes that tensor names may have."""
        prefixes: tuple[str, ...] = self.architecture.PREFIXES
        return prefixes

    @cached_property
    def weight_files(self) -> Sequence[WeightFile | GGUFWeightFile]:
        """Files to read.

        Raises:
            CheckpointError: a file is missing.
        """
        return find_weight_files(self.folder)

    def key(self, name: str) -> str:
        """Return a tensor's name without the prefix."""
        for prefix in self.prefixes:
            if name.startswith(prefix):
                return name[len(prefix) :]
        return name

    def names(self) -> Iterator[str]:
        """Yield the names of all tensors as the files have them. Raise as tensors() does."""
        for weight_file in self.weight_files:
            with weight_file.open() as (_, names):
                yield from names

    def tensors(self) -> dict[str, dict[str, TensorInfo]]:
        """Map each module (less the architecture's prefix) to its tensors, read from the headers.

        A module's tensors are keyed by the last part of their names ("weight").

        Raises:
            CheckpointError: a file is missing or cannot be read.
        """
        modules: dict[str, dict[str, TensorInfo]] = {}
        for weight_file in self.weight_files:
            with weight_file.open() as (file, names):
                for name in names:
                    info = file.info(name)
                    (module, _, suffix) = self.key(name).rpartition(".")
                    modules.setdefault(module, {})[suffix] = info
        return modules

    def quantization(self) -> dict[str, Any] | None:
        """Return the settings of the weight format as a quantization_config; None without any.

        They are in config.json, at the top level or in text_config, or in a file of their own. If
        both are of one format, the file adds what config.json does not say.

        Raises:
            CheckpointError: the settings cannot be read.
        """
        file_settings = self._own_file()
        for settings in (self.raw, self.raw.get("text_config", {})):
            for name in SETTINGS:
                candidate = settings.get(name)
                if candidate is None:
                    continue
                if not isinstance(candidate, dict):
                    field = f"config.json {name}"
                    raise choice_error(
                        CheckpointError, field, candidate, OBJECT, "Correct config.json."
                    )
                config_settings = _with_method(candidate)
                if file_settings is None or not is_same_format(
                    file_settings["quant_method"], config_settings.get("quant_method")
                ):
                    return config_settings
                return file_settings | {
                    key: value for key, value in config_settings.items() if value is not None
                }
        return file_settings

    def _own_file(self) -> dict[str, Any] | None:
        """Return the settings in the first of OWN_FILES that exists; None if there is none."""
        for name, method in OWN_FILES.items():
            if (self.folder / name).exists():
                raw = read_object(self.folder / name, "Fetch the file again.")
                inner = raw.get("quantization", {})
                if not isinstance(inner, dict):
                    field = f"{name} quantization"
                    raise choice_error(CheckpointError, field, inner, OBJECT, "Correct the file.")
                return {"quant_method": method, **raw, **inner}
        return None


def _with_method(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with a quant_method; older ModelOpt files only have `producer`."""
    producer = settings.get("producer")
    known = isinstance(producer, dict) and producer.get("name") == "modelopt"
    return {"quant_method": "modelopt", **settings} if known else settings
