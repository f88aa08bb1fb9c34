"""Checkpoints of the Hugging Face hub: downloaded, or from the cache if the hub does not answer.

The hub's client gives up a stalled download after six times HF_HUB_DOWNLOAD_TIMEOUT (10 seconds)
without a byte. The received part of the file is kept, and the next attempt continues there.
"""

import glob
import os
import queue
import re
import stat
import threading
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from lockstep.errors import CheckpointError, ConfigError
from lockstep.models.gguf.folder import PART, SUFFIX, checkpoint_folder, gguf_files, has_gguf
from lockstep.models.json_files import brief_list
from lockstep.models.weight_files import EXTRA_FILE, read_index
from lockstep.settings import path_fault

HUB_SECONDS = 3.0
"""Seconds for the hub's answer, retries included; its client would wait for minutes."""
SETTINGS = ["config.json", "*quant*config.json"]
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
"""NAME, or OWNER/NAME: any other text can only be a path."""
HUB_FILE = re.compile(rf"(?P<model>{HUB_ID.pattern}):(?P<file>[\w.+/-]+\.gguf|[\w-]+)")
"""OWNER/NAME:FILE.gguf, or OWNER/NAME:TYPE as in Q4_K_M, the end of a GGUF file's name."""
REMEDY = (
    "Name a folder with config.json and *.safetensors, a GGUF file, a hub id that can be reached "
    "from here, or a GGUF file of one: OWNER/NAME:FILE.gguf."
)
TEXT_FILES = ["*.json", "*.jinja"]
WEIGHTS = ["*.safetensors"]
SUBFOLDERS = ["*/*.safetensors"]
"""Weights in other layouts and of other parts; a checkpoint's weights are in its main folder."""


def folder_of(model: str, weights: bool = True, field: str = "model") -> Path:
    """Return the checkpoint folder of a path or a hub id. weights, field: as in fetch().

    For a GGUF file, or a folder with one, that is the folder of gguf.folder.checkpoint_folder.
    Raises ConfigError, or CheckpointError for a GGUF file that cannot be read.
    """
    path = Path(model)
    try:
        is_folder = stat.S_ISDIR(os.stat(model).st_mode)
        reason = "it is a file"
    except (OSError, ValueError) as error:  # ValueError: a name that no folder can have
        is_folder = None
        reason = path_fault(error)
        if isinstance(error, PermissionError):
            raise ConfigError(
                f"{field}={model[:200]!r} cannot be read: {reason}. Change its permissions, or run "
                "as a user who may read it."
            ) from None
    if is_folder and not has_gguf(path):
        return path
    if is_folder or (is_folder is not None and path.suffix == SUFFIX):
        return checkpoint_folder(gguf_files(path))
    if file := HUB_FILE.fullmatch(model):
        return checkpoint_folder(gguf_files(fetch_gguf(file["model"], file["file"], field)))
    if not HUB_ID.fullmatch(model):
        raise ConfigError(
            f"{field}={model[:200]!r} is neither an existing folder or GGUF file nor a hub id, "
            f"such as Qwen/Qwen3-8B ({reason}). {REMEDY}"
        )
    return fetch(model, weights, field)


def fetch(model: str, weights: bool = True, field: str = "model") -> Path:
    """Return the folder of a hub id: fetched, or cached where the hub does not answer.

    weights: also its weights, not its settings alone. field: the setting that names it, for the
    error. Raises ConfigError where it is neither.
    """
    from huggingface_hub import snapshot_download

    fault = _query_hub(model)
    try:
        cached = fault is not None
        patterns = TEXT_FILES if weights else SETTINGS
        folder = snapshot_download(model, allow_patterns=patterns, local_files_only=cached)
        if not weights:
            return Path(folder)
        # Two downloads: the index of the first names the weight files of the second.
        return Path(
            snapshot_download(
                model,
                allow_patterns=weight_patterns(Path(folder)),
                ignore_patterns=SUBFOLDERS,
                local_files_only=cached,
            )
        )
    except Exception as error:  # the hub's client passes on whatever its transport raises
        reason = _reason(fault or error)
    raise ConfigError(
        f"{field}={model[:200]!r} is neither an existing folder or GGUF file, nor a hub id that "
        f"can be fetched ({reason}), nor one that was fetched before. {REMEDY}"
    )


