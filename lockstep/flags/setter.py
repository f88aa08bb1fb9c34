"""Conversion of flag values to setting values, for the command line, its file and Python."""

from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any

from lockstep.errors import ConfigError, choice_error
from lockstep.flags.flag import Flag, Form, Kind

LEAVE_OUT = "Leave it out."


class FlagSetter:
    """Collector of the settings that flags have set.

    values: settings so far. repeatable: settings to which each occurrence of a flag adds a value;
    the first one of a source replaces those of earlier sources.
    note: called with the reason why a flag has no effect.
    """

    def __init__(self, repeatable: Collection[str], note: Callable[[str], Any]) -> None:
        self.values: dict[str, Any] = {}
        self._repeatable = repeatable
        self._note = note
        self._set_by_source: set[str] = set()

    def start_source(self) -> None:
        """Begin another source of flags: its values replace those of the sources before."""
        self._set_by_source.clear()

    def apply(self, flag: Flag, shown: str, value: Any) -> None:
        """Check a value and set its setting.

        shown: the flag as the user wrote it, for errors. Raises ConfigError.
        """
        value = _table_spelling(flag, value)
        if any(_is_equal(value, known) for known in flag.no_op):
            self._undo(flag)
            return
        if not flag.takes(value):
            raise _refusal(flag, shown, value)
        if flag.kind is Kind.NOTED:
            self._note(f"{shown} has no effect: {flag.explanation}.")
        elif flag.form is Form.JSON and flag.keys:
            self._apply_object(flag, shown, value)
        elif flag.setting:
            self._assign(flag.setting, _setting_value(flag, value))

    def apply_key(self, flag: Flag, shown: str, key: str, value: Any) -> None:
        """Apply a key of a flag that takes an object.

        A key that the table does not know goes to the flag's setting, which checks it. shown: the
        flag and the key, for errors. Raises ConfigError.
        """
        known = {entry.name: entry for entry in flag.keys}
        if key in known:
            self.apply(known[key], shown, value)
        elif flag.kind is not Kind.ACTS:
            self.apply(flag, shown, {key: value})
        elif flag.setting:
            self._assign(f"{flag.setting}.{key}", value)
        else:
            matches = get_close_matches(key, known, n=1)
            suggestion = f" Did you mean {matches[0]}?" if matches else ""
            what = f"{shown.removesuffix(f'.{key}')} key"
            raise choice_error(ConfigError, what, key, ", ".join(known), LEAVE_OUT + suggestion)

    def _apply_object(self, flag: Flag, shown: str, value: Any) -> None:
        """Apply an object key by key; another value goes to the setting, which checks it."""
        if not isinstance(value, dict):
            if not flag.setting:
                allowed = f"a JSON object with the keys {', '.join(k.name for k in flag.keys)}"
                raise choice_error(ConfigError, shown, value, allowed, "Write one.")
            self._assign(flag.setting, value)
            return
        if flag.setting:
            self._assign(flag.setting, {})
        for key, inner in value.items():
            self.apply_key(flag, f"{shown}.{key}", key, inner)

    def _assign(self, setting: str, value: Any) -> None:
        """Set a setting, or a key of it; None removes the setting."""
        name, _, key = setting.partition(".")
        if value is None and not key:
            self.values.pop(name, None)
        elif key:
            before = self.values.get(name)
            self.values[name] = before if isinstance(before, dict) else {}
            _merge(self.values[name], {key: value})
        elif name in self._repeatable and name in self._set_by_source:
            self.values[name] += value if isinstance(value, list) else [value]
        else:
            starts_list = name in self._repeatable and not isinstance(value, list)
            self.values[name] = [value] if starts_list else value
            self._set_by_source.add(name)

    def _undo(self, flag: Flag) -> None:
        """Remove a value that the flag itself has set before, such as in a file."""
        if flag.setting in self.values and self.values[flag.setting] in flag.mapping.values():
            del self.values[flag.setting]


def _is_equal(value: Any, other: Any) -> bool:
    """Return whether two values are equal and both or neither are bool.

    A value of another type, such as an array, equals no value of the table.
    """
    if not isinstance(value, (bool, int, float, str, list, dict)):
        return False
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)


def _table_spelling(flag: Flag, value: Any) -> Any:
    """Return a text in the table's spelling if it differs from that only in upper case."""
    if not isinstance(value, str):
        return value
    names = [n for n in (*flag.mapping, *flag.allowed, *flag.no_op) if isinstance(n, str)]
    if value in names:
        return value
    return next((name for name in names if name.lower() == value.lower()), value)


def _setting_value(flag: Flag, value: Any) -> Any:
    """Return the value of the setting for a value of the flag."""
    known = isinstance(value, (str, int)) and value in flag.mapping
    return flag.mapping[value] if known else value


def _refusal(flag: Flag, shown: str, value: Any) -> Exception:
    """Return the error of a value that is not allowed."""
    if flag.form is Form.SWITCH:
        written = shown if value else shown.replace("--", "--no-", 1)
        if not shown.startswith("--"):
            written = f"{shown}={value}"
        return ConfigError(f"{written} is not supported: {flag.explanation.removesuffix('.')}.")
    allowed = ", ".join(name or '""' for name in flag.values) or "none, it is not supported"
    remedy = "Choose one of them."
    if flag.kind is Kind.REFUSED:
        remedy = flag.explanation[0].upper() + flag.explanation[1:]
    return choice_error(ConfigError, shown, value, allowed, remedy)


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Overwrite keys of `into` by those of `more`; objects within are merged the same way."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
