"""Checkpoints in the hub's cache on this machine, and whether they can be served."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.shards import shards
from lockstep.quant import packing_of

DEFAULT_REVISION = "main"
DTYPE_NAMES = ("dtype", "torch_dtype")
"""Settings of config.json that name the dtype of weights, since transformers 5 and before."""


@dataclass(frozen=True)
class CachedCheckpoint:
    """A snapshot of a model in the cache.

    name: what `lockstep serve` takes, a folder where the hub id means another snapshot; used: when
    a file was last read, in seconds since 1970; reason: why it cannot be served, None where it can.
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
        _described(repository, revision)
        for repository in repositories
        if repository.repo_type == "model"
        for revision in repository.revisions
    ]
    return sorted(snapshots, key=lambda one: (-one.used, one.name))


def _described(repository: Any, revision: Any) -> CachedCheckpoint:
    """Describe a snapshot of the cache."""
    folder = Path(revision.snapshot_path)
    is_default = DEFAULT_REVISION in revision.refs
    architecture, weights, reason = read_support(folder)
    return CachedCheckpoint(
        name=repository.repo_id if is_default else str(folder),
        folder=folder,
        bytes=revision.size_on_disk,
        architecture=architecture,
        weights=weights,
        used=max((file.blob_last_accessed for file in revision.files), default=0.0),
        reason=reason,
    )


def read_support(folder: Path) -> tuple[str, str, str | None]:
    """Return architecture and weight format of a folder, and why it cannot be served or None.

    Only settings and names of files are read.
    """
    architecture = weights = ""
    try:
        checkpoint = Checkpoint.read(folder)
        architecture = _named_architecture(checkpoint.raw)
        weights = _named_weights(checkpoint)
        checkpoint.architecture.Config.read(checkpoint.raw)
        shards(folder)
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
    packing = packing_of(checkpoint.quantization())
    if packing is not None:
        return packing.name
    inner = checkpoint.raw.get("text_config", {})
    known = (settings.get(name) for settings in (inner, checkpoint.raw) for name in DTYPE_NAMES)
    return next((dtype for dtype in known if isinstance(dtype, str)), "")
