"""Translate a command line with vLLM's flags to one with Lockstep's options.

The command's options are flags too, under their own names. A later value replaces an earlier one,
unless the option is repeatable. The command line overrides the file of --config.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

from lockstep.cli.command import unknown_option
from lockstep.cli.vllm.config_file import read_config
from lockstep.errors import ConfigError, choice_error
from lockstep.flags.flag import Flag, Form, Kind, acts, only_of_server, read_value
from lockstep.flags.setter import FlagSetter
from lockstep.flags.table import all_flags

CONFIG = "config"
"""Option that names a file of flags; the reader handles it, not the command."""


class Option:
    """Option of the command: its name without dashes, and the form of its values.

    repeatable: it may occur several times. negatable: --no-... turns it off. short: short names.
    """

    def __init__(
        self,
        name: str,
        switch: bool,
        repeatable: bool,
        negatable: bool,
        short: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.switch = switch
        self.repeatable = repeatable
        self.negatable = negatable
        self.short = short

    def flag(self) -> Flag:
        """Return the flag that sets the option."""
        form = Form.MANY if self.repeatable else Form.TEXT
        return acts(self.name, "", Form.SWITCH if self.switch else form, short=self.short)

    def words(self, value: Any) -> list[str]:
        """Return the words that set the option to a value."""
        if self.switch:
            on = [f"--{self.name}"]
            return on if value else [f"--no-{self.name}"] * self.negatable
        if isinstance(value, dict):
            return [f"--{self.name}={json.dumps(value)}"]
        entries = value if isinstance(value, list) else [value]
        texts = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
        if self.repeatable:
            return [f"--{self.name}={text}" for text in texts]
        return [f"--{self.name}={','.join(texts)}"]


class Reader:
    """Reader of command lines. note: called with a line about each flag without effect."""

    def __init__(self, options: Iterable[Option], note: Callable[[str], Any]) -> None:
        self._options = {option.name.replace("-", "_"): option for option in options}
        repeatable = [name for name, option in self._options.items() if option.repeatable]
        self._setter = FlagSetter(repeatable, note)
        command_flags = [option.flag() for option in self._options.values()]
        vllm_flags = [
            flag if self._has_setting(flag) else only_of_server(flag)
            for flag in all_flags()
            if self._has_setting(flag) or flag.no_op
        ]
        self._flags = {flag.name: flag for flag in (*command_flags, *vllm_flags)}
        self._short = {
            short: flag for flag in (*vllm_flags, *command_flags) for short in flag.short
        }
        self._lists: dict[tuple[str, ...], list[Any]] = {}

    def line(self, words: list[str]) -> list[str]:
        """Translate a command line to the command's options. Raises ConfigError."""
        occurrences, rest = self._split(words)
        # The file first: the command line overrides it.
        for name, values in occurrences:
            if self._find(name)[0].name == CONFIG and values:
                self._read_file(values[0])
        self._setter.start_source()
        for name, values in occurrences:
            self._apply(name, values)
        words_by_option = [
            self._options[name].words(value) for name, value in self._setter.values.items()
        ]
        return [word for option_words in words_by_option for word in option_words] + rest

    def _has_setting(self, flag: Flag) -> bool:
        """Return whether the command has the setting of a flag."""
        return not flag.setting or flag.setting.partition(".")[0] in self._options

    def _split(self, words: list[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
        """Return ([(flag as written, its values)], the other words)."""
        occurrences: list[tuple[str, list[str]]] = []
        positional: list[str] = []
        index = 0
        while index < len(words):
            word = words[index]
            index += 1
            # The words after -- are positional.
            if word == "--":
                return occurrences, [*positional, *words[index - 1 :]]
            if not self._is_flag(word):
                positional.append(word)
                continue
            name, equals, text = word.partition("=")
            name, attached = self._split_attached(name)
            if equals or attached:
                occurrences.append((name, [attached + equals + text if attached else text]))
                continue
            max_values = self._max_values(name)
            values: list[str] = []
            while (
                len(values) < max_values
                and index < len(words)
                and self._is_value(words[index], max_values)
            ):
                values.append(words[index])
                index += 1
            occurrences.append((name, values))
        return occurrences, positional

    def _is_flag(self, word: str) -> bool:
        """Return whether a word begins with a dash and is no negative number."""
        return len(word) > 1 and word[0] == "-" and not word[1:2].isdigit()

    def _is_value(self, word: str, max_values: float) -> bool:
        """Return whether a word can be a value of the flag before it.

        The value of a flag with a single value may begin with one dash.
        """
        starts_flag = (
            word.startswith("--") or word.partition("=")[0].partition(".")[0] in self._short
        )
        return not starts_flag if max_values == 1 else not self._is_flag(word)

    def _split_attached(self, name: str) -> tuple[str, str]:
        """Split a one-letter flag from its value: -O3 becomes ("-O", "3")."""
        has_no_attached_value = name.startswith("--") or name.partition(".")[0] in self._short
        if has_no_attached_value or name[:2] not in self._short or len(name) == 2:
            return name, ""
        return name[:2], name[2:]

    def _max_values(self, name: str) -> float:
        """Return the maximum number of values of a flag."""
        flag, _, path = self._find(name)
        if path:
            return 1
        return {Form.SWITCH: 0, Form.MANY: float("inf")}.get(flag.form, 1)

    def _find(self, name: str) -> tuple[Flag, bool, list[str]]:
        """Return (the flag, whether it is negated by --no-, the keys after its dots)."""
        first, *path = name.split(".")
        if first in self._short:
            return self._short[first], False, path
        long_name = first.removeprefix("--").replace("_", "-")
        if first.startswith("--"):
            # The full name first: no-docs is a flag, not a negated docs.
            if long_name in self._flags:
                return self._flags[long_name], False, path
            positive = self._flags.get(long_name.removeprefix("no-"))
            if long_name.startswith("no-") and positive and positive.form is Form.SWITCH:
                return positive, True, path
        known = [f"--{name}" for name in self._flags]
        hint = "; docs/vllm_flags.md lists the flags of vllm serve"
        raise unknown_option(first if first.startswith("-") else f"--{first}", known, hint)

    def _apply(self, name: str, values: list[str]) -> None:
        """Apply a flag with its values. Raises ConfigError."""
        flag, negated, path = self._find(name)
        display_name = "--" + ".".join([flag.name, *path])
        if not values and flag.form is not Form.SWITCH:
            raise ConfigError(f"{name} needs a value. Write one after it, or leave it out.")
        if path:
            self._apply_key(flag, path, read_value(_JSON, display_name, values))
            return
        value = read_value(flag, display_name, values)
        self._setter.apply(flag, display_name, not value if negated else value)

    def _apply_key(self, flag: Flag, path: list[str], value: Any) -> None:
        """Apply a value to a key of a flag: --flag.key.subkey value."""
        display_name = f"--{flag.name}.{path[0]}"
        if flag.form is not Form.JSON:
            raise ConfigError(f"{display_name}: --{flag.name} has no keys. Leave the dot out.")
        if path[-1].endswith("+"):
            path = [*path[:-1], path[-1].removesuffix("+")]
            value = self._extend_list(flag, path, value)
        for key in reversed(path[1:]):
            value = {key: value}
        self._setter.apply_key(flag, display_name, path[0], value)

    def _extend_list(self, flag: Flag, path: list[str], value: Any) -> list[Any]:
        """Return the list of --flag.key+ with the new value appended."""
        key = (flag.name, *path)
        entries = value if isinstance(value, list) else str(value).split(",")
        new_entries = [
            read_value(_JSON, flag.name, [entry]) if isinstance(entry, str) else entry
            for entry in entries
        ]
        self._lists[key] = [*self._lists.get(key, []), *new_entries]
        return self._lists[key]

    def _read_file(self, path: str) -> None:
        """Apply the flags of a YAML file, a mapping by name. Raises ConfigError."""
        for name, value in read_config(path).items():
            if not isinstance(name, str) or name.startswith("-") or name == CONFIG:
                allowed = f"a flag's name, other than {CONFIG}"
                remedy = "Write flags without dashes."
                raise choice_error(ConfigError, f"{path}: flag", name, allowed, remedy)
            if value not in (None, []):
                self._apply(f"--{name}", _as_words(value))


_JSON = Flag("", Kind.ACTS, "", Form.JSON)
"""Form of the value of a key: JSON, or text."""


def _as_words(value: Any) -> list[str]:
    """Return the words of a file's value as on the command line."""
    if isinstance(value, list):
        return [entry if isinstance(entry, str) else json.dumps(entry) for entry in value]
    return [value if isinstance(value, str) else json.dumps(value, default=str)]
