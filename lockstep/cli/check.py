"""lockstep check: prove on this machine that optimizations never change the output."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep.cli.interrupt import INTERRUPTED, sigterm_interrupts
from lockstep.cli.options import changed_settings, engine_options
from lockstep.cli.show import note, print_json, warnings_once
from lockstep.errors import ConfigError
from lockstep.progress import Progress, progress_bar
from lockstep.settings import check_writable, path_fault

if TYPE_CHECKING:
    from lockstep.check.report.report import Report, Tally

USER_SETTINGS = (
    "dtype",
    "device",
    "load_format",
    "quantization",
    "activation_dtype",
    "hf_overrides",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "tensor_parallel_size",
    "max_num_seqs",
    "mamba_ssm_cache_dtype",
    "skip_tokenizer_init",
    "speculative_config",
    "kernels",
)
"""Settings that the user may choose; a check varies the others itself.

The drafter of a speculative_config is checked in addition to the drafters that need no settings.
One engine of the matrix has its K and max_num_seqs.
"""
LEGEND = (
    "Cells: outputs equal to the plain run / outputs compared. Columns: prompt cache state; "
    "scenario: random request schedules. oracle: drafter that proposes the plain run's tokens, "
    "some of them wrong."
)
LOGITS_LEGEND = "Cells: outputs whose logits have the bits of the plain run / outputs compared."
MAX_PARTS = 6
"""Parts that the terminal lists for a reason. The HTML report and --json have all."""
ALL = "all"
"""Value of kv_cache_dtype that checks every format of the KV cache."""
DEFAULT_FORMAT = "auto"
"""Format that is checked first; every model supports it."""


@engine_options
def check(
    model: Annotated[str | None, typer.Argument(help="model folder, GGUF file or hub id")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="check a sample of the matrix")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="check every combination of the matrix")
    ] = False,
    sections: Annotated[
        str, typer.Option("--sections", help="only these sections, such as tokens,cache")
    ] = "",
    seed: Annotated[int, typer.Option("--seed", help="seed of the random scenarios")] = 0,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", min=0, help="end the whole check after about this time"),
    ] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", help="run only part I of N equal parts, such as 2/4")
    ] = None,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="stop at the first difference")
    ] = False,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", help="run only the scenario, or the audit, of this file"),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--report", help="write an HTML report to this file")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Prove that speculation, batching, caching, preemption and CUDA graphs change no bit.

    The plain run serves each prompt alone: no drafts, no prefix cache, no chunked prefill, no CUDA
    graphs. Any model is checked at your formats, drafter, K, max_num_seqs and tensor parallel size.

    The sections are kernels (each in a child process, as lockstep doctor examines it), logits
    (their bits in other batches and chunks, and their numbers against transformers), sampling
    (tokens against their exact distributions), tokens (random scenarios of requests, and every
    drafter), cache (prefix hits and preemption) and capture (CUDA graphs).

    What was not exercised is listed by reason. With --seconds each section gets a share of the
    time, and what one leaves goes to the others. The first scenario that differs is minimized and
    written to a file for --replay. The exit status is 1 if anything differs, or if nothing was
    compared. Ctrl-C and SIGTERM stop the check early: it reports what it compared, with exit status
    130 if all of that is equal. --kv-cache-dtype all checks every format of the KV cache and lists
    those that the model does not support.

    See also lockstep check quality --help: how much a KV cache format changes the output.
    """
    size = _size(quick, full)
    names = _sections(sections, replay, quick or full or shard is not None or seconds is not None)
    _refuse_varied(settings)
    if page is not None:
        check_writable("report", page)
    run_options = {
        "seed": seed,
        "seconds": seconds,
        "fail_fast": fail_fast,
        "sections": names,
        "shard": shard,
        "replay": replay,
    }
    all_formats = settings["kv_cache_dtype"] == ALL
    failed = False
    interrupted = False
    try:
        with sigterm_interrupts(), warnings_once():
            for kv_format, report in _reports(size, settings, run_options, json):
                failed |= bool(report.failed) or not (report.cases or report.interrupted)
                interrupted = report.interrupted
                _show(report, json)
                if page is not None:
                    _write(
                        page.with_stem(f"{page.stem}-{kv_format}") if all_formats else page, report
                    )
                if interrupted or (failed and fail_fast):
                    break
    except KeyboardInterrupt:
        note("Stopped early, before a report could be made.")
        interrupted = True
    if failed:
        raise typer.Exit(1)
    raise typer.Exit(INTERRUPTED if interrupted else 0)


