"""Lists of choices that users write as comma-separated names."""

from collections.abc import Iterable

from lockstep.errors import ConfigError, choice_error


def read_choices(field: str, value: str, choices: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a comma-separated value in the order of choices; "" means all.

    Raises ConfigError for a name that is no choice.
    """
    choices = tuple(choices)
    if not value:
        return choices
    names = [name.strip() for name in value.split(",")]
    unknown = [name for name in names if name not in choices]
    if unknown:
        allowed = ", ".join(choices)
        raise choice_error(ConfigError, field, unknown[0], allowed, "Pass some of them.")
    return tuple(name for name in choices if name in names)
