"""A command line in vLLM's words becomes one in Lockstep's: Reader.line of given words.

The command's own options are flags as well, of their own names. A later value takes the place of an
earlier one, but for options that may be given again; the command line's take those of --config.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

from lockstep.cli.command import unknown_option
from lockstep.cli.vllm.config_file import read_config
from lockstep.errors import ConfigError, choice_error
from lockstep.flags.flag import SWITCHED, Flag, Form, Kind, acts, read_value
from lockstep.flags.setter import FlagSetter
from lockstep.flags.table import all_flags

CONFIG = "config"
"""The option that names a file of flags; the command itself has no use for it."""


class Option:
    """An option of the command itself: its name without dashes, and how its values are written.

    several: it may be given again; off: whether --no-... turns it off; short: other spellings.
    """

    def __init__(
        self, name: str, switch: bool, several: bool, off: bool, short: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.switch = switch
        self.several = several
        self.off = off
        self.short = short

    def flag(self) -> Flag:
        """The option as a flag that sets it."""
        form = Form.MANY if self.several else Form.TEXT
        return acts(self.name, "", Form.SWITCH if self.switch else form, short=self.short)

    def words(self, value: Any) -> list[str]:
        """A value of it on the command line."""
        if self.switch:
            on = [f"--{self.name}"]
            return on if value else [f"--no-{self.name}"] * self.off
        if isinstance(value, dict):
            return [f"--{self.name}={json.dumps(value)}"]
        entries = value if isinstance(value, list) else [value]
        texts = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
        if self.several:
            return [f"--{self.name}={text}" for text in texts]
        return [f"--{self.name}={','.join(texts)}"]


class Reader:
    """Reads a command line. note: takes the line that is told of a flag without effect."""

    def __init__(self, options: Iterable[Option], note: Callable[[str], Any]) -> None:
        self._options = {option.name.replace("-", "_"): option for option in options}
        several = [name for name, option in self._options.items() if option.several]
        self._setter = FlagSetter(several, note)
        own = [option.flag() for option in self._options.values()]
        known = [flag for flag in all_flags() if self._knows(flag)]
        self._flags = {flag.name: flag for flag in (*own, *known)}
        self._short = {short: flag for flag in (*known, *own) for short in flag.short}
        self._lists: dict[tuple[str, ...], list[Any]] = {}

    def line(self, words: list[str]) -> list[str]:
        """The command line in the command's own options. Raises ConfigError."""
        given, rest = self._split(words)
        for name, written in given:
            if self._find(name)[0].name == CONFIG and written:
                self._read_file(written[0])
        self._setter.start_source()
        for name, written in given:
            self._take(name, written)
        own = [self._options[name].words(value) for name, value in self._setter.values.items()]
        return [word for part in own for word in part] + rest

    def _knows(self, flag: Flag) -> bool:
        """Whether the command has what the flag sets."""
        return not flag.setting or flag.setting.partition(".")[0] in self._options

    def _split(self, words: list[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
        """([(flag as written, what stands behind it)], what is no flag)."""
        given: list[tuple[str, list[str]]] = []
        rest: list[str] = []
        at = 0
        while at < len(words):
            word = words[at]
            at += 1
            if word == "--":
                return given, [*rest, *words[at - 1 :]]
            if not self._is_flag(word):
                rest.append(word)
                continue
            name, equals, text = word.partition("=")
            name, attached = self._attached(name)
            if equals or attached:
                given.append((name, [attached + equals + text if attached else text]))
                continue
            most = self._most(name)
            written: list[str] = []
            while len(written) < most and at < len(words) and self._is_value(words[at], most):
                written.append(words[at])
                at += 1
            given.append((name, written))
        return given, rest

    def _is_flag(self, word: str) -> bool:
        """Whether it begins with a dash and is no negative number."""
        return len(word) > 1 and word[0] == "-" and not word[1:2].isdigit()

    def _is_value(self, word: str, most: float) -> bool:
        """Whether it may stand behind a flag; the one value of a flag may begin with one dash."""
        named = word.startswith("--") or word.partition("=")[0].partition(".")[0] in self._short
        return not named if most == 1 else not self._is_flag(word)

    def _attached(self, name: str) -> tuple[str, str]:
        """-O3 -> ("-O", "3"): a flag of one letter may have its value behind it."""
        alone = name.startswith("--") or name.partition(".")[0] in self._short
        if alone or name[:2] not in self._short or len(name) == 2:
            return name, ""
        return name[:2], name[2:]

    def _most(self, name: str) -> float:
        """Values that may stand behind a flag."""
        flag, _, path = self._find(name)
        if path:
            return 1
        return {Form.SWITCH: 0, Form.MANY: float("inf")}.get(flag.form, 1)

    def _find(self, name: str) -> tuple[Flag, bool, list[str]]:
        """(the flag, whether --no- stands before it, the keys behind its dots)."""
        head, *path = name.split(".")
        if head in self._short:
            return self._short[head], False, path
        plain = head.removeprefix("--").replace("_", "-")
        if head.startswith("--"):
            if plain in self._flags:
                return self._flags[plain], False, path
            positive = self._flags.get(plain.removeprefix("no-"))
            if plain.startswith("no-") and positive and positive.form is Form.SWITCH:
                return positive, True, path
        known = [f"--{name}" for name in self._flags]
        more = "; docs/vllm_flags.md says what became of vLLM's"
        raise unknown_option(head if head.startswith("-") else f"--{head}", known, more)

    def _take(self, name: str, written: list[str]) -> None:
        """Does what a flag asks for. Raises ConfigError."""
        flag, negated, path = self._find(name)
        shown = "--" + ".".join([flag.name, *path])
        if not written and flag.form is not Form.SWITCH:
            raise ConfigError(f"{name} needs a value. Write one after it, or leave it out.")
        if path:
            self._take_key(flag, path, read_value(_JSON, shown, written))
            return
        value = read_value(flag, shown, written)
        self._setter.apply(flag, shown, not value if negated else value)

    def _take_key(self, flag: Flag, path: list[str], value: Any) -> None:
        """--flag.key.deeper value."""
        shown = f"--{flag.name}.{path[0]}"
        if flag.form is not Form.JSON:
            raise ConfigError(f"{shown}: --{flag.name} has no keys. Leave the dot out.")
        if path[-1].endswith("+"):
            path = [*path[:-1], path[-1].removesuffix("+")]
            value = self._longer(flag, path, value)
        for key in reversed(path[1:]):
            value = {key: value}
        self._setter.apply_key(flag, shown, path[0], value)

    def _longer(self, flag: Flag, path: list[str], value: Any) -> list[Any]:
        """--flag.key+ value: what was written of the list before, and this."""
        place = (flag.name, *path)
        entries = value if isinstance(value, list) else str(value).split(",")
        read = [
            read_value(_JSON, flag.name, [one]) if isinstance(one, str) else one for one in entries
        ]
        self._lists[place] = [*self._lists.get(place, []), *read]
        return self._lists[place]

    def _read_file(self, path: str) -> None:
        """Takes the flags of a YAML file: by name, one mapping. Raises ConfigError."""
        for name, value in read_config(path).items():
            if not isinstance(name, str) or name.startswith("-") or name == CONFIG:
                allowed = f"a flag's name, other than {CONFIG}"
                remedy = "Write flags without dashes."
                raise choice_error(ConfigError, f"{path}: flag", name, allowed, remedy)
            if value not in (None, []):
                self._take(f"--{name}", _written(value))


_JSON = Flag("", Kind.ACTS, "", Form.JSON)
"""How the value of a key is written: JSON, or text."""


def _written(value: Any) -> list[str]:
    """A value of a file as it would stand on the command line."""
    if isinstance(value, bool):
        return [next(text for text, known in SWITCHED.items() if known is value)]
    if isinstance(value, list):
        return [entry if isinstance(entry, str) else json.dumps(entry) for entry in value]
    return [value if isinstance(value, str) else json.dumps(value, default=str)]