def _reports(
    size: str, settings: dict[str, Any], run_options: dict[str, Any], quiet: bool
) -> "Iterator[tuple[str, Report]]":
    """Yield each requested KV cache format with the report of its check.

    All formats share a time limit. Raises ConfigError if the model does not support the only
    requested format, or "auto".
    """
    from lockstep.check.deadline import Deadline

    requested = settings["kv_cache_dtype"]
    kv_formats = _kv_formats(requested)
    deadline = Deadline.after(run_options["seconds"])
    for index, kv_format in enumerate(kv_formats):
        format_settings = settings | {"kv_cache_dtype": kv_format}
        of_format = deadline.share(1, len(kv_formats) - index)
        format_options = run_options | {"seconds": of_format.seconds_left}
        try:
            report = _run_to_report(size, format_settings, format_options, quiet)
        except ConfigError as error:
            # Among all formats an unsupported one is skipped, but every model has the default.
            if requested != ALL or kv_format == DEFAULT_FORMAT:
                raise
            note(f"skipped: {error}")
            continue
        yield kv_format, report


def _kv_formats(requested: str) -> tuple[str, ...]:
    """Return the formats to check: the requested one, or all, the model's dtype first."""
    from lockstep.kernels.formats.kv.table import KV_FORMATS

    if requested != ALL:
        return (requested,)
    return tuple(dict.fromkeys((DEFAULT_FORMAT, *(format.name for format in KV_FORMATS.values()))))


def _write(path: Path, report: "Report") -> None:
    """Write the HTML report. Raises ConfigError if the file cannot be written."""
    from lockstep.check.report.html_page import write_page

    try:
        write_page(path, report, ["lockstep", *sys.argv[1:]])
    except OSError as error:
        raise ConfigError(
            f"--report {path} cannot be written: {path_fault(error)}. Name another file."
        ) from None


def _size(quick: bool, full: bool) -> str:
    """Return the name of the size. Raises ConfigError if options exclude each other."""
    if quick and full:
        raise ConfigError("--quick and --full exclude each other; choose one of them.")
    if quick:
        return "quick"
    return "full" if full else "default"


def _sections(value: str, replay: Path | None, divided: bool) -> tuple[str, ...]:
    """Return the names of --sections. Raises ConfigError for unknown ones, and with --replay.

    divided: whether an option chooses the size of the check or a part of it.
    """
    from lockstep.check.sections import section_names

    if replay and (value or divided):
        raise ConfigError(
            "--replay runs one file; leave --quick, --full, --sections, --seconds and --shard out."
        )
    return section_names(value)


def _run_to_report(
    size: str, settings: dict[str, Any], run_options: dict[str, Any], quiet: bool
) -> "Report":
    """Run one check and return its report, even if the check is interrupted."""
    from lockstep.check import Interrupted

    try:
        if quiet:
            return _run(size, settings, run_options, None)
        with progress_bar() as show:
            return _run(size, settings, run_options, show)
    except Interrupted as interruption:
        return interruption.report


def _show(report: "Report", json: bool) -> None:
    """Print the report to stdout."""
    if json:
        print_json(report.to_json())
    else:
        _print(report)


def _run(
    size: str,
    settings: dict[str, Any],
    run_options: dict[str, Any],
    on_progress: Progress | None,
) -> "Report":
    """Replay a scenario or an audit, or run the sections of a check. Raises Interrupted."""
    from lockstep.check import (
        SIZES,
        Effort,
        Scenario,
        Shard,
        read_replay,
        replay_audit,
        run_check,
        run_replay,
    )

    model = settings["model"]
    engine_settings: dict[str, Any] = {name: settings[name] for name in USER_SETTINGS}
    if run_options["replay"]:
        repeated = read_replay(run_options["replay"])
        if isinstance(repeated, Scenario):
            return run_replay(repeated, model, **engine_settings)
        changed = {name: settings[name] for name in changed_settings(settings, ())}
        return replay_audit(repeated, **changed)
    progress: dict[str, Any] = {} if on_progress is None else {"progress": on_progress}
    shard = Shard() if run_options["shard"] is None else Shard.read(run_options["shard"])
    effort = Effort.of(
        SIZES[size],
        # The shrunk scenario is written to the working directory.
        folder=Path(),
        fail_fast=run_options["fail_fast"],
        shard=shard,
    )
    options = {name: run_options[name] for name in ("seed", "sections", "seconds")}
    return run_check(size, model, effort=effort, **options, **progress, **engine_settings)


