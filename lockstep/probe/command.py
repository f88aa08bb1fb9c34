"""lockstep probe: test any OpenAI-compatible server.

The command is here and not in lockstep.cli, whose other commands import packages that
`python -m lockstep.probe` does without.
"""

import json as json_module
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lockstep.errors import ConfigError, choice_error, install_extra
from lockstep.probe.html_page import page
from lockstep.probe.report import Comparison, ServerReport, compare, text_of
from lockstep.probe.run import Limits, probe_server, section_names
from lockstep.probe.sections.needle import MAX_CONTEXT
from lockstep.progress import progress_bar

INTERRUPTED = 130
"""Exit status of a probe that Ctrl-C ended, as in shells."""


def probe(
    url: Annotated[str, typer.Option(help="address of the server, with /v1 or without")] = (
        "http://127.0.0.1:8000"
    ),
    compare: Annotated[
        str | None, typer.Option(help="address of a second server, shown side by side")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="model name; default: the first of /v1/models")
    ] = None,
    compare_model: Annotated[
        str | None, typer.Option(help="model name of the second server")
    ] = None,
    sections: Annotated[
        str, typer.Option(help="only these sections, separated by commas; default: all")
    ] = "",
    requests: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="maximum requests per server")
    ] = 300,
    seconds: Annotated[
        float, typer.Option(min=1.0, max=86_400.0, help="maximum seconds per server")
    ] = 900.0,
    minutes: Annotated[
        float, typer.Option(min=0.0, max=1440.0, help="repeat requests this long to see drift")
    ] = 0.0,
    context: Annotated[
        int | None,
        typer.Option(min=256, max=MAX_CONTEXT, help="tokens of the longest prompt of the ladder"),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="maximum seconds of one request")
    ] = 120.0,
    seed: Annotated[int, typer.Option(help="seed of the needle's code")] = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="exit with status 1 for warnings, too")
    ] = False,
    api_key: Annotated[
        str | None,
        typer.Option(help="API key of --url, sent as a bearer token", envvar="OPENAI_API_KEY"),
    ] = None,
    compare_api_key: Annotated[str | None, typer.Option(help="API key of --compare")] = None,
    report: Annotated[Path | None, typer.Option(help="write an HTML report to this file")] = None,
    json: Annotated[bool, typer.Option("--json", help="print only one JSON object")] = False,
) -> None:
    """Test any OpenAI-compatible server: correctness, determinism and speed.

    Sends at most --requests chat completions, and reports what the answers show. The exit status
    is 0 without faults, 1 with a fault (with --strict, also with a warning), 2 if the server cannot
    be probed or an option is wrong, 130 after Ctrl-C.
    """
    need_httpx()
    if report is not None:
        check_report(report)
    names = section_names(sections)
    limits = Limits(requests, seconds, timeout, minutes, context)
    servers = [(url, api_key, model)]
    if compare is not None:
        servers.append((compare, compare_api_key, compare_model))
    reports = []
    with progress_bar() as show:
        for number, (address, key, name) in enumerate(servers, 1):
            prefix = f"server {number}: " if len(servers) > 1 else ""

            def progress(what: str, done: int, total: int, prefix: str = prefix) -> None:
                show(prefix + what, done, total)

            reports.append(probe_server(address, key, name, limits, names, seed, progress))
            if reports[-1].interrupted:
                break
    finish(reports, strict, report, json)


def finish(reports: list[ServerReport], strict: bool, path: Path | None, json: bool) -> None:
    """Print and write the reports, and exit with the probe's status."""
    comparison = compare(*reports) if len(reports) == 2 else None
    if path is not None:
        path.write_text(page(reports, comparison, command_line(sys.argv)), encoding="utf-8")
    if json:
        print(json_module.dumps(as_json(reports, comparison)))
    else:
        show_reports(reports, comparison)
    failed = any(r.count("fault") or (strict and r.count("warning")) for r in reports)
    if failed:
        raise typer.Exit(1)
    raise typer.Exit(INTERRUPTED if any(r.interrupted for r in reports) else 0)


def need_httpx() -> None:
    """Raise ConfigError if httpx is not installed."""
    try:
        import httpx  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"probe needs httpx, which is not installed: {install_extra('probe')}, or pip install "
            "httpx."
        ) from None


def check_report(path: Path) -> None:
    """Raise ConfigError if the report cannot be written, before the server is probed."""
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        allowed = f"a file that can be written ({why})"
        raise choice_error(
            ConfigError, "report", str(path), allowed, "Name another file."
        ) from None


def command_line(words: list[str]) -> list[str]:
    """Return the command line for the report, without the values of API keys."""
    shown = ["lockstep", "probe"]
    hide = False
    # `python -m lockstep.probe` has no word for the command.
    for word in words[2 if words[1:2] == ["probe"] else 1 :]:
        name, equals, _ = word.partition("=")
        if hide:
            shown.append("...")
        elif name.endswith("api-key") and equals:
            shown.append(f"{name}=...")
        else:
            shown.append(shlex.quote(word))
        hide = not hide and name.endswith("api-key") and not equals
    return shown


def as_json(reports: list[ServerReport], comparison: Comparison | None) -> dict[str, object]:
    """Return the result as plain data: one report, or two with their comparison."""
    if comparison is None:
        return {"probe": 1, **reports[0].as_json()}
    return {
        "probe": 1,
        "servers": [report.as_json() for report in reports],
        "identical_answers": comparison.identical,
        "compared_answers": comparison.compared,
        "rows": comparison.rows,
    }


def show_reports(reports: list[ServerReport], comparison: Comparison | None) -> None:
    """Print a table of sections, the findings and the verdict of each server."""
    console = Console(highlight=False, markup=False)
    for report in reports:
        table = Table("section", "result", "figures", box=SIMPLE_HEAD)
        for section in report.sections:
            figures = [f"{name}: {text_of(value)}" for name, value in section.figures.items()]
            figures += [
                f"not supported: {name} ({why})" for name, why in section.unsupported.items()
            ]
            if section.stopped:
                figures.append(section.stopped)
            table.add_row(section.title, section.state, "\n".join(figures))
        console.print(table)
        for section in report.sections:
            for finding in section.findings:
                times = f" ({finding.count} times)" if finding.count > 1 else ""
                console.print(f"{finding.severity}: {section.title}: {finding.name}{times}")
                console.print(f"    {finding.detail}", style="dim")
    if comparison is not None:
        show_comparison(console, reports, comparison)
    for report in reports:
        console.print(report.verdict, style="bold")


def show_comparison(console: Console, reports: list[ServerReport], comparison: Comparison) -> None:
    """Print the figures of two servers side by side."""
    table = Table("section", "figure", *(report.url for report in reports), box=SIMPLE_HEAD)
    for row in comparison.rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"{comparison.identical} of {comparison.compared} greedy answers are identical.")
