"""What every command has: help in plain lines, whole at any width, and errors of one form."""

from typing import Any

import typer
from typer.core import TyperCommand

from lockstep.errors import ConfigError, brief


class PlainCommand(TyperCommand):
    """Its help shows options by their groups; a value that is not allowed is a ConfigError."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """A section for each group, in the order of the options."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if param.param_type_name == "argument" else "Options"
                group = getattr(param, "rich_help_panel", None) or usual
                groups.setdefault(group, []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click's. Raises ConfigError at the first value that is not allowed."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            names = getattr(error.param, "opts", [])
            raise _refusal(names, given, error.message) from None


def _refusal(names: list[str], words: list[str], why: str) -> ConfigError:
    """The error of an option, or of an argument, where no name of it is written."""
    shown = [text for name in names for text in _written(name, words)]
    what = shown[-1] if shown else "/".join(names)
    return ConfigError(
        f"{what} is not allowed: {why[0].lower()}{why[1:].rstrip('.')}. Change it or leave it out; "
        "--help says what is allowed."
    )


def _written(name: str, words: list[str]) -> list[str]:
    """What is written for an option: --name='value', for each time that it stands there."""
    found = []
    for word, behind in zip(words, [*words[1:], ""], strict=True):
        head, equals, value = word.partition("=")
        if head == name:
            found.append(f"{name}={brief(value if equals else behind)}")
    return found
