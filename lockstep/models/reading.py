"""Strict reading of a checkpoint's config.json: what matters must be there and be known."""

from typing import Any, TypeVar

from lockstep.errors import CheckpointError, choice_error

T = TypeVar("T")
_MISSING = object()


class ConfigReader:
    """Reads settings by name from config.json's dict (text_config unwrapped over the top level)."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = {**raw, **raw.get("text_config", {})}
        if "tie_word_embeddings" not in raw.get("text_config", {}) and "text_config" in raw:
            self.raw["tie_word_embeddings"] = raw.get("tie_word_embeddings", False)

    def get(self, name: str, kind: type[T], default: Any = _MISSING) -> T:
        """The setting as `kind`. Raises CheckpointError if absent without default, or mistyped."""
        value = self.raw.get(name, default)
        if value is None and default is not _MISSING:
            value = default
        if value is _MISSING:
            raise CheckpointError(
                f"config.json has no {name}; expected: {kind.__name__}. Add it to config.json."
            )
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise choice_error(
                CheckpointError, f"config.json {name}", value, kind.__name__, "Mend config.json."
            )
        return value

    def size(self, name: str, default: Any = _MISSING, divides: str | None = None) -> int:
        """The setting as a whole number of 1 or more, which divides the setting `divides`."""
        value, allowed = self.get(name, int, default), "1 or more"
        whole = self.size(divides) if divides else 0
        if divides:
            allowed = f"a divisor of {divides}={whole}"
        if value < 1 or whole % value:
            raise choice_error(
                CheckpointError, f"config.json {name}", value, allowed, "Mend config.json."
            )
        return value

    def only(self, name: str, *allowed: Any, default: Any = _MISSING) -> Any:
        """The setting, which must be one of `allowed` (absent counts as `default`)."""
        value = self.raw.get(name, default)
        if value not in allowed:
            raise choice_error(
                CheckpointError,
                f"config.json {name}",
                None if value is _MISSING else value,
                ", ".join(map(repr, allowed)),
                "This architecture is built for these only.",
            )
        return value
