"""JSON files of a checkpoint folder, read within a bound."""

import json
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.settings import path_fault

MAX_BYTES = 64 << 20
"""Size limit of a JSON file; the indices of the largest models are a tenth of it."""


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file of at most MAX_BYTES. Raise CheckpointError otherwise."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"it is longer than {MAX_BYTES} bytes")
        raw = json.loads(data.decode("utf-8"))
        if not isinstance(raw, dict):
            raise ValueError("it holds no JSON object")
        if raw.get("text_config") is None:
            raw.pop("text_config", None)  # null counts as absent
        elif not isinstance(raw["text_config"], dict):
            raise ValueError("its text_config is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({path_fault(error)}). {remedy}") from None
    return raw


ADAPTER = "adapter_config.json"


def read_config(folder: Path, remedy: str) -> dict[str, Any]:
    """Return the object in the config.json of a folder. Raise CheckpointError otherwise.

    A folder with the settings of an adapter is refused, since transformers applies that adapter to
    the weights in the same folder and Lockstep would not.
    """
    if (folder / ADAPTER).exists():
        raise CheckpointError(
            f"{folder} holds an adapter ({ADAPTER}), no model. Name its base model, and the "
            "adapter by lora_modules; or merge it into its base model, for example by PEFT's "
            "merge_and_unload, and name the merged folder; "
            f"where the weights in the folder hold it already, remove {ADAPTER}."
        )
    return read_object(folder / "config.json", remedy)


def brief_list(names: list[str]) -> str:
    """Return the first few of the names, for messages."""
    return ", ".join(name[:200] for name in names[:5]) + (" ..." if len(names) > 5 else "")
