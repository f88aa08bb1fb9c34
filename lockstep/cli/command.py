"""Base classes of commands: plain help that wraps at any width, and errors in one line."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from lockstep.cli.interrupt import INTERRUPTED, end_at_next_interrupt, interrupted_imports
from lockstep.errors import ConfigError, brief

USAGE_ERROR = cast(type[Exception], typer.BadParameter.__mro__[1])
"""Base of the errors of a command line. Typer's older releases use click, newer ones their own."""


class PlainCommand(TyperCommand):
    """Command whose help shows options by their groups, and whose usage errors are ConfigErrors."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write the usage line, without the name of a default command that need not be typed."""
        path = ctx.command_path
        if ctx.parent is not None and ctx.info_name == getattr(ctx.parent.command, "default", None):
            path = ctx.parent.command_path
        formatter.write_usage(path, " ".join(self.collect_usage_pieces(ctx)))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group of options, then the other commands of the group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                default_group = "Arguments" if param.param_type_name == "argument" else "Options"
                group = getattr(param, "rich_help_panel", None) or default_group
                groups.setdefault(group, []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)
        if getattr(ctx.parent and ctx.parent.command, "default", None) == ctx.info_name:
            write_commands(ctx.parent.command, ctx.parent.command_path, formatter)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Where Ctrl-C ends it, say what was interrupted, with status 130."""
        try:
            with interrupted_imports():
                return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            # Cleanup follows, which must not show a traceback for another Ctrl-C.
            end_at_next_interrupt()
            during = "".join(f", {note}" for note in getattr(interrupt, "__notes__", ()))
            print(f"Interrupted: {ctx.command_path}{during}.", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. Raises ConfigError at the first word that is not allowed."""
        with plain_errors(ctx, list(args)):
            return super().parse_args(ctx, args)


class PlainGroup(TyperGroup):
    """Group whose help lists all commands below it, and whose usage errors are ConfigErrors."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one line for each command, including those of subgroups."""
        write_commands(self, "", formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words up to the command's name; without any, show the help."""
        with plain_errors(ctx, list(args)):
            # typer would report a missing command as an error.
            return super().parse_args(ctx, args or ["--help"])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names. Raises ConfigError if there is none."""
        if self.get_command(ctx, args[0]) is None:
            matches = get_close_matches(args[0], self.commands, n=1)
            suggestion = f" Did you mean {matches[0]}?" if matches else ""
            raise ConfigError(
                f"command {brief(args[0])} is not known; allowed: {', '.join(self.commands)}."
                f"{suggestion} {ctx.command_path} --help says what each does."
            )
        return super().resolve_command(ctx, args)


def group_with_default(name: str, aliases: dict[str, str] | None = None) -> type[PlainGroup]:
    """Return a group class that runs the command `name` if the first word names no command.

    aliases: command by alternative name.
    """
    other_names = aliases or {}

    class DefaultGroup(PlainGroup):
        """Group that passes its arguments to the default command if they name no command."""

        default = name
        aliases = other_names

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            """Insert the default command's name unless the first word names a command."""
            first = args[0] if args else ""
            if first in self.aliases:
                return super().parse_args(ctx, [self.aliases[first], *args[1:]])
            return super().parse_args(ctx, args if first in self.commands else [name, *args])

    return DefaultGroup


def write_commands(group: Any, path: str, formatter: Any) -> None:
    """Write a section with a line for each command of a group and of its subgroups."""
    with formatter.section("Commands"):
        formatter.write_dl(list(_rows(group, path)))


def _rows(group: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield (words to type, summary) of each command below a group."""
    other_names: dict[str, list[str]] = {}
    for alias, name in getattr(group, "aliases", {}).items():
        other_names.setdefault(name, []).append(" ".join(filter(None, (path, alias))))
    for name, command in group.commands.items():
        is_default = name == getattr(group, "default", None)
        command_words = path if is_default else " ".join(filter(None, (path, name)))
        if hasattr(command, "commands"):
            yield from _rows(command, command_words)
            continue
        summary = " ".join((command.help or "").partition("\n\n")[0].split())
        alias_note = f" Also: {', '.join(other_names[name])}." if name in other_names else ""
        yield command_words, summary + alias_note


@contextmanager
def plain_errors(ctx: Any, words: list[str]) -> Iterator[None]:
    """Convert typer's usage errors in the context to ConfigErrors of one line."""
    try:
        yield
    except USAGE_ERROR as error:
        message = getattr(error, "message", str(error))
        param = getattr(error, "param", None)
        if param is not None:
            raise _refusal(param.opts, words, message) from None
        unknown = getattr(error, "option_name", None)
        if unknown is not None and "No such option" in message:
            known = [name for param in ctx.command.get_params(ctx) for name in param.opts]
            raise unknown_option(unknown, known) from None
        raise ConfigError(
            f"{message.rstrip('.')}. {ctx.command_path} --help says what is allowed."
        ) from None


def unknown_option(name: str, known: Iterable[str], remedy: str = "") -> ConfigError:
    """Return the error of an unknown option. remedy: further advice at its end."""
    matches = get_close_matches(name, known, n=1)
    suggestion = f" Did you mean {matches[0]}?" if matches else ""
    return ConfigError(
        f"{brief(name)[1:-1]} is not an option of this command.{suggestion} --help names all"
        f"{remedy}."
    )


def _refusal(names: list[str], words: list[str], why: str) -> ConfigError:
    """Return the error of a value that an option or argument does not allow."""
    occurrences = [text for name in names for text in _occurrences(name, words)]
    what = occurrences[-1] if occurrences else "/".join(names)
    return ConfigError(
        f"{what} is not allowed: {why[0].lower()}{why[1:].rstrip('.')}. Pass an allowed value, or "
        "leave it out; --help says what is allowed."
    )


def _occurrences(name: str, words: list[str]) -> list[str]:
    """Return each occurrence of an option on a command line, as --name='value'."""
    occurrences = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        head, equals, value = word.partition("=")
        if head == name:
            occurrences.append(f"{name}={brief(value if equals else following)}")
    return occurrences
