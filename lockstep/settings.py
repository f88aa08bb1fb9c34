"""Settings: frozen dataclasses whose fields are declared once, and checked by pydantic.

A declaration is a field's type, with its bounds, and its setting(): default, help, remedy. The
command line, the errors and the page of settings in docs/ are all made from it.
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
"""No value is taken for one of another type: "4", 4.0 and true are no whole numbers."""
TUPLE_OF_LIST = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
TEXT_OF_PATH = BeforeValidator(lambda path: str(path) if isinstance(path, PathLike) else path)
MOST_CHARACTERS = 1 << 20
"""Of a file that a setting names."""


def read_named(path: str | Path, most: int = MOST_CHARACTERS) -> str:
    """The text of a file that a setting names.

    Raises OSError where it cannot be read, ValueError where it is no UTF-8 or has more than `most`
    characters.
    """
    with Path(path).open(encoding="utf-8") as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise ValueError(f"it is longer than {most} characters")
    return text


def why_unread(error: Exception) -> str:
    """Return the reason that a path cannot be read, without the path, which may be long.

    A path without permission is told from one that is missing.
    """
    if isinstance(error, PermissionError):
        return "Permission denied: this user may not use it, or not enter a folder above it"
    return getattr(error, "strerror", None) or str(error)[:200]


FACTORS = {
    letter: (1000 if letter.islower() else 1024) ** power
    for power, pair in enumerate(("kK", "mM", "gG", "tT"), 1)
    for letter in pair
}
"""Factors of suffixes: small letters count in thousands, as vLLM has them."""
_SIZE = re.compile(
    r"(\d{1,20}(?:\.\d{1,20})?(?:[eE][+-]?\d{1,2})?)\s*([kKmMgGtT](?:i?[bB])?|[bB]|)"
)
SIZES = "24G or 24GiB (2^30 bytes each), 24GB (10^9) or 25.3e9"
"""Examples of sizes, for messages."""


def read_bytes(text: str, unit: int = 1) -> float:
    """Return the number of units of a size such as 24G, 24GB, 24GiB, 25.3e9 or 512.

    unit: bytes of one; a number without a suffix counts units. Raises ValueError.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text[:60]!r} is no size")
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
    """Return the validator that reads texts as sizes. unit: bytes of one, e.g. 2^30 for GiB."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        number = read_bytes(value, unit)
        return int(number) if unit == 1 else number

    return BeforeValidator(read)


def check_writable(name: str, path: Path) -> None:
    """Raises ConfigError where no file can be written that a setting names. Leaves none behind."""
    known = exists(path)
    try:
        path.open("ab").close()
    except OSError as error:
        allowed = f"a file that can be written ({why_unread(error)})"
        wrong = choice_error(ConfigError, name, str(path), allowed, "Name another file.")
        raise wrong from None
    if not known:
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

    default: MISSING where there is none; allowed: what an error says is allowed, where the type's
    bounds do not say it well, or what finds it out when it is needed; remedy: what the error
    advises; is_size: whether its values may be texts that size_in() reads.
    """
    about = {"help": help, "allowed": allowed, "remedy": remedy, "is_size": is_size}
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class Settings:
    """Base of settings: each field is checked, in their order, when an object is made. within: the
    setting that they are keys of, and a blank, for messages."""

    within: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Raises ConfigError at the first field whose value is not allowed."""
        for one in fields(self):
            value = getattr(self, one.name)
            adapter = self.adapter(one.name)
            try:
                checked = adapter.validate_python(value)
            except (ValidationError, OverflowError, UnicodeError):
                allowed = allowed_by(one) or describe(adapter.json_schema())
                remedy = one.metadata["remedy"]
                name = f"{self.within}{one.name}"
                raise choice_error(ConfigError, name, value, allowed, remedy) from None
            object.__setattr__(self, one.name, checked)

    def adapter(self, name: str) -> TypeAdapter[Any]:
        """What checks the field. A class whose bounds depend on fields above overrides it."""
        return adapters(type(self))[name]


def adapters(cls: type[Settings]) -> Mapping[str, TypeAdapter[Any]]:
    """Field name -> what checks its values."""
    return _adapters_of(cls)  # type: ignore[arg-type]  # a class is hashable


@cache
def _adapters_of(cls: Any) -> Mapping[str, TypeAdapter[Any]]:
    hints = get_type_hints(cls, include_extras=True)
    return {one.name: strictly(hints[one.name]) for one in fields(cls)}


def strictly(hint: Any) -> TypeAdapter[Any]:
    """What checks values of a type, strictly."""
    return TypeAdapter(hint, config=STRICT)


def check_names(cls: type[Settings], given: Mapping[str, Any], what: str, remedy: str) -> None:
    """Raises ConfigError at the first name that the settings do not have."""
    known = [one.name for one in fields(cls)]
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f"Did you mean {near[0]}? " if near else ""
            raise choice_error(ConfigError, what, name, ", ".join(known), meant + remedy)


def describe(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, in words."""
    if "anyOf" in schema:
        kinds = [describe(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return ", ".join(kinds)
    if "const" in schema or "enum" in schema:
        return ", ".join(map(str, schema.get("enum") or [schema["const"]]))
    if schema.get("type") == "boolean":
        return "True, False"
    if schema.get("type") not in ("integer", "number"):
        return "text"
    kind = "whole numbers" if schema["type"] == "integer" else "numbers"
    return f"{kind} from {schema['minimum']} to {schema['maximum']}"


def allowed_by(one: Field[Any]) -> str | None:
    """What the field's declaration says is allowed; None: the bounds of its type say it."""
    said = one.metadata["allowed"]
    return said() if callable(said) else said
