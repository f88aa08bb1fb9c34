"""Strict reader of config.json: required settings must be present, unknown ones are errors."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, TypeVar

from lockstep.errors import CheckpointError, LockstepError, choice_error
from lockstep.models.ignored_settings import is_off, reason_of
from lockstep.quantization.settings_reader import RecordedSettings

T = TypeVar("T")
_MISSING = object()
MAX_SIZE = 1 << 24
MAX_LAYERS = 1024
MAX_EXPERTS = 4096
MAX_NUMBER = 10**30
"""Bounds far above the values of any real model, so that a wrong size fails before any work."""

DRAFTER_REMEDY = (
    "If it changes no draft, set it to null in the drafter's config.json; else name another "
    "drafter."
)
BUILT_FOR = "This architecture is built for these only."


class ConfigReader:
    """Reader of settings by name (text_config is merged over the top level).

    It records which settings were read, for refuse_unread(). within: prefix of the settings' names
    in messages, such as "rope_parameters.". file: name of the file, for messages.
    """

    def __init__(self, raw: dict[str, Any], within: str = "", file: str = "config.json") -> None:
        self.within = within
        self.file = file
        self.raw = RecordedSettings(raw)
        self.raw = RecordedSettings({**raw, **self.get("text_config", dict, {})})

    def part(self, name: str) -> "ConfigReader":
        """Return a reader of an object within the settings; empty if it is absent."""
        return ConfigReader(self.get(name, dict, {}), f"{name}.", self.file)

    def get(self, name: str, kind: type[T], default: Any = _MISSING) -> T:
        """Return the setting; null counts as absent if there is a default.

        Raises:
            CheckpointError: it is absent without a default, or not of type `kind`.
        """
        value = self.raw.get(name, default)
        if value is None and default is not _MISSING:
            value = default
        if value is _MISSING:
            raise CheckpointError(
                f"{self.file} has no {self.within}{name}; expected: {kind.__name__}. "
                f"Add it to {self.file}."
            )
        # JSON writes 1000000 where a float is meant; float() of a huge int would overflow.
        if kind is float and type(value) is int:
            self.need(abs(value) <= MAX_NUMBER, name, f"numbers up to {MAX_NUMBER:.0e}")
            value = float(value)
        # bool is a subclass of int, but true is no count.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(name, value, kind.__name__)
        return value

    def size(self, name: str, default: Any = _MISSING, max_value: int = MAX_SIZE) -> int:
        """Return a count of at least 1."""
        value = self.get(name, int, default)
        self.need(1 <= value <= max_value, name, f"1 or more, up to {max_value}")
        return value

    def positive(self, name: str, default: Any = _MISSING) -> float:
        """Return a finite number above 0."""
        value = self.get(name, float, default)
        self.need(isfinite(value) and value > 0, name, "finite numbers above 0")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` finite numbers above 0."""
        values = self.get(name, list)
        kinds = (int, float)
        good = all(type(v) in kinds and 0 < v <= MAX_NUMBER for v in values)
        self.need(good and len(values) == count, name, f"{count} finite numbers above 0")
        return tuple(float(v) for v in values)

    def one_of(self, name: str, *allowed: Any, default: Any = _MISSING) -> Any:
        """Return the setting, which must be one of `allowed`; absent counts as `default`."""
        value = self.raw.get(name, default)
        # Types must be equal too: 1 == True, but 1 may mean something else in a file.
        if not any(type(value) is type(a) and value == a for a in allowed):
            shown = None if value is _MISSING else value
            raise self.error(name, shown, ", ".join(map(repr, allowed)), BUILT_FOR)
        return value

    def need(self, condition: bool, name: str, allowed: str) -> None:
        """Raise CheckpointError for a setting unless the condition is met."""
        if not condition:
            raise self.error(name, self.raw.get(name), allowed)

    def refuse_unread(self, without_effect: Mapping[str, str], remedy: str = "") -> None:
        """Raise CheckpointError for a setting that no code has read and that may matter.

        A setting does not matter if its value switches it off, or if the shared list or the
        family's list says why it changes no answer. without_effect: the family's list, name ->
        reason. remedy: what the user can do; "" for the advice to use hf_overrides.
        """
        for name, value in self.raw.items():
            known = name in self.raw.names_read or reason_of(name, without_effect) is not None
            if not known and not is_off(name, value):
                raise self.error(
                    name[:100],
                    value,
                    "settings that this architecture is built for, or null",
                    remedy
                    or "If it changes no answer of this model, set it to null (hf_overrides: "
                    f"'{{\"{name[:100]}\": null}}'); else serve another checkpoint.",
                )

    def layer_types(self, layers: int, known: set[str], default: list[str]) -> tuple[str, ...]:
        """Return the type of each layer; all must be known."""
        kinds = self.get("layer_types", list, default)
        for kind in kinds:
            if not isinstance(kind, str) or kind not in known:
                raise self.error("layer_types", kind, ", ".join(sorted(known)), BUILT_FOR)
        self.need(len(kinds) == layers, "layer_types", f"one for each of {layers} layers")
        return tuple(kinds)

    def error(self, name: str, value: object, allowed: str, remedy: str = "") -> LockstepError:
        """Return the CheckpointError that names the setting, its value and what is allowed."""
        field = f"{self.file} {self.within}{name}"
        return choice_error(
            CheckpointError, field, value, allowed, remedy or f"Correct {self.file}."
        )
