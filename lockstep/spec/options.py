"""Options of drafters with a module, and of those whose module has its own folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from lockstep.kernels.formats.kv.table import check_kv_cache_dtype, kv_cache_dtypes
from lockstep.models.hub import folder_of
from lockstep.settings import PATH_TO_TEXT, setting
from lockstep.spec.config import SpeculativeConfig


@dataclass(frozen=True)
class ModuleOptions(SpeculativeConfig):
    """Keys of a drafter with a module."""

    kv_cache_dtype: Annotated[str, AfterValidator(check_kv_cache_dtype)] | None = setting(
        None,
        "format of the module's own KV cache; the model's if left out",
        allowed=", ".join(kv_cache_dtypes()),
        remedy="Choose one of them, or leave it out.",
    )


@dataclass(frozen=True)
class FolderOptions(ModuleOptions):
    """Keys of a drafter whose module has its own checkpoint."""

    model: Annotated[str, Field(min_length=1), PATH_TO_TEXT] = setting(
        "",
        "folder or hub id of the checkpoint that drafts; must be given",
        allowed="a folder or a hub id",
        remedy='Name it: "model": FOLDER.',
    )

    @property
    def folder(self) -> Path:
        """Return the checkpoint's folder, downloaded if necessary. Raises ConfigError."""
        return folder_of(self.model, field="speculative_config model")
