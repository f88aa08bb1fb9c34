"""Entries of the flag table, and how values of flags are parsed."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lockstep.errors import ConfigError, choice_error
from lockstep.settings import FACTORS

SWITCHED: Mapping[str, bool] = {"true": True, "false": False}


class Kind(Enum):
    """Treatment of a flag."""

    ACTS = "acts"
    NOTED = "noted"
    REFUSED = "refused"


class Form(Enum):
    """Syntax of a flag's value."""

    SWITCH = "none; --no-... turns it off"
    TEXT = "text"
    SIZE = "a whole number, or one followed by k, K, m, M, g or G"
    NUMBER = "a number"
    JSON = "a JSON object"
    MANY = "one or several"


@dataclass(frozen=True)
class Flag:
    """One flag, or one key of a flag that takes a JSON object.

    name: without dashes in front; short: other spellings, with theirs. says: what it does here,
    what Lockstep does instead, or the remedy. setting: Lockstep's setting that it sets, a dot
    before a key of it; "" for none. means: value -> what the setting gets, None: left out. same:
    values that ask for what is done anyway; nothing comes of them. allowed: the only values that
    are taken besides these; none: the setting decides. keys: of the object.
    """

    name: str
    kind: Kind
    says: str
    form: Form = Form.TEXT
    short: tuple[str, ...] = ()
    setting: str = ""
    means: Mapping[Any, Any] = field(default_factory=dict)
    same: tuple[Any, ...] = ()
    allowed: tuple[str, ...] = ()
    keys: tuple["Flag", ...] = ()

    @property
    def values(self) -> list[str]:
        """Return the values that the table knows, as written."""
        known = [*self.same, *self.means, *self.allowed]
        return list(dict.fromkeys(spelled(value) for value in known))

    def takes(self, value: Any) -> bool:
        """Return whether a value outside of `same` has an effect or is harmless."""
        if self.kind is Kind.REFUSED:
            return False
        if self.allowed or (self.kind is Kind.ACTS and not self.setting and not self.keys):
            return spelled(value) in self.values
        return True


def acts(name: str, says: str, form: Form = Form.TEXT, **more: Any) -> Flag:
    """Create a flag that sets a setting, by default the one of its own name."""
    return Flag(name, Kind.ACTS, says, form, **{"setting": name.replace("-", "_"), **more})


def noted(name: str, says: str, form: Form = Form.TEXT, **more: Any) -> Flag:
    """Create a flag that tunes another engine: it is accepted with a note."""
    return Flag(name, Kind.NOTED, says, form, **more)


def refused(name: str, says: str, form: Form = Form.TEXT, **more: Any) -> Flag:
    """Create a flag that is refused: it would change outputs, or is not supported."""
    return Flag(name, Kind.REFUSED, says, form, **more)


def spelled(value: Any) -> str:
    """Return a value as written on the command line."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return value if isinstance(value, str) else json.dumps(value)


def read_value(flag: Flag, shown: str, written: list[str]) -> Any:
    """Parse the values of a flag by its form. shown: the flag, for errors. Raises ConfigError.

    Invalid JSON stays text; the setting then reports the error.
    """
    if len(written) > 1 and flag.form is not Form.MANY:
        raise choice_error(ConfigError, shown, written, "one value", "Write one.")
    text = written[0] if written else ""
    if flag.form is Form.SWITCH:
        return _one_of(SWITCHED, shown, text.lower()) if written else True
    if flag.form is Form.MANY:
        return _many(written)
    if text in flag.means:
        return text
    if flag.form is Form.SIZE:
        return read_size(shown, text)
    if flag.form is Form.NUMBER:
        return _number(shown, text)
    if flag.form is Form.JSON:
        return _json(text)
    return text


def read_size(shown: str, text: str) -> int:
    """Parse 8192, 8k (8,000), 8K (8,192) or 1.5k (1,500). Raises ConfigError."""
    found = re.fullmatch(r"(-?\d+)(\.\d+)?([kKmMgG]?)", text.strip())
    factor = FACTORS.get(found[3], 1) if found else 0
    whole = found is not None and (not found[2] or (factor > 1 and found[3].islower()))
    if found is None or not whole or len(text) > 20:
        remedy = "Write such a number."
        raise choice_error(ConfigError, shown, text, Form.SIZE.value, remedy)
    return round(float(found[1] + found[2]) * factor) if found[2] else int(found[1]) * factor


def _number(shown: str, text: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise choice_error(ConfigError, shown, text, "a number", "Write one.")


def _one_of(known: Mapping[str, bool], shown: str, text: str) -> bool:
    if text not in known:
        raise choice_error(ConfigError, shown, text, "no value, true or false", "Leave it out.")
    return known[text]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _many(written: list[str]) -> list[Any]:
    """Return words one by one; a single word may be a JSON list."""
    found = _json(written[0]) if len(written) == 1 and written[0].startswith("[") else None
    return found if isinstance(found, list) else list(written)
