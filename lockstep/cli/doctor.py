"""lockstep doctor: examine this machine's kernels and system."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lockstep.cli.options import engine_options
from lockstep.cli.show import note, print_json
from lockstep.progress import Progress, progress_bar

if TYPE_CHECKING:
    from lockstep.config import EngineConfig
    from lockstep.doctor.kernels import KernelReport
    from lockstep.doctor.system import Line

COLORS = {"ok": "green", "note": "dim", "warning": "yellow", "fault": "red"}


@engine_options
def doctor(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    every: Annotated[
        bool,
        typer.Option("--every", help="examine every backend, not only those that would serve"),
    ] = False,
    system_only: Annotated[
        bool, typer.Option("--system-only", help="examine the system, and no kernel")
    ] = False,
    stage_seconds: Annotated[
        float, typer.Option("--stage-seconds", min=1, help="time limit of one check of a kernel")
    ] = 120.0,
    no_save: Annotated[
        bool, typer.Option("--no-save", help="do not keep the results for servers")
    ] = False,
    port: Annotated[int, typer.Option("--port", help="port that a server would use")] = 8000,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Examine every kernel that a model needs on this machine, and the system.

    Each kernel runs in a separate process, with asynchronous and with blocking launches: against
    its reference, in other batches, repeatedly, between guarded memory, from a captured graph and
    under the load of a second stream. A crash or a hang ends that process alone. Results are kept
    for this device, driver, Triton and release: servers then replace a sick backend by a healthy
    one.

    The exit status is 1 if a kernel is sick or the system has a fault.
    """
    from lockstep.config import EngineConfig
    from lockstep.doctor.system import examine_system
    from lockstep.engine_args import resolve_auto_drafter
    from lockstep.worker.build import pick_device

    config = EngineConfig.read(**resolve_auto_drafter(settings, weights=False))
    device = pick_device(config)
    lines = examine_system(device, port)
    if not json:
        _print_system(lines)
    report = None
    if not system_only:
        with progress_bar() as show:
            report = _examine(config, device, every, stage_seconds, not no_save, show)
    if json:
        kernels = None if report is None else report.to_json()
        print_json({"system": [vars(line) for line in lines], "kernels": kernels})
    elif report is not None:
        _print_kernels(report)
    sick = report is not None and bool(report.findings)
    if sick or any(line.status == "fault" for line in lines):
        raise typer.Exit(1)


def _examine(
    config: "EngineConfig", device: str, every: bool, seconds: float, save: bool, show: Progress
) -> "KernelReport":
    from lockstep.doctor.kernels import Doctor
    from lockstep.doctor.needs import kernels_of

    examiner = Doctor(device, every=every, stage_seconds=seconds, save=save)
    return examiner.examine(kernels_of(config, device), show)


def _print_system(lines: "list[Line]") -> None:
    table = Table("system", "value", "", "what to do", box=SIMPLE_HEAD, padding=(0, 1))
    for line in lines:
        status = f"[{COLORS[line.status]}]{line.status}[/]"
        table.add_row(line.name, line.value, status, line.remedy)
    Console(highlight=False).print(table)


def _print_kernels(report: "KernelReport") -> None:
    console = Console(highlight=False)
    table = Table("op", "backend", box=SIMPLE_HEAD, padding=(0, 1))
    for name in ("checks", "s"):
        table.add_column(name, justify="right")
    table.add_column("")
    for entry in report.examined:
        status = f"[red]{entry.findings[0].kind}[/]" if entry.findings else "[green]healthy[/]"
        table.add_row(entry.op, entry.backend, str(entry.checks), f"{entry.seconds:.1f}", status)
    console.print(table)
    for finding in report.findings:
        console.print(
            f"{finding.op}, {finding.backend}: {finding.brief}, check {finding.check}: "
            f"{finding.detail}",
            style="red", markup=False, soft_wrap=True,
        )  # fmt: skip
    for replacement in report.replacements:
        console.print(f"{replacement}", style="yellow", markup=False, soft_wrap=True)
    for op in report.unserved:
        console.print(f"{op}: no healthy backend", style="red", markup=False, soft_wrap=True)
    about = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    healthy = sum(not entry.findings for entry in report.examined)
    console.print(f"{healthy} of {len(report.examined)} kernels are healthy on {about}")
    if report.path is not None:
        note(f"Servers on this machine read the results: {report.path}")
