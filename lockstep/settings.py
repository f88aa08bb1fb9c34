"""Settings: frozen dataclasses whose fields are declared once and checked by pydantic.

A declaration is the field's type with its bounds, and setting() with default, help and remedy. The
command line, error messages and the configuration page are generated from it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from os import PathLike
from os.path import exists  # Path.exists raises where a name is too long
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from lockstep.errors import ConfigError, choice_error

STRICT = ConfigDict(strict=True, allow_inf_nan=False)
"""Strict types: "4", 4.0 and true are not integers."""
LIST_TO_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
PATH_TO_TEXT = BeforeValidator(lambda path: str(path) if isinstance(path, PathLike) else path)
MAX_CHARACTERS = 1 << 20
"""Maximum characters of a file that a setting names."""


def read_text_file(path: str | Path, limit: int = MAX_CHARACTERS) -> str:
    """Return the text of a file that a setting names.

    Raises: OSError if it cannot be read, ValueError if it is not UTF-8 or too long.
    """
    with Path(path).open(encoding="utf-8") as file:
        text = file.read(limit + 1)
    if len(text) > limit:
        raise ValueError(f"it is longer than {limit} characters")
    return text


def path_fault(error: Exception) -> str:
    """Return why a path cannot be read or written, without the path itself, which may be long.

    Missing permissions are distinguished from a missing path.
    """
    if isinstance(error, PermissionError):
        return "Permission denied: this user may not use it, or not enter a folder above it"
    return getattr(error, "strerror", None) or str(error)[:200]


FACTORS = {
    letter: (1000 if letter.islower() else 1024) ** power
    for power, pair in enumerate(("kK", "mM", "gG", "tT"), 1)
    for letter in pair
}
"""Factors of size suffixes: lower-case letters are powers of 1000, as in vLLM."""
_SIZE = re.compile(
    r"(\d{1,20}(?:\.\d{1,20})?(?:[eE][+-]?\d{1,2})?)\s*([kKmMgGtT](?:i?[bB])?|[bB]|)"
)
SIZES = "24G or 24GiB (2^30 bytes each), 24GB (10^9) or 25.3e9"
"""Examples of sizes, for messages."""


def read_bytes(text: str, unit: int = 1) -> float:
    """Return the number of units of a size such as 24G, 24GB, 24GiB, 25.3e9 or 512.

    unit: bytes per unit; a number without a suffix counts units. Raises ValueError.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text[:60]!r} is not a size")
    number = float(match[1])
    if not match[2]:
        return number
    letter = match[2][:1]
    suffix = match[2][1:].lower()
    if letter in "bB":
        return number / unit
    if suffix:
        letter = letter.upper() if suffix == "ib" else letter.lower()
    return number * FACTORS[letter] / unit


def size_in(unit: int) -> BeforeValidator:
    """Return the validator that parses sizes. unit: bytes per unit, e.g. 2^30 for GiB."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        number = read_bytes(value, unit)
        return int(number) if unit == 1 else number

    return BeforeValidator(read)


def check_writable(name: str, path: Path) -> None:
    """Raise ConfigError if a file that a setting names cannot be written. A new file is removed
    again."""
    existed = exists(path)
    try:
        # Opening for append neither truncates nor changes an existing file.
        path.open("ab").close()
    except OSError as error:
        allowed = f"a file that can be written ({path_fault(error)})"
        error_at_name = choice_error(ConfigError, name, str(path), allowed, "Name another file.")
        raise error_at_name from None
    if not existed:
        path.unlink()


def setting(
    default: Any,
    help: str,
    *,
    allowed: str | Callable[[], str] | None = None,
    remedy: str = "Choose a value in that range.",
    is_size: bool = False,
) -> Any:
    """Return a field of a Settings class.

    default: MISSING if there is none.
    allowed: text for errors if the type's bounds do not describe it, or a function that returns it.
    remedy: advice of the error.
    is_size: values may be texts that size_in() parses.
    """
    metadata = {"help": help, "allowed": allowed, "remedy": remedy, "is_size": is_size}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """Base class of settings. Each field is checked in order when an object is created.

    within: the setting that these are keys of, with a trailing blank, for messages.
    """

    within: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Raise ConfigError for the first field whose value is not allowed."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            adapter = self.adapter(entry.name)
            try:
                checked = adapter.validate_python(value)
            except (ValidationError, OverflowError, UnicodeError):
                # The JSON schema has the bounds of the type, so that they are declared once.
                allowed = allowed_by(entry) or describe(adapter.json_schema())
                remedy = entry.metadata["remedy"]
                name = f"{self.within}{entry.name}"
                raise choice_error(ConfigError, name, value, allowed, remedy) from None
            object.__setattr__(self, entry.name, checked)

    def adapter(self, name: str) -> TypeAdapter[Any]:
        """Return the validator of a field. Override it if bounds depend on preceding fields."""
        return adapters(type(self))[name]


def adapters(cls: type[Settings]) -> Mapping[str, TypeAdapter[Any]]:
    """Return field name -> validator."""
    return _adapters_of(cls)  # type: ignore[arg-type]  # a class is hashable


@cache
def _adapters_of(cls: Any) -> Mapping[str, TypeAdapter[Any]]:
    hints = get_type_hints(cls, include_extras=True)
    return {entry.name: strict_adapter(hints[entry.name]) for entry in fields(cls)}


def strict_adapter(hint: Any) -> TypeAdapter[Any]:
    """Return the strict validator of a type."""
    return TypeAdapter(hint, config=STRICT)


def check_names(cls: type[Settings], names: Mapping[str, Any], what: str, remedy: str) -> None:
    """Raise ConfigError for the first name that is not a setting."""
    known_names = [entry.name for entry in fields(cls)]
    for name in names:
        if name not in known_names:
            matches = get_close_matches(name, known_names, n=1)
            meant = f"Did you mean {matches[0]}? " if matches else ""
            raise choice_error(ConfigError, what, name, ", ".join(known_names), meant + remedy)


def describe(schema: Mapping[str, Any]) -> str:
    """Return the values that a JSON schema allows, in words."""
    if "anyOf" in schema:
        kinds = [describe(part) for part in schema["anyOf"] if part.get("type") != "null"]
        return ", ".join(kinds)
    if "const" in schema or "enum" in schema:
        return ", ".join(map(str, schema.get("enum") or [schema["const"]]))
    if schema.get("type") == "boolean":
        return "True, False"
    if schema.get("type") not in ("integer", "number"):
        return "text"
    kind = "whole numbers" if schema["type"] == "integer" else "numbers"
    return f"{kind} from {schema['minimum']} to {schema['maximum']}"


def allowed_by(entry: Field[Any]) -> str | None:
    """Return what the field's declaration says is allowed; None if its type's bounds say it."""
    declared = entry.metadata["allowed"]
    return declared() if callable(declared) else declared
