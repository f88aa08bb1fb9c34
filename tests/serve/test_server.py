"""The server process: sockets, TLS, signals, and the startup message."""

import contextlib
import json
import os
import resource
import signal
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

from lockstep.__main__ import main
from lockstep.cli import app
from lockstep.errors import ConfigError
from lockstep.serve.app import create_app
from lockstep.serve.requests.service import Service
from lockstep.serve.server import Address, raise_descriptors
from tests.serve.server_process import PATIENCE, served
from tests.serve.span_collector import PARENT, TRACE, TRACED, collecting, values

TLS = Path(__file__).parent / "tls"
CERT = str(TLS / "cert.pem")
KEY = str(TLS / "key.pem")


def test_invalid_and_used_ports():
    for port in (99999, -1, 10**18):
        with pytest.raises(ConfigError, match=f"port={port} is not allowed.*0 to 65535"):
            Address("127.0.0.1", port).bind()
    with Address("127.0.0.1", 0).bind() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port={port} cannot be opened.*in use"):
            Address("127.0.0.1", port).bind()
    for host in ("no such host.invalid", "\udcff"):
        with pytest.raises(ConfigError, match="cannot be opened"):
            Address(host, 0).bind()
    assert Address("::1", 0).url(taken_v6 := Address("::1", 0).bind(), False).startswith("http://[")
    taken_v6.close()


def test_unix_sockets(tmp_path: Path):
    path = str(tmp_path / "lockstep.sock")
    address = Address(uds=path)
    address.bind().close()
    assert os.path.exists(path), "a stale socket remains"
    with address.bind(), pytest.raises(ConfigError, match="cannot be opened"):
        address.bind()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="cannot be opened"):
        Address(uds=str(tmp_path / "file")).bind()
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot be opened"):
        Address(uds=str(tmp_path / ("x" * 300))).bind()


def test_file_descriptor_limit_is_raised():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(128, before[0]), before[1]))
        maximum = raise_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == maximum == min(before[1], 1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "99999"], "port=99999"),
        (["--max-queued-requests", "-1"], "max_queued_requests"),
        (["--request-timeout", "0"], "request_timeout"),
        (["--step-timeout", "nan"], "step_timeout"),
        (["--max-body-size", "0"], "max_body_size"),
        (["--limit-concurrency", "0"], "limit_concurrency"),
        (["--uvicorn-log-level", "loud"], "uvicorn_log_level"),
        (["--api-key", ""], "api_key"),
        (["--api-key-file", "/no/such/file"], "api_key_file"),
        (["--ssl-keyfile", "x"], "ssl_certfile"),
        (["--ssl-certfile", "/none"], "ssl_certfile='/none' cannot be used"),
        (["--ssl-certfile", CERT], f"ssl_certfile={CERT!r} cannot be used"),  # without its key
        (["--ssl-certfile", CERT, "--ssl-keyfile", KEY, "--ssl-ca-certs", KEY], "ssl_ca_certs="),
        (["--ssl-certfile", CERT, "--ssl-keyfile", KEY, "--ssl-ciphers", "x"], "ssl_certfile="),
    ],
)
def test_options_are_checked_before_loading(options, message):
    result = CliRunner().invoke(app, ["serve", "--model", "/no/such/model", *options])
    assert isinstance(result.exception, ConfigError) and message in str(result.exception)


def test_api_keys_from_file(tmp_path: Path):
    from lockstep.cli.serve import _access_rules

    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    assert _access_rules(("*",), ["zero"], str(file), 8.0).keys == ("zero", "one", "two")
    file.write_text("\n")
    with pytest.raises(ConfigError, match="has no key"):
        _access_rules(("*",), None, str(file), 8.0)


def test_tls(server: Any, processor: Any):
    """uvicorn's options enable HTTPS."""
    asgi = create_app(Service(server.client, processor, "tiny", "ls-test"))
    files = {"ssl_certfile": str(TLS / "cert.pem"), "ssl_keyfile": str(TLS / "key.pem")}
    running = uvicorn.Server(uvicorn.Config(asgi, log_level="critical", lifespan="off", **files))
    with Address("127.0.0.1", 0).bind() as listener:
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        url = Address("127.0.0.1").url(listener, True)
        context = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
        with httpx.Client(verify=context, trust_env=False, timeout=PATIENCE) as client:
            assert client.get(f"{url}/health").text == "ok"
        running.should_exit = True
        thread.join(PATIENCE)


@pytest.fixture
def process(tmp_path: Path):
    """Yield `start(*options)`, which runs the server on a Unix socket; end it afterwards."""
    with contextlib.ExitStack() as started:

        def start(*options: str, code: str | None = None) -> Any:
            options = ("--max-model-len", "2048", *options)
            return started.enter_context(served(tmp_path / "s", *options, code=code))

        yield start


