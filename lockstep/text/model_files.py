"""Reading of text and JSON files of a model folder."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError, brief, choice_error
from lockstep.quantization.ignored_settings import is_switched_off
from lockstep.settings import path_fault


def damaged(path: Path, reason: object) -> CheckpointError:
    """Return the error of a damaged file."""
    return CheckpointError(
        f"{path} is damaged: {str(reason)[:300]}. Repair it, or download it again."
    )


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file. Raise CheckpointError otherwise."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {path_fault(error)}. Change its permissions, or name another "
            "folder."
        ) from None
    except ValueError as error:
        raise damaged(path, error) from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; {} if there is no such file. Raise CheckpointError."""
    if not path.is_file():
        return {}
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, error) from None
    if not isinstance(value, dict):
        raise damaged(path, f"it has {brief(value)} instead of an object")
    return value


def is_text(value: object) -> bool:
    """Return whether a value is a string without lone surrogates, which JSON may contain."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def refuse_unread(
    path: Path,
    settings: Mapping[str, Any],
    known: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]],
    remedy: str,
) -> None:
    """Raise CheckpointError for a setting that may change the answer and that is not supported.

    known: settings that are read or may be ignored.
    neutral: other settings with the values at which they change nothing. null, false and empty
    values change nothing either.
    """
    for name, value in settings.items():
        if name in known or name.startswith("_") or is_switched_off(value):
            continue
        harmless = neutral.get(name, ())
        if not isinstance(value, bool) and value in harmless:
            continue
        allowed = " or ".join(map(str, (*harmless, "null")))
        raise choice_error(
            CheckpointError,
            f"{path} {name[:100]}",
            value,
            f"{allowed}: no code reads this setting, and it may change the answer",
            remedy,
        )
