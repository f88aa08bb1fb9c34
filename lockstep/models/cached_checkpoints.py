"""Checkpoints in the local hub cache, and whether they can be served."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.gguf.folder import OTHER_MODALITY, PART, SUFFIX
from lockstep.models.hub import folder_of, gguf_patterns
from lockstep.models.weight_files import find_weight_files
from lockstep.quantization import read_weight_format

DEFAULT_REVISION = "main"
DTYPE_NAMES = ("dtype", "torch_dtype")
"""Settings of config.json for the dtype of weights: transformers 5, and earlier versions."""


@dataclass(frozen=True)
class CachedCheckpoint:
    """Snapshot of a model in the hub cache.

    name: argument for `lockstep serve`, a folder if the hub id means another snapshot. bytes: size
    on disk. architecture, weights: see read_support. used: last access in seconds since 1970.
    reason: why it cannot be served, None if it can.
    """

    name: str
    folder: Path
    bytes: int
    architecture: str
    weights: str
    used: float
    reason: str | None


def cached_checkpoints() -> list[CachedCheckpoint]:
    """Return the snapshots of models in the cache, the one that was used last first."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:  # nothing was ever downloaded
        return []
    snapshots = [
        _described(repository, revision, file)
        for repository in repositories
        if repository.repo_type == "model"
        for revision in repository.revisions
        for file in _gguf_models(Path(revision.snapshot_path)) or (None,)
    ]
    return sorted(snapshots, key=lambda entry: (-entry.used, entry.name))


def _gguf_models(folder: Path) -> Sequence[str | None]:
    """Return the names of the GGUF files of a snapshot, the first file of each model alone."""
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob(f"*{SUFFIX}"))]
    parts = [PART.fullmatch(name) for name in names]
    return [
        name
        for name, part in zip(names, parts, strict=True)
        if (part is None or int(part[2]) == 1) and not Path(name).name.startswith(OTHER_MODALITY)
    ]


def _described(repository: Any, revision: Any, file: str | None) -> CachedCheckpoint:
    """Describe a snapshot of the cache, or one GGUF file of it."""
    folder = Path(revision.snapshot_path)
    path = folder if file is None else folder / file
    name = repository.repo_id if file is None else f"{repository.repo_id}:{file}"
    patterns = ["*"] if file is None else gguf_patterns(file)
    files = [
        entry
        for entry in revision.files
        if any(
            fnmatchcase(str(entry.file_path.relative_to(folder)), pattern) for pattern in patterns
        )
    ]
    architecture, weights, reason = read_support(path)
    return CachedCheckpoint(
        name=name if DEFAULT_REVISION in revision.refs else str(path),
        folder=folder,
        bytes=sum(entry.size_on_disk for entry in files),
        architecture=architecture,
        weights=weights,
        used=max((entry.blob_last_accessed for entry in files), default=0.0),
        reason=reason,
    )


def read_support(path: Path) -> tuple[str, str, str | None]:
    """Return (architecture, weight format, why it cannot be served or None) of a model.

    path: a folder or a GGUF file. Only settings and names of files are read, and the metadata of
    GGUF files.
    """
    architecture = weights = ""
    try:
        folder = folder_of(str(path))
        checkpoint = Checkpoint.read(folder)
        architecture = _named_architecture(checkpoint.raw)
        weights = _named_weights(checkpoint)
        checkpoint.architecture.Config.read(checkpoint.raw)
        find_weight_files(folder)
    except LockstepError as error:
        return architecture, weights, str(error)
    return architecture, weights, None


def _named_architecture(raw: dict[str, Any]) -> str:
    """Return the class that config.json names, or its model_type."""
    names = raw.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    return str(raw["model_type"])


def _named_weights(checkpoint: Checkpoint) -> str:
    """Return the weight format: that of quantized weights, or their dtype."""
    weight_format = read_weight_format(checkpoint.quantization())
    if weight_format is not None:
        return weight_format.name
    inner = checkpoint.raw.get("text_config", {})
    known = (settings.get(name) for settings in (inner, checkpoint.raw) for name in DTYPE_NAMES)
    return next((dtype for dtype in known if isinstance(dtype, str)), "")
