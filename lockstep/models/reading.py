"""Strict reading of a checkpoint's config.json: what matters must be there and be known."""

from math import isfinite
from typing import Any, TypeVar

from lockstep.errors import CheckpointError, LockstepError, choice_error

T = TypeVar("T")
_MISSING = object()
MOST_SIZE, MOST_LAYERS, MOST_NUMBER = 1 << 24, 1024, 10**30
"""Bounds that no real model comes near; whether what is asked fits into memory is seen later."""


class ConfigReader:
    """Reads settings by name from config.json's dict (text_config unwrapped over the top level).

    `within` names the part of the file that this dict is, for messages.
    """

    def __init__(self, raw: dict[str, Any], within: str = "") -> None:
        self.within, self.raw = within, raw
        self.raw = {**raw, **self.get("text_config", dict, {})}

    def get(self, name: str, kind: type[T], default: Any = _MISSING) -> T:
        """The setting as `kind`; null counts as absent where there is a default.

        Raises CheckpointError if absent without default, or mistyped.
        """
        value = self.raw.get(name, default)
        if value is None and default is not _MISSING:
            value = default
        if value is _MISSING:
            raise CheckpointError(
                f"config.json has no {self.within}{name}; expected: {kind.__name__}. "
                "Add it to config.json."
            )
        if kind is float and type(value) is int:
            self.need(abs(value) <= MOST_NUMBER, name, f"numbers up to {MOST_NUMBER:.0e}")
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self._error(name, value, kind.__name__)
        return value

    def size(self, name: str, default: Any = _MISSING, most: int = MOST_SIZE) -> int:
        """The setting as a count of at least 1."""
        value = self.get(name, int, default)
        self.need(1 <= value <= most, name, f"1 or more, up to {most}")
        return value

    def positive(self, name: str) -> float:
        """The setting as a finite number above 0."""
        value = self.get(name, float)
        self.need(isfinite(value) and value > 0, name, "finite numbers above 0")
        return value

    def only(self, name: str, *allowed: Any, default: Any = _MISSING) -> Any:
        """The setting, which must be one of `allowed` (absent counts as `default`)."""
        value = self.raw.get(name, default)
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise choice_error(
                CheckpointError,
                f"config.json {self.within}{name}",
                None if value is _MISSING else value,
                ", ".join(map(repr, allowed)),
                "This architecture is built for these only.",
            )
        return value

    def need(self, holds: bool, name: str, allowed: str) -> None:
        """Raises CheckpointError about a setting unless `holds`."""
        if not holds:
            raise self._error(name, self.raw.get(name), allowed)

    def layer_types(self, layers: int, known: set[str], default: list[str]) -> tuple[str, ...]:
        """The kind of each layer, all of them known."""
        kinds = self.get("layer_types", list, default)
        for kind in kinds:
            if not isinstance(kind, str) or kind not in known:
                raise self._error("layer_types", kind, ", ".join(sorted(known)))
        self.need(len(kinds) == layers, "layer_types", f"one for each of {layers} layers")
        return tuple(kinds)

    def plain_rope(self) -> "ConfigReader":
        """The rotary settings: rope_parameters, or what files before it have at the top level.

        Raises CheckpointError where positions are scaled, or where two places disagree.
        """
        found = {n: self.raw.get(n) for n in ("rope_theta", "partial_rotary_factor")}
        for part in ("rope_scaling", "rope_parameters"):
            inner = ConfigReader(self.get(part, dict, {}), f"{part}.")
            for name in ("rope_type", "type"):
                inner.only(name, "default", default="default")
            for name, value in inner.raw.items():
                if found.get(name) not in (None, value):
                    raise inner._error(name, value, f"{found[name]!r} as elsewhere in the file")
                found[name] = value
        return ConfigReader({n: v for n, v in found.items() if v is not None}, "rope_parameters.")

    def _error(self, name: str, value: object, allowed: str) -> LockstepError:
        field = f"config.json {self.within}{name}"
        return choice_error(CheckpointError, field, value, allowed, "Mend config.json.")
