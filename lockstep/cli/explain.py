"""lockstep explain: show which backend runs each op, and the memory plan."""

from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.filesize import decimal
from rich.table import Column, Table
from rich.text import Text

from lockstep.cli.gpu_memory import GPUMemory, read_gpu_memory
from lockstep.cli.options import engine_options
from lockstep.cli.show import load, print_json


@engine_options
def explain(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    arch: Annotated[
        str | None, typer.Option("--arch", help="plan for another GPU architecture, e.g. sm_86")
    ] = None,
    gpu_memory_bytes: GPUMemory = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Show the memory plan, and the backend of every op and layer.

    With --arch, plan for a GPU that this machine does not have, from config.json alone.
    """
    total = read_gpu_memory(arch, gpu_memory_bytes)
    if arch is not None:
        _show_planned(settings, arch, total, json)
        return
    explanation = load(settings, quiet=json).engine.explain()
    if json:
        print_json(explanation)
        return
    console = Console(highlight=False)
    console.print(_layers(explanation["layers"]))
    plan = explanation["plan"]
    cache = plan["num_pages"] * plan["page_bytes"]
    states = plan["num_slots"] * plan["slot_bytes"]
    sizes = {f"{part}_bytes": size for part, size in plan.pop("memory").items()}
    sizes |= {"cache_bytes": cache, "state_bytes": states}
    del plan["memory_notes"]  # load() has printed them
    console.print(_plan({**plan, "fingerprint": explanation["fingerprint"], **sizes}))
    _print_ranks(console, explanation["ranks"])
    for note in explanation["notes"]:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _show_planned(settings: dict[str, Any], arch: str, total: int | None, json: bool) -> None:
    """Print the plan of an engine on a GPU that this machine does not have."""
    from lockstep.config import EngineConfig
    from lockstep.engine_args import resolve_auto_drafter
    from lockstep.kernels.architecture import architecture_by_name
    from lockstep.worker.explain import explain_architecture

    architecture_by_name(arch)  # an unknown name is an error before anything is downloaded
    config = EngineConfig.read(**resolve_auto_drafter(settings, weights=False))
    explanation = explain_architecture(config, arch, total)
    if json:
        print_json(explanation)
        return
    console = Console(highlight=False)
    console.print(_layers(explanation["layers"]))
    console.print(_tiles(explanation["tiles"]))
    gpu = {
        "architecture": f"{arch} ({explanation['cards']})",
        "shared_bytes": explanation["shared_bytes"],
    }
    verdict = {name: explanation["plan"].pop(name, None) for name in ("fits", "why", "notes")}
    console.print(_plan(gpu | explanation["plan"]))
    _print_ranks(console, explanation["ranks"])
    for note in explanation["notes"]:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    if verdict["fits"]:
        for line in verdict["notes"]:
            console.print(line, markup=False, soft_wrap=True)
        console.print(
            f"The model fits, with a KV cache of {explanation['plan']['cache_tokens']:,} tokens.",
            style="green",
        )
    elif total is not None:
        needed = decimal(explanation["plan"]["needed_bytes"])
        message = (
            f"The model does not fit: it needs a GPU of {needed}, this one has {decimal(total)}; "
        )
        message += verdict["why"]
        console.print(message, style="red", soft_wrap=True)
    else:
        console.print("Add --gpu-memory-bytes, e.g. 24G, to see whether the model fits.")


def _tiles(tiles: list[dict[str, Any]]) -> Table:
    """Return a table of tiles: one row per op, size and number of tokens, without unused fields."""
    table = Table("op", "size", "tokens", "tile", title="Tiles", title_justify="left")
    for entry in tiles:
        tile = ", ".join(f"{name} {value}" for name, value in entry["tile"].items() if value)
        table.add_row(entry["op"], entry["size"], str(entry["tokens"]), tile)
    return table


def _layers(layers: list[dict[str, Any]]) -> Group:
    """Return a table of ops, one row per group of layers with equal choices, and the refusals."""
    table = Table("op", "backend", "layers", "refused", title="Ops", title_justify="left")
    reasons: dict[str, int] = {}
    groups: dict[tuple[str, str, str], list[str]] = {}
    for choice in layers:
        refused = [f"{name}: {why}" for name, why in choice["refused"].items()]
        numbers = ", ".join(str(reasons.setdefault(reason, len(reasons) + 1)) for reason in refused)
        op = " ".join(filter(None, (choice["op"], choice["size"], choice["storage_format"])))
        layer_names = groups.setdefault((op, choice["backend"], numbers), [])
        if choice["layer"] not in layer_names:
            layer_names.append(choice["layer"])
    for (op, backend, numbers), layer_names in groups.items():
        table.add_row(op, backend, spans([name or "shared" for name in layer_names]), numbers)
    lines = [Text(f"refused {number}: {why}") for why, number in reasons.items()]
    return Group(table, *lines)


def spans(names: list[str]) -> str:
    """Join layer names, with ranges for consecutive numbers: layers.0-2, layers.4, head."""
    ranges: list[tuple[str, int, int]] = []  # (prefix, first number, last number), -1 without one
    for full_name in names:
        name, dot, number = full_name.rpartition(".")
        if not number.isdigit():
            ranges.append((full_name, -1, -1))
        elif ranges and ranges[-1][0] == name + dot and ranges[-1][2] == int(number) - 1:
            ranges[-1] = (name + dot, ranges[-1][1], int(number))
        else:
            ranges.append((name + dot, int(number), int(number)))
    texts = []
    for name, first, last in ranges:
        numbers = f"{first}-{last}" if last > first else str(first)
        texts.append(name if first < 0 else name + numbers)
    return ", ".join(texts)


def _plan(plan: dict[str, Any]) -> Table:
    """Return a table of the plan: one row per setting, bytes in readable units."""
    table = Table("setting", Column("value", overflow="fold"), title="Plan", title_justify="left")
    for name, value in plan.items():
        if name.endswith("_bytes"):
            table.add_row(name, decimal(value))
        elif isinstance(value, int):
            table.add_row(name, f"{value:,}")
        else:
            table.add_row(name, str(value))
    table.add_row("host_bytes", decimal(plan["host_pages"] * plan["page_bytes"]))
    return table


def _print_ranks(console: Console, ranks: dict[str, Any]) -> None:
    """Print bytes, exchanges and floors of several ranks; nothing of a single one."""
    if len(ranks["bytes"]) > 1:
        console.print(_rank_bytes(ranks), _exchanges(ranks), _floors(ranks))


def _rank_bytes(ranks: dict[str, Any]) -> Table:
    """Return a table of the bytes of each rank."""
    names = ("weights", "pages", "state", "buffers", "total")
    right = (Column(name, justify="right") for name in names)
    table = Table("rank", *right, title="Ranks", title_justify="left")
    for sizes in ranks["bytes"]:
        values = (sizes[f"{name}_bytes"] for name in names)
        cells = ("not measured" if value is None else decimal(value) for value in values)
        table.add_row(str(sizes["rank"]), *cells)
    return table


def _exchanges(ranks: dict[str, Any]) -> Table:
    """Return a table of the exchanges of a pass, one row per group of layers with equal ones."""
    table = Table("pass", "layers", title="Exchanges", title_justify="left")
    table.add_column("per layer", justify="right")
    table.add_column("bytes per token that a rank receives")
    for group in ranks["exchanges"]:
        received = [f"{size:,}" for size in group["token_bytes"]]
        table.add_row(group["pass"], spans(group["layers"]), str(len(received)), " ".join(received))
    table.caption = f"backend: {ranks['exchange_backend']}, all ranks in one group"
    return table


def _floors(ranks: dict[str, Any]) -> Table:
    """Return a table of the floors of decode steps of a rank."""
    table = Table(title="Floor of a rank's step, H200s", title_justify="left")
    backends = list(ranks["steps"][0]["floor_ms"])
    for name in ("rows", "exchanges", "received", "device ms"):
        table.add_column(name, justify="right")
    for name in backends:
        table.add_column(f"{name} ms", justify="right")
        table.add_column(f"floor, {name}", justify="right")
    for step in ranks["steps"]:
        times = (step[kind][name] for name in backends for kind in ("exchange_ms", "floor_ms"))
        table.add_row(
            f"{step['rows']} x {step['query_len']}",
            str(step["exchanges"]),
            decimal(step["received_bytes"]),
            f"{step['device_ms']:.3f}",
            *(f"{ms:.3f}" for ms in times),
        )
    table.caption = f"{ranks['steps'][0]['context']} cached tokens a row; exchanges do not overlap"
    return table
