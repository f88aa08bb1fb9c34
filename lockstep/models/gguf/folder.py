"""Translation of a GGUF file to a checkpoint folder.

config.json and the tokenizer files are written once from the metadata, and the weights are linked
next to them. The rest of the code reads this folder like any other checkpoint.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError, ConfigError
from lockstep.models.gguf.config import settings_of
from lockstep.models.gguf.file import GGUFModel
from lockstep.models.gguf.tokenizer import text_files
from lockstep.models.json_files import brief_list
from lockstep.quantization.gguf_blocks import LAYOUTS
from lockstep.settings import path_fault

SUFFIX = ".gguf"
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""Name of a file of a model that is split into several."""
OTHER_MODALITY = "mmproj"
"""Prefix of the names of files that hold the image encoder of a model."""


def has_gguf(folder: Path) -> bool:
    """Return whether the weights of a folder are GGUF: it has such files, and no safetensors."""
    return any(folder.glob(f"*{SUFFIX}")) and not any(folder.glob("*.safetensors"))


def gguf_files(path: Path) -> list[Path]:
    """Return the files of the one model in a folder, or of the model that a file is part of.

    Raises ConfigError if a folder has several models, CheckpointError if a part is missing.
    """
    if not path.is_dir():
        return _parts(path)
    names = sorted(p for p in path.glob(f"*{SUFFIX}") if not p.name.startswith(OTHER_MODALITY))
    models = {tuple(_parts(name)) for name in names}
    if len(models) != 1:
        listed = brief_list([name.name for name in names]) or "none"
        raise ConfigError(
            f"model={str(path)!r} holds GGUF files of {len(models)} models ({listed}); allowed: a "
            "folder with one, or the path of a file. Name the file."
        )
    return list(models.pop())


def _parts(path: Path) -> list[Path]:
    """Return all files of the model that a file is a part of."""
    name = PART.fullmatch(path.name)
    if name is None:
        return [path]
    count = int(name[3])
    parts = [path.with_name(f"{name[1]}-{i:05}-of-{name[3]}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.exists()]
    if missing or not parts:
        raise CheckpointError(
            f"{path.parent} lacks {len(missing)} of the {count} files of {name[1]!r}: "
            f"{brief_list(missing)}. Fetch them."
        )
    return parts


def checkpoint_folder(paths: Sequence[Path]) -> Path:
    """Return the checkpoint folder of the GGUF files of one model; the first call writes it.

    Raises CheckpointError where the files are damaged or of an unsupported model, ConfigError
    where the folder cannot be written.
    """
    from huggingface_hub.constants import HF_HOME

    cache = Path(HF_HOME) / "lockstep" / "gguf"
    folder = cache / _digest(paths)
    try:
        if not folder.is_dir():
            _write(cache, folder, paths)
    except OSError as error:
        raise ConfigError(
            f"{cache} cannot be written: {path_fault(error)}. The settings of GGUF files are kept "
            "there; set HF_HOME to a folder that may be written."
        ) from None
    return folder


def _digest(paths: Sequence[Path]) -> str:
    """Return a name that changes with the files, and with the code that translates them."""
    digest = sha256()
    for path in paths:
        try:
            state = path.stat()
        except OSError as error:
            reason = path_fault(error)
            raise CheckpointError(f"{path} cannot be read: {reason}. Fetch it again.") from None
        digest.update(f"{path.resolve()}\n{state.st_size} {state.st_mtime_ns}\n".encode())
    # The code counts too: a folder that an older version wrote must not be read.
    modules = (entry for entry in files(__package__).iterdir() if entry.name.endswith(".py"))
    for module in sorted(modules, key=lambda entry: entry.name):
        digest.update(module.read_bytes())
    return digest.hexdigest()[:16]


def _write(cache: Path, folder: Path, paths: Sequence[Path]) -> None:
    """Write a folder atomically, so that several processes may write it at once."""
    contents = checkpoint_files(GGUFModel(paths))
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=cache))
    try:
        for name, value in contents.items():
            (partial / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
        for path in paths:
            (partial / path.name).symlink_to(path.resolve())
        os.rename(partial, folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def checkpoint_files(model: GGUFModel) -> dict[str, dict[str, Any]]:
    """Return the JSON files of the folder, by name."""
    config = settings_of(model).read()
    types = sorted({entry.kind for entry in model.tensors.values()} & set(LAYOUTS))
    if types:
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    return {"config.json": config, **text_files(model)}
