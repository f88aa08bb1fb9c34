"""lockstep check: prove on this machine that optimizations never change the output."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lockstep.cli.interrupt import INTERRUPTED, sigterm_interrupts
from lockstep.cli.options import changed_settings, engine_options
from lockstep.cli.show import note, print_json
from lockstep.errors import ConfigError
from lockstep.progress import progress_bar
from lockstep.settings import check_writable, why_unread
from lockstep.spec.config import AUTO

if TYPE_CHECKING:
    from lockstep.check.report.report import Report, Tally

    Progress = Callable[[str, int, int], None]

USER_SETTINGS = (
    "dtype",
    "device",
    "load_format",
    "quantization",
    "hf_overrides",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "tensor_parallel_size",
    "mamba_ssm_cache_dtype",
    "skip_tokenizer_init",
    "speculative_config",
    "kernels",
)
"""Settings that the user may choose; a check varies the others itself.

The drafter of a speculative_config is checked in addition to the drafters that need no settings.
"""
LEGEND = (
    "Cells: outputs equal to the plain run / outputs compared. Columns: prompt cache state; "
    "sampling: statistical tests of the sampler; scenario: random request schedules. oracle: "
    "drafter that proposes the plain run's tokens, some of them wrong."
)
ALL = "all"
"""Value of kv_cache_dtype that checks every format of the KV cache."""
DEFAULT_FORMAT = "auto"
"""Format that is checked first; every model supports it."""


@engine_options
def check(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="check a sample of the matrix")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="check every combination of the matrix")
    ] = False,
    logits: Annotated[
        bool, typer.Option("--logits", help="compare raw logits; works with random weights")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="seed of the random scenarios")] = 0,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", min=0, help="run scenarios for this many seconds"),
    ] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", help="run only part I of N equal parts, such as 2/4")
    ] = None,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="stop at the first difference")
    ] = False,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="also compare logits with Hugging Face transformers")
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
    graphs. Random scenarios of requests and a fixed matrix of engine settings must give its output:
    the same tokens and logprobs. With --logits, every bit of the logits of 20 prompts is compared
    at each batch size, number of drafts, chunk size and graph mode.

    The first scenario that differs is minimized and written to a file for --replay. The exit
    status is 1 if any output differs. Ctrl-C and SIGTERM stop the check early: it reports what it
    compared, with exit status 130 if all of that is equal. --kv-cache-dtype all checks every format
    of the KV cache and lists those that the model does not support.

    See also lockstep check quality --help: how much a KV cache format changes the output.
    """
    size = _size(quick, full, logits, replay, shard)
    _refuse_varied(settings)
    if page is not None:
        check_writable("report", page)
    run_options = {
        "seed": seed,
        "seconds": seconds,
        "fail_fast": fail_fast,
        "oracle": oracle,
        "shard": shard,
    }
    all_formats = settings["kv_cache_dtype"] == ALL
    failed = False
    interrupted = False
    try:
        with sigterm_interrupts():
            for kv_format, report in _reports(size, settings, run_options, logits, replay, json):
                failed |= bool(report.failed)
                interrupted = report.interrupted
                _show(report, logits, json)
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
    size: str,
    settings: dict[str, Any],
    run_options: dict[str, Any],
    logits: bool,
    replay: Path | None,
    quiet: bool,
) -> "Iterator[tuple[str, Report]]":
    """Yield each requested KV cache format with the report of its check.

    Raises ConfigError if the model does not support the only requested format, or "auto".
    """
    requested = settings["kv_cache_dtype"]
    for kv_format in _kv_formats(requested):
        format_settings = settings | {"kv_cache_dtype": kv_format}
        try:
            report = _run_to_report(size, format_settings, run_options, logits, replay, quiet)
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
            f"--report {path} cannot be written: {why_unread(error)}. Name another file."
        ) from None


def _size(quick: bool, full: bool, logits: bool, replay: Path | None, shard: str | None) -> str:
    """Return the name of the size. Raises ConfigError if options exclude each other."""
    if quick and full:
        raise ConfigError("--quick and --full exclude each other; choose one of them.")
    if replay and (quick or full or logits or shard is not None):
        raise ConfigError(
            "--replay runs one file; leave --quick, --full, --logits and --shard out."
        )
    if quick:
        return "quick"
    return "full" if full else "default"


def _run_to_report(
    size: str,
    settings: dict[str, Any],
    run_options: dict[str, Any],
    logits: bool,
    replay: Path | None,
    quiet: bool,
) -> "Report":
    """Run one check and return its report, even if the check is interrupted."""
    from lockstep.check import Interrupted

    try:
        if quiet:
            return _run(size, settings, run_options, logits, replay, None)
        with progress_bar() as show:
            return _run(size, settings, run_options, logits, replay, show)
    except Interrupted as interruption:
        return interruption.report


