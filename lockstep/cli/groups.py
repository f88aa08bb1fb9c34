"""Commands with others below them: `lockstep bench MODEL`, and `lockstep bench kernels`."""

from typing import Any

from typer.core import TyperGroup


def usual(name: str) -> type[TyperGroup]:
    """A group that takes its arguments for those of this command, where they name none."""

    class UsualGroup(TyperGroup):
        """Without a subcommand's name in front, the arguments are those of the usual one."""

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            named = bool(args) and args[0] in self.commands
            return super().parse_args(ctx, args if named else [name, *args])

    return UsualGroup
