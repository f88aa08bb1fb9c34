"""lockstep explain: which backend serves which op, and what the plan is."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from lockstep.cli.options import engine_options, settle_drafts
from lockstep.cli.show import load, print_json
from lockstep.errors import ConfigError, choice_error

MOST_BYTES = 1e15
"""Of a GPU's memory: far above any."""


@engine_options
def explain(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    arch: Annotated[
        str | None, typer.Option("--arch", help="a GPU that is not there, e.g. sm_86")
    ] = None,
    gpu_memory_bytes: Annotated[
        float | None, typer.Option("--gpu-memory-bytes", help="its memory, e.g. 24e9")
    ] = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Print, per layer, op and backend and why the others were refused; and the plan.

    With --arch, of a GPU that is not there: from config.json alone, no weights are read.
    """
    total = _total(arch, gpu_memory_bytes)
    if arch is not None:
        _show_absent(settings, arch, total, json)
        return
    found = load(settings, quiet=json).engine.explain()
    if json:
        print_json(found)
        return
    console = Console(highlight=False)
    console.print(_layers(found["layers"]))
    console.print(_plan({**found["plan"], "fingerprint": found["fingerprint"]}))
    for note in found["notes"]:
        console.print(f"note: {note}", markup=False)


def _total(arch: str | None, given: float | None) -> int | None:
    """Bytes of a GPU that is not there. Raises ConfigError."""
    if given is None:
        return None
    if arch is None:
        raise ConfigError(
            f"gpu_memory_bytes={given:g} is not allowed without arch; allowed: with --arch, for a "
            "GPU that is not there. Name its architecture, or leave it out."
        )
    if not 1 <= given <= MOST_BYTES:
        allowed = f"1 to {MOST_BYTES:g}"
        raise choice_error(ConfigError, "gpu_memory_bytes", given, allowed, "Change it.")
    return int(given)


def _show_absent(settings: dict[str, Any], arch: str, total: int | None, json: bool) -> None:
    """Prints what an engine would be on a GPU that is not there."""
    from lockstep.config import EngineConfig
    from lockstep.engine.absent import explain_absent
    from lockstep.kernels.architecture import named

    named(arch)  # before anything is fetched
    config = EngineConfig.read(**settle_drafts(settings, weights=False))
    found = explain_absent(config, arch, total)
    if json:
        print_json(found)
        return
    console = Console(highlight=False)
    console.print(_layers(found["layers"]))
    console.print(_tiles(found["tiles"]))
    table = Table("plan", Column("", overflow="fold"), title="Plan", title_justify="left")
    table.add_row("architecture", f"{arch} ({found['cards']})")
    table.add_row("shared_bytes", f"{found['shared_bytes']:,} a program")
    for name, value in found["plan"].items():
        exact = isinstance(value, int) and not isinstance(value, bool)
        table.add_row(name, f"{value:,}" if exact else str(value))
    console.print(table)
    for note in found["notes"]:
        console.print(f"note: {note}", markup=False)


def _tiles(tiles: list[dict[str, Any]]) -> Table:
    """A line per op, size and number of tokens."""
    table = Table("op", "size", "tokens", "tile", title="Tiles", title_justify="left")
    for one in tiles:
        tile = ", ".join(f"{name} {value}" for name, value in one["tile"].items())
        table.add_row(one["op"], one["size"], str(one["tokens"]), tile)
    return table


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
    table.add_row("host bytes", f"{plan['host_pages'] * plan['page_bytes']:,} in host pages")
    table.add_row("state bytes", f"{plan['num_slots'] * plan['slot_bytes']:,} in slots")
    return table
