"""lockstep top: a running server's figures, live."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.cli.show import print_json
from lockstep.errors import ConfigError, brief

if TYPE_CHECKING:
    from lockstep.serve.telemetry.metrics_reader import Frame, MetricsReader, Period

Wait = Callable[[float], bool]
USUAL_URL = "http://127.0.0.1:8000"
NONE = "–"
"""Shown where nothing happened that a figure could be made of."""


def top(
    address: Annotated[
        str | None, typer.Argument(metavar="[URL]", help=f"the server's address; {USUAL_URL}")
    ] = None,
    url: Annotated[str | None, typer.Option(help="the same, as an option")] = None,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="seconds between two readings of /metrics")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="one frame, of one interval, and the end")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="a line of JSON per frame")] = False,
    api_key: Annotated[str | None, typer.Option(help="the server's key")] = None,
    api_key_file: Annotated[
        str | None, typer.Option(help="file whose first line is the key; a process list shows none")
    ] = None,
) -> None:
    """Watch a running server's figures.

    Reads its /metrics. q or Ctrl-C ends it.
    """
    from lockstep.cli.serve import read_keys
    from lockstep.serve.telemetry.metrics_reader import MetricsReader

    if not (once or json or sys.stdout.isatty()):
        raise ConfigError(
            "stdout is no terminal, and a live view needs one; allowed there: --once or --json. "
            "Add one of them."
        )
    key = read_keys(api_key_file)[0] if api_key_file is not None else api_key
    if address is not None and url is not None and address != url:
        raise ConfigError(
            f"URL={brief(address)} and --url={brief(url)} are two servers; allowed: one. Leave one "
            "of them out."
        )
    reader = MetricsReader(address or url or USUAL_URL, key)
    try:
        if json or once:
            _print(reader, interval, once, json)
        else:
            watch(reader, interval)
    except KeyboardInterrupt:
        return


def _print(reader: "MetricsReader", interval: float, once: bool, json: bool) -> None:
    """Frames one below the other."""

    def show(frame: "Frame") -> bool:
        if json:
            print_json(asdict(frame))
        else:
            Console(highlight=False).print(view(frame, reader.url))
        return not once

    _follow(reader, interval, show)


def watch(reader: "MetricsReader", interval: float) -> None:
    """Show frames one over the other until q is typed; while there is no answer, say so.

    Raises ConfigError where the server does not answer at all.
    """
    reader.read()
    with _q_typed() as q_typed, Live(screen=True, auto_refresh=False) as live:

        def show(frame: "Frame") -> bool:
            live.update(view(frame, reader.url), refresh=True)
            return True

        ended = False
        while not ended:
            try:
                _follow(reader, interval, show, q_typed)
                ended = True
            except ConfigError as error:
                live.update(Text(str(error), style="yellow"), refresh=True)
                ended = q_typed(interval)


@contextmanager
def _q_typed() -> Iterator[Wait]:
    """Yield a function that waits some seconds, and returns True as soon as q is typed."""
    if not sys.stdin.isatty():
        yield _pause
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)  # keys arrive without Enter; Ctrl-C still interrupts

    def wait(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            ready, _, _ = select.select([keyboard], [], [], remaining)
            if ready and os.read(keyboard, 1) in (b"q", b"Q", b""):
                return True
        return False

    try:
        yield wait
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _pause(seconds: float) -> bool:
    """Wait, without a keyboard that could end it."""
    time.sleep(seconds)
    return False


def _follow(
    reader: "MetricsReader",
    interval: float,
    show: Callable[["Frame"], bool],
    wait: Wait = _pause,
) -> None:
    """Show a frame per interval, until `show` wants no more or `wait` ends. Raises ConfigError."""
    from lockstep.serve.telemetry.metrics_reader import frame

    before = reader.read()
    while not wait(interval):
        after = reader.read()
        if not show(frame(before, after)):
            return
        before = after


def view(frame: "Frame", url: str) -> Group:
    """A frame as tables."""
    head = Text.assemble((frame.model, "bold"), f"  {url}")
    requests = Table.grid(padding=(0, 2))
    requests.add_row(
        "requests",
        f"{frame.running} running",
        f"{frame.waiting} waiting",
        f"{frame.swapped} in host memory",
    )
    cache = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=1.0, completed=frame.cache_usage, width=30)
    cache.add_row("cache", bar, f"{frame.cache_usage:.1%}")
    ended = ", ".join(f"{count} {reason}" for reason, count in frame.ended.items()) or "none"
    return Group(head, requests, cache, _table(frame), Text(f"ended: {ended}"))


def _table(frame: "Frame") -> Table:
    """The figures of now beside those since the server's start."""
    now = frame.now
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column(f"last {now.seconds:.1f} s", justify="right")
    table.add_column("since start", justify="right")
    for name, told in ROWS:
        table.add_row(name, told(now), told(frame.since_start))
    return table


def _number(digits: int, value: float | None) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"


def _places(shares: tuple[float, ...]) -> str:
    return " ".join(map(_percent, shares)) or NONE


ROWS: tuple[tuple[str, Callable[["Period"], str]], ...] = (
    ("tokens/s", lambda p: _number(1, p.generation_speed)),
    ("prompt tokens/s", lambda p: _number(1, p.prompt_speed)),
    ("acceptance length", lambda p: _number(2, p.acceptance_length)),
    ("drafts accepted", lambda p: _percent(p.acceptance_rate)),
    ("accepted by place", lambda p: _places(p.accepted_at)),
    ("decode step, ms", lambda p: _number(2, p.step_ms)),
    ("its floor, ms", lambda p: _number(2, p.floor_ms)),
    ("step / floor", lambda p: _number(2, p.over_floor)),
    ("first token, ms", lambda p: _number(1, p.first_token_ms)),
    ("between updates, ms", lambda p: _number(2, p.next_token_ms)),
    ("prefix hits", lambda p: _percent(p.prefix_hits)),
    ("preemptions", lambda p: str(p.preemptions)),
)
