"""A checkpoint: a folder with a model, and what its config.json says."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.models.loader import read_config


@dataclass(frozen=True)
class Checkpoint:
    """raw: the object in config.json, read once; its model_type is one that is built here."""

    folder: Path
    raw: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        """The checkpoint of a folder. Raises CheckpointError where its config.json is not read."""
        return cls(folder, read_config(folder))
