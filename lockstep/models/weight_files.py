"""Safetensors files of a checkpoint, by its index if there is one."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.errors import CheckpointError, choice_error
from lockstep.models.gguf.folder import gguf_files, has_gguf
from lockstep.models.gguf.tensors import GGUFWeightFile, gguf_weight_files
from lockstep.models.json_files import brief_list, read_object
from lockstep.quantization import TensorInfo
from lockstep.settings import path_fault

INDEX = "model.safetensors.index.json"
EXTRA_FILE = "model_extra_tensors.safetensors"
"""AutoRound's file of tensors that it does not quantize. Its index does not always list them."""
OTHER_LAYOUTS = ("consolidated*.safetensors",)
"""Files with the same weights under the names of the publisher's own code (Mistral, Meta)."""
ADAPTER_FILES = ("adapter_*.safetensors",)
"""Files of PEFT with changes of a model's weights, not weights."""
SHARD_NAME = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True)
class OpenWeightFile:
    """An open safetensors file."""

    file: Any

    def info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor, from the header."""
        part = self.file.get_slice(name)
        return TensorInfo(name, tuple(part.get_shape()), part.get_dtype())

    def read(self, name: str, dtypes: Sequence[torch.dtype]) -> Tensor:
        """Return a tensor in the dtype of the file, whichever are asked for."""
        tensor: Tensor = self.file.get_tensor(name)
        return tensor


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file of a checkpoint.

    index: file name of each tensor that the checkpoint's index lists; expected: those in this file.
    """

    path: Path
    index: Mapping[str, str]
    expected: frozenset[str]

    @contextmanager
    def open(self, values: bool = False) -> Iterator[tuple[OpenWeightFile, list[str]]]:
        """Open the file; yield it and the names of its tensors that are part of the checkpoint.

        A tensor that the index places in another file is left out. values: whether tensors are
        read, not their shapes and dtypes alone.

        Raises:
            CheckpointError: the file cannot be read, or lacks a tensor that the index lists for it.
        """
        file_name = self.path.name
        try:
            self.path.open("rb").close()  # safe_open calls a file without permission missing
            with self._mapped(values) as file:
                stored = file.keys()
                self._check_listed(set(stored))
                listed = (name for name in stored if self.index.get(name, file_name) == file_name)
                yield OpenWeightFile(file), list(listed)
        except (SafetensorError, OSError) as error:
            remedy = "Fetch the file again."
            if isinstance(error, PermissionError):
                remedy = "Change its permissions, or run as a user who may read it."
            reason = path_fault(error)
            raise CheckpointError(f"{self.path} cannot be read: {reason}. {remedy}") from None

    def _mapped(self, values: bool) -> Any:
        """Map the file into memory. Raise CheckpointError where the system does not allow it."""
        # torch maps a writable copy, which systems without overcommit count as memory in use: even
        # the names of a file larger than memory could not be read.
        framework = "pt" if values else "numpy"
        try:
            return safe_open(self.path, framework=framework)
        except RuntimeError as error:
            raise CheckpointError(
                f"{self.path} cannot be mapped into memory: {error}. Allow overcommit of memory "
                "(sysctl vm.overcommit_memory=1), or save the checkpoint in smaller files."
            ) from None

    def _check_listed(self, stored: set[str]) -> None:
        """Raise CheckpointError where the file lacks tensors that the index places in it."""
        absent = sorted(self.expected - stored)
        if absent:
            raise CheckpointError(
                f"{self.path} lacks tensors ({len(absent)}) that {INDEX} places in it: "
                f"{brief_list(absent)}. Fetch both files again."
            )