def _refuse_varied(settings: dict[str, Any]) -> None:
    """Raise ConfigError for a setting that the check varies itself."""
    for name in changed_settings(settings, (*USER_SETTINGS, "model")):
        flag = "--" + name.replace("_", "-")
        raise ConfigError(
            f"{flag} is not allowed here: check varies it itself. Allowed: --model and "
            f"{', '.join(USER_SETTINGS)}. Leave {flag} out."
        )


def _sections_table(report: "Report") -> Table:
    """Return the results of the sections."""
    from lockstep.check.report.report import SectionState

    colors = {
        SectionState.PASSED: "green",
        SectionState.PASSED_IN_PART: "yellow",
        SectionState.FAILED: "red",
        SectionState.NOT_RUN: "dim",
    }
    table = Table("section", "result", box=SIMPLE_HEAD, padding=(0, 1))
    for column in ("cases", "s"):
        table.add_column(column, justify="right")
    table.add_column("not run")
    for section in report.sections:
        state = f"[{colors[section.state]}]{section.state}[/]"
        cases = f"{section.passed:,}/{section.cases:,}" if section.cases else ""
        table.add_row(section.name, state, cases, f"{section.seconds:.0f}", escape(section.reasons))
    return table


def _outputs_tables(report: "Report") -> Iterator[Table]:
    """Yield the table of complete outputs, and that of outputs whose logits were compared."""
    from lockstep.check.matrix.setups import LOGITS, PHASES, SCENARIO

    outputs = [t for t in report.tallies if t.setup.phase in (*PHASES, SCENARIO)]
    if outputs:
        yield _table(outputs, lambda tally: tally.setup.phase, LEGEND)
    logits = [t for t in report.tallies if t.setup.phase == LOGITS]
    if logits:
        # All chunk sizes share a column.
        yield _table(
            logits,
            lambda tally: "chunks" if tally.batch.startswith("chunks") else tally.batch,
            LOGITS_LEGEND,
        )


def _table(tallies: "Sequence[Tally]", column_of: "Callable[[Tally], str]", legend: str) -> Table:
    """Return the cases of engines: a row per drafter and graph mode."""
    columns = list(dict.fromkeys(map(column_of, tallies)))
    # Without padding, all columns fit a terminal of 80 characters.
    table = Table("drafter", "graph", box=SIMPLE_HEAD, padding=0)
    table.caption = legend
    for column in columns:
        table.add_column(column, justify="right")
    for row in _rows(tallies):
        of_row = [t for t in tallies if (t.setup.drafting, t.setup.graph) == row]
        table.add_row(
            *row, *(_cell([t for t in of_row if column_of(t) == column]) for column in columns)
        )
    return table


def _rows(tallies: "Sequence[Tally]") -> list[tuple[str, str]]:
    """Return the pairs of drafter and graph mode, drafters in the order in which they ran."""
    drafters = list(dict.fromkeys(t.setup.drafting for t in tallies))
    rows = dict.fromkeys((t.setup.drafting, t.setup.graph) for t in tallies)
    return sorted(rows, key=lambda row: drafters.index(row[0]))


def _cell(tallies: "list[Tally]") -> str:
    """Return "equal/compared", red if some differ, or an empty text if nothing was run."""
    cases, failed = (sum(getattr(t, name) for t in tallies) for name in ("cases", "failed"))
    text = f"{cases - failed}/{cases}" if cases else ""
    return f"[red]{text}[/red]" if failed else text


def _print(report: "Report") -> None:
    console = Console(highlight=False)
    for table in _outputs_tables(report):
        console.print(table)
    if report.section_seconds:
        console.print(_sections_table(report))
    if report.exercised:
        counters = ", ".join(f"{count:,} {name}" for name, count in report.exercised.items())
        console.print(f"exercised: {counters}", soft_wrap=True)
    if report.tuples is not None:
        console.print(f"features: {report.tuples.summary()}", soft_wrap=True)
    reasons = report.not_exercised()
    if reasons:
        console.print("not exercised, by reason:")
    for reason, parts in reasons.items():
        listed = ", ".join(parts[:MAX_PARTS])
        more = f", and {len(parts) - MAX_PARTS} more" if len(parts) > MAX_PARTS else ""
        console.print(f"  {reason}: {listed}{more}", style="dim", markup=False, soft_wrap=True)
    shard = f"shard {report.shard}; " if report.shard.count > 1 else ""
    about = f"{shard}seed {report.seed}; {report.seconds:.0f} s"
    console.print("; ".join(part for part in (about, report.numerics) if part), soft_wrap=True)
    console.print(report.verdict, style=_verdict_color(report), markup=False, soft_wrap=True)


def _verdict_color(report: "Report") -> str:
    if report.failed:
        return "red"
    return "yellow" if report.interrupted or not report.cases else "green"