def gguf_patterns(name: str) -> list[str]:
    """Return patterns of the GGUF files that a file's name, or a type at its end, means."""
    if not name.endswith(SUFFIX):
        return [f"*{mark}{name}{end}{SUFFIX}" for mark in "-._" for end in ("", "-*-of-*")]
    parts = PART.fullmatch(name)
    return [
        glob.escape(name) if parts is None else f"{glob.escape(parts[1])}-*-of-{parts[3]}{SUFFIX}"
    ]


def fetch_gguf(model: str, name: str, field: str = "model") -> Path:
    """Return a GGUF file of a hub id: fetched, or cached where the hub does not answer.

    name: of the file, or the type at its end. A model in several files is fetched whole. Raises
    ConfigError where there is no such file or more than one.
    """
    from huggingface_hub import snapshot_download

    fault = _query_hub(model)
    patterns = gguf_patterns(name)
    setting = f"{field}={model}:{name[:200]}"
    try:
        cached = fault is not None
        folder = Path(snapshot_download(model, allow_patterns=patterns, local_files_only=cached))
    except Exception as error:  # as in fetch()
        raise ConfigError(
            f"{setting} cannot be fetched ({_reason(fault or error)}), and was not fetched before. "
            f"{REMEDY}"
        ) from None
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob(f"*{SUFFIX}"))]
    chosen = [n for n in names if any(fnmatchcase(n, pattern) for pattern in patterns)]
    models = {tuple(gguf_files(folder / n)) for n in chosen}
    if len(models) != 1:
        listed = brief_list(chosen) if chosen else "none"
        raise ConfigError(
            f"{setting} means {len(models)} models ({listed}); allowed: the name of one GGUF file "
            f"of {model}, or the type at its end, such as Q4_K_M. Name one "
            f"of the files, such as {model}:{chosen[0] if chosen else 'FILE.gguf'}."
        )
    return models.pop()[0]


def weight_patterns(folder: Path) -> list[str]:
    """Return the names of the weight files to fetch.

    They are those of the index, so that no second copy of the weights is fetched, or without an
    index all *.safetensors. An index that cannot be read is reported when the folder is loaded.
    """
    with suppress(CheckpointError):
        weight_map = read_index(folder)
        if weight_map:
            return sorted({*weight_map.values(), EXTRA_FILE})
    return [*WEIGHTS]


def _query_hub(model: str) -> Exception | None:
    """Ask the hub about a model within HUB_SECONDS; return None if it knows it, else the error."""
    from huggingface_hub import HfApi

    answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def ask() -> None:
        try:
            HfApi().model_info(model, timeout=HUB_SECONDS)
            answers.put(None)
        except Exception as error:
            answers.put(error)

    # A thread: the client's timeout does not bound name resolution or its retries.
    threading.Thread(target=ask, name="lockstep-hub", daemon=True).start()
    try:
        return answers.get(timeout=HUB_SECONDS)
    except queue.Empty:
        return TimeoutError(f"the hub did not answer within {HUB_SECONDS:g} seconds")


def _reason(error: Exception) -> str:
    """Return an error's cause in one line, with the file if a download stalled."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    fields = vars(error)
    request = fields.get("_request") or fields.get("request")  # by httpx, by requests
    if request is None or "Timeout" not in type(error).__name__:
        return line
    name = str(request.url).partition("?")[0].rpartition("/")[2][:100]
    return f"{name!r} stalled: {line}; ask again, and the download goes on from there"
