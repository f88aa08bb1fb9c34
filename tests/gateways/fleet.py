"""Two servers of the bundled model and a gateway in front of them, as processes on loopback."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lockstep.engine.engine_process import HEARTBEAT_SECONDS
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
BIN = ROOT / "build" / "gateways" / "venv" / "bin"
START_SECONDS = 300.0
MODEL = "tiny"
PAGE = 64


def wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until a URL answers with status 200."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"{url} does not answer: {log.read_text()[-4000:]}")


@dataclass
class Server:
    """Server process with its ports."""

    folder: Path
    name: str
    port: int = field(default_factory=free_port)
    events_port: int = field(default_factory=free_port)
    replay_port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        events = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
        }
        options = {
            "--port": self.port,
            "--served-model-name": MODEL,
            "--max-model-len": 1024,
            "--max-num-seqs": 4,
            "--metrics-names": "vllm",
            "--kv-events-config": json.dumps(events),
        }
        words = [str(word) for pair in options.items() for word in pair]
        self.log = self.folder / f"{self.name}.log"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lockstep", "serve", *words],
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"vllm:{name}" and labels.items() <= sample.labels.items()
        )

    def kill(self) -> None:
        """Kill the server and its engine at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Fleet:
    """Servers, and the client of the gateway in front of them."""

    servers: list[Server]
    client: httpx.Client

    def chat(self, messages: list[dict[str, str]], max_tokens: int = 8) -> Any:
        """Return the response of a greedy chat by the gateway."""
        body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        response = self.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def finished(self) -> list[float]:
        """Return the requests that each server has answered, once their engines reported them."""
        time.sleep(4 * HEARTBEAT_SECONDS)
        return [server.metric("request_success_total") for server in self.servers]


@contextlib.contextmanager
def two_servers(folder: Path) -> Iterator[list[Server]]:
    """Yield two servers that answer; end them afterwards."""
    servers = [Server(folder, f"server-{number}") for number in (1, 2)]
    try:
        for server in servers:
            wait_for(f"{server.url}/health", server.process, server.log)
        yield servers
    finally:
        for server in servers:
            if server.process.poll() is None:
                server.kill()


@contextlib.contextmanager
def gateway(kind: str, policy: str, servers: list[Server], folder: Path) -> Iterator[Fleet]:
    """Yield a fleet with a gateway. kind: vllm-router or smg. policy: by its name there."""
    port = free_port()
    command = [kind, "launch"] if kind == "smg" else [kind]
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    command += ["--prometheus-port", str(free_port()), "--health-check-interval-secs", "1"]
    command += ["--worker-urls", *(server.url for server in servers)]
    if kind == "smg":
        command += ["--disable-tokenizer-autoload"]
    if policy == "kv_aware":
        command += ["--kv-event-block-size", str(PAGE), "--kv-event-model", MODEL]
        for server in servers:
            front = f"{server.url}=tcp://127.0.0.1"
            command += ["--kv-event-source", f"{front}:{server.events_port}"]
            command += ["--kv-event-replay-source", f"{front}:{server.replay_port}"]
    log = folder / f"{kind}-{policy}.log"
    command[0] = str(BIN / command[0])
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{url}/health", process, log)
        wait_for_workers(url, process, log)
        with httpx.Client(base_url=url, timeout=120) as client:
            yield Fleet(servers, client)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_workers(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the gateway has found out the model of its servers, by asking for an answer."""
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        if httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200:
            return
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])
