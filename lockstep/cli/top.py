"""lockstep top: live metrics of a running server."""

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
DEFAULT_URL = "http://127.0.0.1:8000"
NO_SAMPLES = "–"
"""Text of a metric without samples."""


def top(
    address: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help=f"address of the server; default: {DEFAULT_URL}"),
    ] = None,
    url: Annotated[str | None, typer.Option(help="address of the server, as an option")] = None,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="seconds between two readings of /metrics")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="print one frame, of one interval, and exit")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print one line of JSON per frame")] = False,
    api_key: Annotated[str | None, typer.Option(help="API key of the server")] = None,
    api_key_file: Annotated[
        str | None, typer.Option(help="file whose first line is the API key; hides it from ps")
    ] = None,
) -> None:
    """Show live metrics of a running server.

    Reads its /metrics. Press q or Ctrl-C to quit.
    """
    from lockstep.cli.serve import read_keys
    from lockstep.serve.telemetry.metrics_reader import MetricsReader

    if not (once or json or sys.stdout.isatty()):
        raise ConfigError(
            "stdout is not a terminal, and the live view needs one; allowed: --once or --json. Add "
            "one of them."
        )
    key = read_keys(api_key_file)[0] if api_key_file is not None else api_key
    if address is not None and url is not None and address != url:
        raise ConfigError(
            f"URL={brief(address)} and --url={brief(url)} are two servers; allowed: one. Leave one "
            "of them out."
        )
    reader = MetricsReader(address or url or DEFAULT_URL, key)
    try:
        if json or once:
            _print(reader, interval, once, json)
        else:
            watch(reader, interval)
    except KeyboardInterrupt:
        return


def _print(reader: "MetricsReader", interval: float, once: bool, json: bool) -> None:
    """Print frames one after the other."""

    def show(frame: "Frame") -> bool:
        if json:
            print_json(asdict(frame))
        else:
            Console(highlight=False).print(view(frame, reader.url))
        return not once

    _follow(reader, interval, show)


def watch(reader: "MetricsReader", interval: float) -> None:
    """Update a full-screen view until q is typed; show the error while the server fails.

    Raises ConfigError if the first reading fails.
    """
    # A wrong address is an error before the view replaces the screen.
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
    stdin = sys.stdin.fileno()
    terminal_settings = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)  # keys arrive without Enter; Ctrl-C still interrupts

    def wait(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            ready, _, _ = select.select([stdin], [], [], remaining)
            # b"" is the end of input.
            if ready and os.read(stdin, 1) in (b"q", b"Q", b""):
                return True
        return False

    try:
        yield wait
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, terminal_settings)


def _pause(seconds: float) -> bool:
    """Wait without a keyboard; return False."""
    time.sleep(seconds)
    return False


def _follow(
    reader: "MetricsReader",
    interval: float,
    show: Callable[["Frame"], bool],
    wait: Wait = _pause,
) -> None:
    """Show a frame per interval until `show` returns False or `wait` True. Raises ConfigError."""
    from lockstep.serve.telemetry.metrics_reader import frame

    previous = reader.read()
    while not wait(interval):
        current = reader.read()
        if not show(frame(previous, current)):
            return
        previous = current


def view(frame: "Frame", url: str) -> Group:
    """Return a frame as tables."""
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
    cache.add_row("KV cache", bar, f"{frame.cache_usage:.1%}")
    ended = ", ".join(f"{count} {reason}" for reason, count in frame.ended.items()) or "none"
    return Group(head, requests, cache, _table(frame), Text(f"finished: {ended}"))


def _table(frame: "Frame") -> Table:
    """Return a table of metrics: of the last interval, and since the server started."""
    now = frame.now
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column(f"last {now.seconds:.1f} s", justify="right")
    table.add_column("since start", justify="right")
    for name, text in ROWS:
        table.add_row(name, text(now), text(frame.since_start))
    return table


def _number(digits: int, value: float | None) -> str:
    return NO_SAMPLES if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return NO_SAMPLES if value is None else f"{value:.0%}"


def _percentages(shares: tuple[float, ...]) -> str:
    return " ".join(map(_percent, shares)) or NO_SAMPLES


ROWS: tuple[tuple[str, Callable[["Period"], str]], ...] = (
    ("tokens/s", lambda p: _number(1, p.generation_speed)),
    ("prompt tokens/s", lambda p: _number(1, p.prompt_speed)),
    ("acceptance length", lambda p: _number(2, p.acceptance_length)),
    ("acceptance rate", lambda p: _percent(p.acceptance_rate)),
    ("acceptance by position", lambda p: _percentages(p.accepted_at)),
    ("decode step, ms", lambda p: _number(2, p.step_ms)),
    ("step floor, ms", lambda p: _number(2, p.floor_ms)),
    ("step / floor", lambda p: _number(2, p.over_floor)),
    ("TTFT, ms", lambda p: _number(1, p.first_token_ms)),
    ("ITL, ms", lambda p: _number(2, p.next_token_ms)),
    ("prefix cache hits", lambda p: _percent(p.prefix_hits)),
    ("preemptions", lambda p: str(p.preemptions)),
)
