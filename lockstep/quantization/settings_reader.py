"""Strict reader of a checkpoint's quantization_config: unknown settings are errors."""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lockstep.errors import CheckpointError, LockstepError, choice_error
from lockstep.quantization.ignored_settings import BY_FORMAT, is_switched_off
from lockstep.quantization.weight_format import CheckpointLinear

T = TypeVar("T")
SETTINGS_PREFIX = "quantization_config."
EDIT_REMEDY = "Correct config.json, or serve a checkpoint that was quantized differently."
SUPPORTED_REMEDY = (
    "Weight formats are built for these only; serve a checkpoint that was quantized differently."
)


ANYWHERE = re.compile(r"\.\*((?:\\\W|[\w-])+)(?:\.\*)?")
"""Regular expression of patterns that look for one escaped text anywhere in a name."""


class NamePattern:
    """Regular expression of module names.

    substring: text of a pattern that only looks for it anywhere, else None. Tools write one pattern
    per layer, and there are up to 30,000 experts, so such a pattern runs no regular expression.

    Raises:
        re.error: the text is no regular expression.
    """

    def __init__(self, text: str) -> None:
        self.compiled = re.compile(text)
        match = ANYWHERE.fullmatch(text)
        self.substring = None if match is None else re.sub(r"\\(\W)", r"\1", match[1])

    def match(self, module: CheckpointLinear) -> bool:
        """Return whether the pattern matches the start of one of the module's names."""
        return self._matches(module, self.compiled.match)

    def search(self, module: CheckpointLinear) -> bool:
        """Return whether the pattern matches anywhere in one of the module's names."""
        return self._matches(module, self.compiled.search)

    def _matches(self, module: CheckpointLinear, find: Callable[[str], object]) -> bool:
        if self.substring is not None:
            return self.substring in module.joined_names
        return any(find(name) for name in module.names)


class RecordedSettings(dict[str, Any]):
    """Settings that record which of them were read."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.names_read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names_read.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.names_read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names_read.add(str(name))
        return super().__contains__(name)


class SettingsReader:
    """Reader of settings by name. within: the part of config.json, for messages.

    null counts as absent. refuse_unread() raises for settings that no code has read.
    """

    def __init__(self, raw: Mapping[str, Any], within: str = SETTINGS_PREFIX) -> None:
        self.raw = RecordedSettings({n: value for n, value in raw.items() if value is not None})
        self.within = within
        self._inner: list[SettingsReader] = []

    def has(self, name: str) -> bool:
        """Return whether the setting is present."""
        return name in self.raw

    def present_name(self, *names: str) -> str:
        """Return the first of a setting's names that is present, or the first name."""
        return next((name for name in names if name in self.raw), names[0])

    def get(self, name: str, kind: type[T], default: T) -> T:
        """Return the setting.

        Raises:
            CheckpointError: it is not of type `kind`.
        """
        value = self.raw.get(name, default)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(name, value, f"a value of type {kind.__name__}", EDIT_REMEDY)
        return value

    def one_of(self, name: str, *allowed: Any, default: Any = None) -> Any:
        """Return the setting, which must be one of `allowed`; absent counts as `default`."""
        value = self.raw.get(name, default)
        if not any(type(value) is type(known) and value == known for known in allowed):
            raise self.error(name, value, ", ".join(map(repr, allowed)), SUPPORTED_REMEDY)
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of names; the setting may nest lists, or be one comma-separated text."""
        value = self.raw.get(name, [])
        entries = value.split(",") if isinstance(value, str) else value
        if not isinstance(entries, list):
            raise self.error(name, value, "a list of names", EDIT_REMEDY)
        flat = [x for entry in entries for x in (entry if isinstance(entry, list) else [entry])]
        if not all(isinstance(text, str) for text in flat):
            raise self.error(name, value, "a list of names", EDIT_REMEDY)
        return tuple(text.strip() for text in flat if text.strip())

    def parts(self, name: str) -> dict[str, "SettingsReader"]:
        """Return a reader for each object in a setting that is an object of objects."""
        value: dict[Any, Any] = self.get(name, dict, {})
        for key, part in value.items():
            if not isinstance(part, dict | None):
                raise self.error(f"{name}[{key[:100]!r}]", part, "an object", EDIT_REMEDY)
        readers = {
            key: SettingsReader(part or {}, f"{self.within}{name}[{key[:100]!r}].")
            for key, part in value.items()
        }
        self._inner += readers.values()
        return readers

    def part(self, name: str) -> "SettingsReader":
        """Return the reader of an object within the settings; it is empty where that is absent."""
        raw: dict[str, Any] = self.get(name, dict, {})
        reader = SettingsReader(raw, f"{self.within}{name}.")
        self._inner.append(reader)
        return reader

    def replaced(self, name: str, value: Any) -> "SettingsReader":
        """Return a reader of the same settings, but for one value."""
        reader = SettingsReader({**self.raw, name: value}, self.within)
        # Shared: a setting that the copy reads counts as read here too.
        reader.raw.names_read = self.raw.names_read
        return reader

    def ignore(self, *names: str) -> None:
        """Mark settings as read that other settings of the same object leave without effect."""
        self.raw.names_read.update(names)

    def refuse_unread(self, without_effect: Mapping[str, str]) -> None:
        """Raise CheckpointError for a setting that no code has read and that may matter.

        Settings within the objects that part() and parts() returned are checked too.
        without_effect: names of settings that may be ignored, each with the reason.
        """
        for name, value in self.raw.items():
            harmless = name in self.raw.names_read or name in without_effect or name.startswith("_")
            if harmless or is_switched_off(value):
                continue
            raise self.error(
                name[:100],
                value,
                "settings that this weight format is built for, or null",
                "If it changes no weight of this checkpoint, set it to null in config.json; else "
                "serve a checkpoint that was quantized differently.",
            )
        for reader in self._inner:
            reader.refuse_unread(without_effect)

    def pattern(self, name: str, text: str) -> NamePattern:
        """Compile a regular expression that the setting contains."""
        try:
            return NamePattern(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise self.error(name, text, f"regular expressions ({error})", EDIT_REMEDY) from None

    def error(self, name: str, value: object, allowed: str, remedy: str) -> LockstepError:
        """Return the CheckpointError that names the setting, its value and what is allowed."""
        field = f"config.json {self.within}{name}"
        return choice_error(CheckpointError, field, value, allowed, remedy)


def read_strictly(
    settings: Mapping[str, Any], kind: str, build: Callable[[SettingsReader], T]
) -> T:
    """Return what `build` makes of the settings of a format (kind: its name in BY_FORMAT).

    Raises CheckpointError for a setting that may matter and that `build` has not read.
    """
    reader = SettingsReader(settings)
    weight_format = build(reader)
    reader.refuse_unread(BY_FORMAT[kind])
    return weight_format
