"""The commands. Each is one file; engine settings become options in `options`."""

import typer

from lockstep.cli.bench import bench
from lockstep.cli.chat import chat
from lockstep.cli.check import check
from lockstep.cli.configuration import configuration
from lockstep.cli.explain import explain
from lockstep.cli.generate import generate
from lockstep.cli.serve import serve

app = typer.Typer(
    name="lockstep",
    help="An LLM inference engine whose answer never changes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (serve, generate, chat, check, explain):
    app.command()(command)
app.command(hidden=True)(configuration)
app.add_typer(bench, name="bench")