def _show(report: "Report", logits: bool, json: bool) -> None:
    """Print the report to stdout."""
    if json:
        print_json(report.to_json())
    else:
        _print(report, _table(report, logits))


def _run(
    size: str,
    settings: dict[str, Any],
    run_options: dict[str, Any],
    logits: bool,
    replay: Path | None,
    on_progress: "Progress | None",
) -> "Report":
    """Replay a scenario, compare logits, or run scenarios and the matrix. Raises Interrupted."""
    from lockstep.check import (
        SIZES,
        Effort,
        Scenario,
        Shard,
        read_replay,
        replay_audit,
        run_check,
        run_logits,
        run_replay,
    )

    model = settings["model"]
    engine_settings: dict[str, Any] = {name: settings[name] for name in USER_SETTINGS}
    if engine_settings["speculative_config"] == AUTO:
        # A check includes every drafter that the checkpoint supports, so auto adds none.
        engine_settings["speculative_config"] = None
    progress: dict[str, Any] = {} if on_progress is None else {"progress": on_progress}
    shard = Shard() if run_options["shard"] is None else Shard.read(run_options["shard"])
    if replay:
        repeated = read_replay(replay)
        if isinstance(repeated, Scenario):
            return run_replay(repeated, model, **engine_settings)
        changed = {name: settings[name] for name in changed_settings(settings, ())}
        return replay_audit(repeated, **changed)
    if logits:
        return run_logits(size, model, shard=shard, **progress, **engine_settings)
    effort = Effort(
        SIZES[size].scenarios,
        covers=SIZES[size].covers,
        seconds=run_options["seconds"],
        # The shrunk scenario is written to the working directory.
        folder=Path(),
        fail_fast=run_options["fail_fast"],
        shard=shard,
    )
    comparison = {"seed": run_options["seed"], "oracle": run_options["oracle"]}
    return run_check(size, model, effort=effort, **comparison, **progress, **engine_settings)


def _refuse_varied(settings: dict[str, Any]) -> None:
    """Raise ConfigError for a setting that the check varies itself."""
    for name in changed_settings(settings, (*USER_SETTINGS, "model")):
        flag = "--" + name.replace("_", "-")
        raise ConfigError(
            f"{flag} is not allowed here: check varies it itself. Allowed: --model and "
            f"{', '.join(USER_SETTINGS)}. Leave {flag} out."
        )


def _table(report: "Report", logits: bool) -> Table:
    """Return the cases of a report: a row per drafter and graph mode, a column per phase.

    If logits are compared, the columns are batches, with all chunk sizes in one column.
    """

    def column_of(tally: "Tally") -> str:
        if not logits:
            return tally.setup.phase
        return "chunks" if tally.batch.startswith("chunks") else tally.batch

    columns = list(dict.fromkeys(map(column_of, report.tallies)))
    # Without padding, all columns fit a terminal of 80 characters.
    table = Table("drafter", "graph", box=SIMPLE_HEAD, padding=0)
    table.caption = None if logits else LEGEND
    for column in columns:
        table.add_column(column, justify="right")
    for row in _rows(report.tallies):
        tallies = [t for t in report.tallies if (t.setup.drafting, t.setup.graph) == row]
        table.add_row(
            *row, *(_cell([t for t in tallies if column_of(t) == column]) for column in columns)
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


def _print(report: "Report", table: Table) -> None:
    console = Console(highlight=False)
    if report.tallies:
        console.print(table)
    if report.exercised:
        counters = ", ".join(f"{count:,} {name}" for name, count in report.exercised.items())
        console.print(f"exercised: {counters}", soft_wrap=True)
    if report.tuples is not None:
        console.print(f"features: {report.tuples.summary()}", soft_wrap=True)
    shard = f"shard {report.shard}; " if report.shard.count > 1 else ""
    about = f"{shard}seed {report.seed}; {report.seconds:.0f} s"
    console.print("; ".join(part for part in (about, report.numerics) if part), soft_wrap=True)
    for reason in report.skipped:
        console.print(f"skipped drafter {reason}", soft_wrap=True)
    for reason in report.refused:
        console.print(f"skipped {reason}", soft_wrap=True)
    console.print(report.verdict, style=_verdict_color(report), markup=False, soft_wrap=True)


def _verdict_color(report: "Report") -> str:
    if report.failed:
        return "red"
    return "yellow" if report.interrupted else "green"