def _safetensors(folder: Path) -> list[Path]:
    """Return the sorted *.safetensors of a folder. Raise CheckpointError if it is unreadable."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read: {path_fault(error)}. Change its permissions, or name "
            "another model folder."
        ) from None


def find_weight_files(folder: Path) -> Sequence[WeightFile | GGUFWeightFile]:
    """Return the files to read, in the order of their names.

    GGUF files are read where there are no safetensors. Of these, with
    model.safetensors.index.json, the files are those that it names. Without it they are all
    *.safetensors of the folder but adapters and copies in another layout.

    Raises:
        CheckpointError: no file is there, or one that the index or a file name announces is not.
    """
    files = {path.name: path for path in _safetensors(folder)}
    if not files and has_gguf(folder):
        return gguf_weight_files(gguf_files(folder))
    index = read_index(folder)
    _check_index(folder, index, files)
    if index:
        named = {*index.values(), EXTRA_FILE}
    else:
        named = set(files) - _matching(folder, OTHER_LAYOUTS + ADAPTER_FILES)
        _check_numbering(folder, named)
    if not named & set(files):
        raise _no_weights(folder, sorted(files))
    expected: dict[str, set[str]] = {}
    for tensor, name in index.items():
        expected.setdefault(name, set()).add(tensor)
    return [
        WeightFile(path, index, frozenset(expected.get(name, ())))
        for name, path in files.items()
        if name in named
    ]


def has_weights(folder: Path) -> bool:
    """Return whether there are weight files in the folder."""
    return any(folder.glob("*.safetensors")) or has_gguf(folder)


def files_left_out(folder: Path, read: set[str]) -> dict[str, str]:
    """Map the folder's *.safetensors that are not among those read to the reason."""
    adapters = _matching(folder, ADAPTER_FILES)
    left_out = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name in read:
            continue
        if path.name in adapters:
            reason = "an adapter, which is not applied; serve it by lora_modules"
        elif (folder / INDEX).exists():
            reason = f"{INDEX} does not name it"
        else:
            reason = "a copy of the weights in another layout"
        left_out[path.name] = reason
    return left_out


def _matching(folder: Path, patterns: tuple[str, ...]) -> set[str]:
    return {path.name for pattern in patterns for path in folder.glob(pattern)}


def read_index(folder: Path) -> dict[str, str]:
    """Return the file name of each tensor that the index lists; {} without an index.

    Raises:
        CheckpointError: the index is no object of tensor names and names of files.
    """
    path = folder / INDEX
    if not path.exists():
        return {}
    remedy = "Fetch the file again, or delete it where the folder's files are the whole model."
    weight_map = read_object(path, remedy).get("weight_map")
    sound = isinstance(weight_map, dict) and weight_map
    if not sound or not all(isinstance(file, str) for file in weight_map.values()):
        allowed = "an object of tensor names and file names"
        raise choice_error(CheckpointError, f"{path} weight_map", weight_map, allowed, remedy)
    return dict(weight_map)


def _check_index(folder: Path, index: Mapping[str, str], files: Mapping[str, Path]) -> None:
    """Raise CheckpointError where the index names a file that is not in the folder itself."""
    for tensor, name in index.items():
        if name not in files:
            allowed = f"files of the folder: {brief_list(sorted(files)) or 'there is none'}"
            field = f"{folder / INDEX} weight_map[{tensor[:100]!r}]"
            remedy = f"Fetch the missing file again, or a {INDEX} that fits the folder."
            raise choice_error(CheckpointError, field, name, allowed, remedy)


def _check_numbering(folder: Path, names: set[str]) -> None:
    """Raise CheckpointError where files NAME-i-of-n are not all there, or of several sets."""
    numbers: dict[tuple[str, str], set[int]] = {}
    for name in names:
        parts = SHARD_NAME.fullmatch(name)
        if parts is not None:
            numbers.setdefault((parts[1], parts[3]), set()).add(int(parts[2]))
    for (stem, total), present in sorted(numbers.items()):
        if len(numbers) > 1 or len(present) != int(total):
            sets = ", ".join(f"{stem}-*-of-{total}" for stem, total in sorted(numbers))
            raise CheckpointError(
                f"{folder} has {len(present)} of the {int(total)} files {stem}-*-of-{total}."
                f"safetensors, and no {INDEX}; sets of files there: {sets}. Fetch the missing "
                "files, or the index, or delete the files that belong to another set."
            )


def _no_weights(folder: Path, unusable: list[str]) -> CheckpointError:
    """Return the error of a folder without weights. unusable: *.safetensors files in it."""
    if any(name.startswith("adapter_") for name in unusable):
        return CheckpointError(
            f"{folder} holds an adapter ({brief_list(unusable)}) and no model. Name its base "
            "model, and the adapter by lora_modules; or merge it into its base model, for example "
            "by PEFT's merge_and_unload, and name the merged folder."
        )
    if unusable:
        return CheckpointError(
            f"{folder} holds {brief_list(unusable)}, in the layout of the publisher's own code; "
            "allowed: the layout of transformers. Fetch the checkpoint's model*.safetensors."
        )
    return CheckpointError(
        f"{folder} holds no *.safetensors file. Name another model folder, or take random "
        "weights with load_format='dummy'. Files of pickles (*.bin, *.pt) are not read, since "
        "they may run code; one is converted by "
        "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')."
    )