def test_spans_json_logs_and_sigterm(process: Any):
    """Use one server with its engine in a process for all three checks."""
    options = ["--shutdown-timeout", "3", "--api-key", "secret", "--no-playground"]
    options += ["--enable-log-requests", "--log-format", "json"]
    body = {"prompt": "def read(path):", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    with collecting() as collector:
        running, client = process(*options, "--otlp-traces-endpoint", collector.url)
        client.headers["Authorization"] = "Bearer secret"
        assert client.get("/").status_code == 404
        answer = client.post("/v1/completions", json=body, headers=TRACED)
        refused = client.post("/v1/completions", json={**body, "best_of": 3}, headers=TRACED)
        assert (answer.status_code, refused.status_code) == (200, 400)
        assert_sigterm_finishes_short_answer(running, client)
        lines = running.stderr.read().splitlines()
    assert set(collector.paths) == {"/v1/traces"}
    assert len(collector.spans) == 3, "what is refused has none"
    (mine,) = [pair for pair in collector.spans if int.from_bytes(pair[1].trace_id) == TRACE]
    assert_latencies(*mine, answer.json()["id"])
    received = [json.loads(line) for line in lines if line.startswith('{"time"')]
    ended = [line for line in received if line["logger"] == "lockstep.requests"]
    assert [line["message"].partition(":")[0] for line in ended] == ["ended"] * 2 + ["ended early"]
    (line,) = [line for line in ended if line.get("request_id") == "mine"]
    assert line["id"] == answer.json()["id"]


def assert_latencies(resource: Any, span: Any, request_id: str) -> None:
    """Assert that a span has the engine's latencies and the ids of both sides."""
    assert values(resource.attributes)["service.name"] == "lockstep"
    assert int.from_bytes(span.parent_span_id) == PARENT
    received = values(span.attributes)
    assert received["gen_ai.request.id"] == request_id
    assert received["gen_ai.usage.completion_tokens"] == 12
    assert received["lockstep.usage.draft_tokens"] > 0
    parts = [f"gen_ai.latency.time_in_{name}" for name in ("queue", "model_prefill")]
    first = received["gen_ai.latency.time_to_first_token"]
    assert sum(received[name] for name in parts) == pytest.approx(first)
    assert 0 < first < first + received["gen_ai.latency.time_in_model_decode"]
    assert first + received["gen_ai.latency.time_in_model_decode"] <= received["gen_ai.latency.e2e"]


def assert_sigterm_finishes_short_answer(running: Any, client: httpx.Client) -> None:
    """Assert that SIGTERM lets a short answer finish and ends streams with an error."""
    long = {"prompt": "1, 2,", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    short = {**long, "max_tokens": 8}
    with client.stream("POST", "/v1/completions", json=long) as endless:
        next(lines := endless.iter_lines())
        with client.stream("POST", "/v1/completions", json=short) as answer:
            next(rest := answer.iter_lines())
            running.send_signal(signal.SIGTERM)
            assert_new_connections_are_answered(running, client)
            ended = [json.loads(line[6:]) for line in rest if line.startswith("data: {")]
        result = [line for line in lines if line]
    assert ended[-1]["choices"][0]["finish_reason"] == "length"
    assert result[-1] == "data: [DONE]"
    error = json.loads(result[-2].removeprefix("data: "))["error"]
    assert "shutting down" in error["message"] and error["code"] == "engine_unavailable"
    assert running.wait(PATIENCE) == 0, "a server that was asked to end has not failed"


def assert_new_connections_are_answered(running: Any, client: httpx.Client) -> None:
    """Assert that new connections get a 503 while requests run after SIGTERM."""
    deadline = time.monotonic() + PATIENCE
    while client.get("/health").status_code == 200 and time.monotonic() < deadline:
        time.sleep(0.01)
    response = client.post("/v1/completions", json={"prompt": "x"})
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert "close" in response.headers["connection"]
    assert running.poll() is None


DYING = """
import sys
from lockstep.engine.engine import Engine
from lockstep.errors import EngineDeadError
from lockstep.__main__ import main

def step(engine):
    raise EngineDeadError("the device is gone") if engine.scheduler.entries else RuntimeError

def recover(engine):
    raise EngineDeadError("the device is gone")

Engine.step = step
Engine.recover = recover
sys.argv = ["lockstep", *sys.argv[1:]]
main()
"""


def test_dead_engine_ends_the_process(process: Any):
    running, client = process("--disable-frontend-multiprocessing", code=DYING)
    response = client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 503 and response.json()["error"]["code"] == "engine_unavailable"
    _, received = running.communicate(timeout=PATIENCE)
    assert running.returncode == 2, received
    assert "EngineDeadError" in received and "the device is gone" in received.splitlines()[-1]


def test_used_port_is_reported_before_loading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = ["lockstep", "serve", "--model", "/no/such/model", "--port", port]
        monkeypatch.setattr("sys.argv", command)
        with pytest.raises(SystemExit) as ended:
            main()
    received = capsys.readouterr().err
    assert ended.value.code == 2 and f"port={port}" in received
    assert "Traceback" not in received
