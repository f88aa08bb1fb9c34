"""Strict reading of what a checkpoint says of its weight format."""

from collections.abc import Mapping
from typing import Any

from lockstep.errors import CheckpointError, LockstepError, choice_error

REMEDY = "Serve a checkpoint that is packed otherwise, or one that is not packed."


class Settings:
    """Settings by name. where: what they stand in, for messages; names come behind it."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def only(self, name: str, *allowed: Any, default: Any = None) -> Any:
        """The setting, which must be one of `allowed`; absent, it counts as `default`.

        Raises CheckpointError.
        """
        value = self.raw.get(name, default)
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise self.error(name, ", ".join(map(repr, allowed)))
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings; absent or null, it is empty. Raises CheckpointError."""
        value = self.raw.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.error(name, "a list of strings")
        return tuple(value)

    def parts(self, name: str) -> "dict[str, Settings]":
        """An object of objects; absent or null, it is empty. Raises CheckpointError."""
        value = self.raw.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
            raise self.error(name, "an object of objects")
        return {key: Settings(part, f"{self.field(name)}.{key}") for key, part in value.items()}

    def part(self, name: str) -> "Settings | None":
        """An object; None where it is absent or null. Raises CheckpointError."""
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Settings(value, self.field(name))

    def empty(self, name: str) -> None:
        """Raises CheckpointError where the setting says anything: what it asks for is not built."""
        if self.raw.get(name):
            raise self.error(name, "none")

    def field(self, name: str) -> str:
        """What messages call a setting."""
        return f"{self.where}.{name}"

    def error(self, name: str, allowed: str) -> LockstepError:
        """The CheckpointError that says what a setting is and what it may be."""
        value = self.raw.get(name)
        return choice_error(CheckpointError, self.field(name), value, allowed, REMEDY)
