"""Entries of the flag table, and how values of flags are parsed."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from lockstep.errors import ConfigError, choice_error
from lockstep.settings import FACTORS


class Kind(Enum):
    """Treatment of a flag: it sets something, it is ignored with a note, or it is an error."""

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
    """Flag of `vllm serve`, or key of a flag that takes a JSON object.

    name: name without leading dashes. short: other spellings, with leading dashes. says: effect
    (ACTS), what Lockstep does instead (NOTED), or remedy (REFUSED). setting: Lockstep's setting
    that the flag sets, or SETTING.KEY; "" for none. means: value of the flag -> value of the
    setting, None to leave the setting at its default. same: values that ask for what Lockstep does
    anyway, accepted without effect. allowed: the only other values; empty if the setting checks
    them. keys: known keys of the object.
    """

    name: str
    kind: Kind
    explanation: str
    form: Form = Form.TEXT
    short: tuple[str, ...] = ()
    setting: str = ""
    mapping: Mapping[Any, Any] = field(default_factory=dict)
    no_op: tuple[Any, ...] = ()
    allowed: tuple[str, ...] = ()
    keys: tuple["Flag", ...] = ()

    @property
    def values(self) -> list[str]:
        """Return the values that the table knows, as written."""
        known = [*self.no_op, *self.mapping, *self.allowed]
        return list(dict.fromkeys(spelled(value) for value in known))

    def takes(self, value: Any) -> bool:
        """Return whether a value outside of `no_op` has an effect or is harmless."""
        if self.kind is Kind.REFUSED:
            return False
        if self.allowed or (self.kind is Kind.ACTS and not self.setting and not self.keys):
            return spelled(value) in self.values
        return True


def acts(name: str, explanation: str, form: Form = Form.TEXT, **more: Any) -> Flag:
    """Create a flag that sets a setting, by default the setting of the same name."""
    return Flag(name, Kind.ACTS, explanation, form, **{"setting": name.replace("-", "_"), **more})


def noted(name: str, explanation: str, form: Form = Form.TEXT, **more: Any) -> Flag:
    """Create a flag that tunes another engine: it is accepted with a note."""
    return Flag(name, Kind.NOTED, explanation, form, **more)


def refused(name: str, explanation: str, form: Form = Form.TEXT, **more: Any) -> Flag:
    """Create a flag that is refused: it would change outputs, or is not supported."""
    return Flag(name, Kind.REFUSED, explanation, form, **more)


def only_of_server(flag: Flag) -> Flag:
    """Return a flag for a command without its setting: only the values in `no_op` are allowed."""
    remedy = "only `lockstep serve` has it; leave it out."
    return replace(flag, kind=Kind.REFUSED, setting="", explanation=remedy)


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
        return _switch(shown, text) if written else True
    if flag.form is Form.MANY:
        return _many(written)
    if text in flag.mapping:
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
    match = re.fullmatch(r"(-?\d+)(\.\d+)?([kKmMgG]?)", text.strip())
    factor = FACTORS.get(match[3], 1) if match else 0
    # As in vLLM, a fraction needs a decimal suffix: 1.5k is 1,500, and 1.5K is an error.
    is_valid = match is not None and (not match[2] or (factor > 1 and match[3].islower()))
    if match is None or not is_valid or len(text) > 20:
        remedy = "Write such a number."
        raise choice_error(ConfigError, shown, text, Form.SIZE.value, remedy)
    return round(float(match[1] + match[2]) * factor) if match[2] else int(match[1]) * factor


def _number(shown: str, text: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise choice_error(ConfigError, shown, text, "a number", "Write one.")


def _switch(shown: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise choice_error(ConfigError, shown, text, "no value, true or false", "Leave it out.")
    return text.lower() == "true"


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _many(written: list[str]) -> list[Any]:
    """Return the list of words, or the entries of a JSON list that is the only word."""
    entries = _json(written[0]) if len(written) == 1 and written[0].startswith("[") else None
    return entries if isinstance(entries, list) else list(written)
