"""lockstep top against a server with scripted metrics."""

import json
import os
import termios
import threading
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep import __main__ as command
from lockstep.engine.stats import Stats
from lockstep.serve.telemetry.metrics import Metrics
from lockstep.serve.telemetry.metrics_reader import MAX_BYTES, MetricsReader
from tests.http_server import QuietHandler, http_server

TOP = import_module("lockstep.cli.top")


@pytest.fixture
def server() -> Iterator[SimpleNamespace]:
    """Serve /metrics from `stats`; every reading adds `tokens` generated tokens.

    key: required API key. status, text: replace the status and the body. asked: number of readings.
    """
    server = SimpleNamespace(
        stats=Stats(pages=10), tokens=50, key=None, status=200, text=None, asked=0
    )
    metrics = Metrics("watched")

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            server.asked += 1
            server.stats.generation_tokens_total += server.tokens
            allowed = server.key in (None, (self.headers["Authorization"] or "")[7:])
            text = server.text or metrics.render(server.stats)
            self.send_response(server.status if allowed else 401)
            self.end_headers()
            self.wfile.write(text if self.path == "/metrics" else b"")

    with http_server(Handler) as server.url:
        yield server


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs the command and returns (exit status, stdout, stderr)."""

    def run(*options: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["lockstep", "top", *options])
        with pytest.raises(SystemExit) as ended:
            command.main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def test_once(server: SimpleNamespace, run: Any) -> None:
    server.stats.num_running = 2
    server.stats.num_waiting = 5
    server.stats.pages_used = 4
    server.stats.preemptions_total = 7
    status, out, _ = run(server.url, "--once", "--interval", "0.2")
    assert status == 0 and server.asked == 2
    for expected in ("watched", server.url, "2 running", "5 waiting", "0 in host memory", "40.0%"):
        assert expected in out
    (line,) = (line for line in out.splitlines() if line.startswith("tokens/s"))
    assert 100 < float(line.split()[1]) <= 250
    (line,) = (line for line in out.splitlines() if line.startswith("preemptions"))
    assert line.split()[1:] == ["0", "7"]


def test_json_once(server: SimpleNamespace, run: Any) -> None:
    server.stats.requests_success_total["stop"] = 3
    status, out, _ = run(server.url, "--once", "--json", "--interval", "0.2")
    frame = json.loads(out)
    assert status == 0 and out.count("\n") == 1
    assert frame["model"] == "watched" and frame["ended"] == {"stop": 3}
    assert 100 < frame["now"]["generation_speed"] <= 250
    assert frame["now"]["acceptance_length"] is None


def test_json_continues_until_interrupted(
    server: SimpleNamespace, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[Any] = []

    def show(frame: Any) -> None:
        frames.append(frame)
        if len(frames) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(TOP, "print_json", show)
    status, _, err = run(server.url, "--json", "--interval", "0.1")
    assert (status, err) == (0, "")
    assert len(frames) == 3 and server.asked == 4


def test_live_view_survives_server_errors(
    server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a failing server is shown, and the server is read again."""
    screens: list[str] = []

    class Screen:
        def __init__(self, **options: Any) -> None: ...

        def __enter__(self) -> "Screen":
            return self

        def __exit__(self, *what: Any) -> None: ...

        def update(self, shown: Any, refresh: bool) -> None:
            screens.append("error" if "cannot be watched" in str(shown) else "frame")
            server.status = {1: 503, 2: 200}.get(len(screens), 200)
            if len(screens) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(TOP, "Live", Screen)
    with pytest.raises(KeyboardInterrupt):
        TOP.watch(MetricsReader(server.url), 0.01)
    assert screens == ["frame", "error", "frame"]


def test_the_server_is_an_argument_or_an_option(server: SimpleNamespace, run: Any) -> None:
    quick = ("--once", "--interval", "0.1")
    assert run("--url", server.url, *quick)[0] == 0
    status, _, err = run(server.url, "--url", "http://other", *quick)
    assert status == 2 and "are two servers" in err


def test_q_ends_the_live_view(server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The view ends at once, and the terminal's settings are restored."""
    keyboard, terminal = os.openpty()
    with open(terminal, "rb", buffering=0) as stdin:
        settings = termios.tcgetattr(stdin)
        monkeypatch.setattr("sys.stdin", stdin)
        typing = threading.Timer(0.3, os.write, (keyboard, b"xq"))
        typing.start()
        TOP.watch(MetricsReader(server.url), 60.0)
        typing.join(10)
        assert termios.tcgetattr(stdin) == settings
    os.close(keyboard)


def test_api_keys(server: SimpleNamespace, run: Any, tmp_path: Any) -> None:
    server.key = "secret"
    status, _, err = run(server.url, "--once")
    assert status == 2 and "it answered 401" in err and "--api-key" in err
    quick = ("--once", "--interval", "0.1")
    assert run(server.url, *quick, "--api-key", "secret")[0] == 0
    path = tmp_path / "keys"
    path.write_text("secret\nother\n")
    assert run(server.url, *quick, "--api-key-file", str(path))[0] == 0


def test_errors_name_the_cause(server: SimpleNamespace, run: Any, tmp_path: Any) -> None:
    status, _, err = run(server.url)
    assert status == 2 and "stdout is not a terminal" in err
    status, _, err = run("127.0.0.1:1", "--once")
    assert status == 2 and "http://127.0.0.1:1/metrics" in err and "Is the server running" in err
    status, _, err = run("ftp://a", "--once")
    assert status == 2 and "url='ftp://a' is not allowed" in err
    status, _, err = run(server.url, "--once", "--interval", "0")
    assert status == 2 and "--interval" in err
    status, _, err = run(server.url, "--once", "--api-key-file", str(tmp_path / "none"))
    assert status == 2 and "api_key_file" in err
    server.status = 404
    status, _, err = run(server.url, "--once")
    assert status == 2 and "it answered 404" in err
    server.status = 200
    server.text = b"hello"
    status, _, err = run(server.url, "--once")
    assert status == 2 and "no num_requests_running" in err
    server.text = b"#" * (MAX_BYTES + 1)
    status, _, err = run(server.url, "--once")
    assert status == 2 and "larger than 4 MiB" in err
