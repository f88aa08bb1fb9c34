"""A checkpoint: a folder with a model, what its config.json says, and the tensors that it has."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors import SafetensorError, safe_open

from lockstep.errors import CheckpointError, choice_error
from lockstep.models import architecture
from lockstep.quant import TensorInfo, one_format
from lockstep.settings import why_unread

MOST_BYTES = 64 << 20
"""Of a JSON file; the indices of the largest models are a tenth of it."""

SETTINGS = ("quantization_config", "compression_config")
"""What config.json calls the settings of its weight format; compressed-tensors had the second."""
OWN_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files in which checkpoints name their weight format beside config.json, or instead of it, and the
format of each."""


OBJECT = "an object"


@dataclass(frozen=True)
class Checkpoint:
    """raw: the object in config.json, read once; its model_type is one that is built here."""

    folder: Path
    raw: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, overrides: Mapping[str, Any] | None = None) -> "Checkpoint":
        """The checkpoint of a folder. overrides: settings that replace those of its config.json,
        objects key by key. Raises CheckpointError where its config.json is not read."""
        raw = read_object(
            folder / "config.json",
            "Name a folder that holds a checkpoint: config.json and *.safetensors.",
        )
        raw = overridden(raw, overrides or {})
        architecture(raw.get("model_type"))
        return cls(folder, raw)

    @property
    def architecture(self) -> ModuleType:
        """The module that builds it."""
        return architecture(self.raw["model_type"])

    @cached_property
    def prefixes(self) -> tuple[str, ...]:
        """What the names of its tensors may begin with."""
        found: tuple[str, ...] = self.architecture.PREFIXES
        return found

    def key(self, name: str) -> str:
        """A tensor's name, less the prefix."""
        for prefix in self.prefixes:
            if name.startswith(prefix):
                return name[len(prefix) :]
        return name

    def names(self) -> Iterator[str]:
        """Of all its tensors, as they stand in its files. Raises CheckpointError as tensors()."""
        for path in weight_files(self.folder):
            with opened(path) as file:
                yield from file.keys()

    def tensors(self) -> dict[str, dict[str, TensorInfo]]:
        """Module, less the architecture's prefix -> its tensors by what stands behind the last dot
        of their names ("weight"), from the files' headers.

        Raises CheckpointError where a file is missing or cannot be read.
        """
        found: dict[str, dict[str, TensorInfo]] = {}
        for path in weight_files(self.folder):
            with opened(path) as file:
                for name in file.keys():
                    part = file.get_slice(name)
                    info = TensorInfo(name, tuple(part.get_shape()), part.get_dtype())
                    (module, _, suffix) = self.key(name).rpartition(".")
                    found.setdefault(module, {})[suffix] = info
        return found

    def quantization(self) -> dict[str, Any] | None:
        """What the folder says of its weight format, as quantization_config; None: of none.

        It stands in config.json, around or within text_config, or in a file of its own. Where both
        are of one format the file adds what config.json does not say. Raises CheckpointError where
        that cannot be read.
        """
        own = self._own_file()
        for settings in (self.raw, self.raw.get("text_config", {})):
            for name in SETTINGS:
                found = settings.get(name)
                if found is None:
                    continue
                if not isinstance(found, dict):
                    field = f"config.json {name}"
                    raise choice_error(CheckpointError, field, found, OBJECT, "Mend config.json.")
                told = _with_method(found)
                if own is None or not one_format(own["quant_method"], told.get("quant_method")):
                    return told
                return own | {key: value for key, value in told.items() if value is not None}
        return own

    def _own_file(self) -> dict[str, Any] | None:
        """The settings in the first of OWN_FILES that is there; None: there is none."""
        for name, method in OWN_FILES.items():
            if (self.folder / name).exists():
                raw = read_object(self.folder / name, "Fetch the file again.")
                inner = raw.get("quantization", {})
                if not isinstance(inner, dict):
                    field = f"{name} quantization"
                    raise choice_error(CheckpointError, field, inner, OBJECT, "Mend the file.")
                return {"quant_method": method, **raw, **inner}
        return None


def _with_method(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with a quant_method: of older ones of ModelOpt `producer` alone says whose."""
    producer = settings.get("producer")
    known = isinstance(producer, dict) and producer.get("name") == "modelopt"
    return {"quant_method": "modelopt", **settings} if known else settings


def overridden(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with changes: an object changes the keys that it names."""
    found = dict(settings)
    for name, value in changes.items():
        inner = found.get(name)
        nested = isinstance(inner, dict) and isinstance(value, dict)
        found[name] = overridden(inner, value) if nested else value
    return found


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The object in a JSON file of at most MOST_BYTES. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"it is longer than {MOST_BYTES} bytes")
        raw = json.loads(data.decode("utf-8"))
        if not isinstance(raw, dict) or not isinstance(raw.get("text_config", {}), dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({why_unread(error)}). {remedy}") from None
    return raw


def weight_files(folder: Path) -> list[Path]:
    """The folder's *.safetensors. Raises CheckpointError if there is none, or not all of the index.

    An index names files of the folder itself, and says which file holds which tensor.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read: {why_unread(error)}. Change its permissions, or name "
            "another model folder."
        ) from None
    if not files:
        raise CheckpointError(
            f"{folder} holds no *.safetensors file. Name another model folder, or take random "
            "weights with load_format='dummy'. Files of pickles (*.bin, *.pt) are not read, since "
            "they may run code; one is converted by "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')."
        )
    for path in sorted(folder.glob("*.safetensors.index.json")):
        remedy = "Fetch the file again, or delete it: it is not needed."
        places = read_object(path, remedy).get("weight_map")
        if not isinstance(places, dict):
            allowed = "an object of tensor names and files"
            raise choice_error(CheckpointError, f"{path} weight_map", places, allowed, remedy)
        known = {file.name for file in files}
        for name, file in places.items():
            if not isinstance(file, str) or file not in known:
                allowed = f"files of the folder: {some(sorted(known))}"
                field = f"{path} weight_map[{name[:100]!r}]"
                raise choice_error(
                    CheckpointError, field, file, allowed, "Fetch the missing file again."
                )
    return files


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file. Raises CheckpointError where it cannot be read."""
    try:
        path.open("rb").close()  # safe_open calls a file without permission missing
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        remedy = "Fetch the file again."
        if isinstance(error, PermissionError):
            remedy = "Change its permissions, or run as a user who may read it."
        raise CheckpointError(f"{path} cannot be read: {why_unread(error)}. {remedy}") from None


def some(names: list[str]) -> str:
    """The first few of the names, for messages."""
    return ", ".join(name[:200] for name in names[:5]) + (" ..." if len(names) > 5 else "")
