"""lockstep pull and lockstep list: checkpoints of the hub on this machine."""

import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Column, Table

from lockstep.cli.show import note, print_json, print_text
from lockstep.progress import progress_bar

DAY = 86_400
"""Seconds of a day."""


def pull(
    model: Annotated[
        str,
        typer.Argument(metavar="NAME", help="hub id, OWNER/NAME:FILE.gguf or OWNER/NAME:Q4_K_M"),
    ],
    revision: Annotated[
        str | None, typer.Option(help="branch, tag or commit; default: main")
    ] = None,
    local_dir: Annotated[
        str | None, typer.Option(help="folder for the files; default: the hub's cache")
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(help="pattern of weights instead of all *.safetensors; may be repeated"),
    ] = None,
) -> None:
    """Download a model from the Hugging Face hub.

    Prints its folder, or the path of its GGUF file. Existing files are not downloaded again.
    """
    from lockstep.models.cached_checkpoints import read_support
    from lockstep.models.pull import PullRequest
    from lockstep.models.pull import pull as download

    request = PullRequest.read(model, revision, local_dir, include or ())
    with progress_bar() as show:
        pulled = download(request, show, note)
    # The download succeeds for any checkpoint, also for one that cannot be served.
    reason = read_support(pulled.path)[2]
    if reason is not None:
        note(f"Lockstep cannot serve it: {reason}", style="yellow")
    note(f"Serve it: lockstep serve {pulled.served_as}")
    print_text(f"{pulled.path}\n")


def list_models(
    json: Annotated[bool, typer.Option("--json", help="print a list of JSON objects")] = False,
) -> None:
    """List the models of the hub's cache, and which of them can be served."""
    from lockstep.models.cached_checkpoints import cached_checkpoints

    checkpoints = cached_checkpoints()
    if json:
        print_json([asdict(checkpoint) for checkpoint in checkpoints])
        return
    if not checkpoints:
        note("The cache has no models. Download one: lockstep pull NAME, such as Qwen/Qwen3-0.6B")
        return
    table = Table(
        Column("model", overflow="fold"),
        Column("size", justify="right", no_wrap=True),
        "architecture",
        "weights",
        Column("used", no_wrap=True),
        Column("served", overflow="fold"),
    )
    for checkpoint in checkpoints:
        served = "yes" if checkpoint.reason is None else f"no: {checkpoint.reason}"
        cells = (
            checkpoint.name,
            decimal(checkpoint.bytes),
            checkpoint.architecture,
            checkpoint.weights,
            _ago(checkpoint.used),
        )
        table.add_row(*cells, served)
    Console(highlight=False, markup=False).print(table)


def _ago(seconds: float) -> str:
    """Return how long ago a time was, in days."""
    days = int((time.time() - seconds) // DAY)
    if days < 1:
        return "today"
    return "yesterday" if days == 1 else f"{days} days ago"
