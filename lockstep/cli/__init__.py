"""Commands of lockstep, one file each; `options` turns engine settings into options."""

from typing import Annotated

import typer

from lockstep import __version__
from lockstep.cli.bench import bench
from lockstep.cli.chat import chat
from lockstep.cli.check import check as run_check
from lockstep.cli.command import PlainCommand, PlainGroup, group_with_default
from lockstep.cli.compile import compile
from lockstep.cli.configuration import configuration
from lockstep.cli.doctor import doctor
from lockstep.cli.explain import explain
from lockstep.cli.generate import generate
from lockstep.cli.pull import list_models, pull
from lockstep.cli.quality import quality
from lockstep.cli.serve import serve
from lockstep.cli.top import top
from lockstep.cli.vllm.command import FlagCommand, epilog
from lockstep.cli.vllm.page import vllm_flags
from lockstep.probe.command import probe

app = typer.Typer(
    name="lockstep",
    cls=PlainGroup,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"lockstep {__version__}")
        raise typer.Exit


@app.callback()
def lockstep(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="print the release and exit"
        ),
    ] = False,
) -> None:
    """An LLM inference engine whose answer never changes."""


check = typer.Typer(
    cls=group_with_default("all"),
    rich_markup_mode=None,
    help="Prove on this machine that optimizations never change the output.",
)
check.command("all", cls=FlagCommand, epilog=epilog())(run_check)
check.command(cls=FlagCommand, epilog=epilog())(quality)
for command in (serve, generate, chat, explain, compile, doctor):
    app.command(cls=FlagCommand, epilog=epilog())(command)
app.command(cls=PlainCommand)(pull)
app.command("list", cls=PlainCommand)(list_models)
app.command(cls=PlainCommand)(top)
app.command(cls=PlainCommand)(probe)
app.add_typer(check, name="check")
app.add_typer(bench, name="bench")
app.command(cls=PlainCommand)(configuration)
app.command("vllm-flags", cls=PlainCommand)(vllm_flags)
