"""lockstep explain: which backend serves which op, and what the plan is."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from lockstep.cli.options import engine_options
from lockstep.cli.show import load, print_json


@engine_options
def explain(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Print, per layer, op and backend and why the others were refused; and the plan."""
    found = load(settings, quiet=json).engine.explain()
    if json:
        print_json(found)
        return
    console = Console(highlight=False)
    console.print(_layers(found["layers"]))
    console.print(_plan({**found["plan"], "fingerprint": found["fingerprint"]}))
    for note in found["notes"]:
        console.print(f"note: {note}", markup=False)


def _layers(layers: list[dict[str, Any]]) -> Table:
    """Layers whose choices are the same stand in one line."""
    table = Table(
        "op", "backend", "layers", "refused", title="Ops", title_justify="left", show_lines=True
    )
    groups: dict[tuple[str, str, str], list[str]] = {}
    for choice in layers:
        refused = "; ".join(f"{name}: {why}" for name, why in choice["refused"].items())
        op = " ".join(filter(None, (choice["op"], choice["size"], choice["packing"])))
        key = (op, choice["backend"], refused or "-")
        places = groups.setdefault(key, [])
        if choice["layer"] not in places:
            places.append(choice["layer"])
    for (op, backend, refused), places in groups.items():
        table.add_row(op, backend, ", ".join(p or "shared" for p in places), refused)
    return table


def _plan(plan: dict[str, Any]) -> Table:
    table = Table("plan", Column("", overflow="fold"), title="Plan", title_justify="left")
    for name, value in plan.items():
        table.add_row(name, str(value))
    table.add_row("cache bytes", f"{plan['num_pages'] * plan['page_bytes']:,} in pages")
    table.add_row("state bytes", f"{plan['num_slots'] * plan['slot_bytes']:,} in slots")
    return table
