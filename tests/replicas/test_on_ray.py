"""Two replicas of the bundled model on a local Ray: routing, kills, drains, scaling, restarts."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.replica_speed import replica_processes
from lockstep.bench.measurement import children_of
from tests.forked_processes import forked_children
from tests.serve.server_process import COMMAND, PATIENCE, is_gone, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray[serve]: make test-replicas"),
]

STREAMS = 64
OPTIONS = ["--max-model-len", "1024", "--max-num-seqs", "16", "--max-num-batched-tokens", "256"]
START_SECONDS = 4 * PATIENCE
LIMIT = 8 * PATIENCE
PROMPT = "def read_{}(path):"


def body_of(number: int, tokens: int = 96) -> dict[str, Any]:
    """Return a request: streams with log-probabilities, n > 1, grammars and stop strings."""
    body: dict[str, Any] = {"prompt": PROMPT.format(number), "seed": number, "temperature": 1.0}
    body |= {"model": "lockstep", "max_tokens": tokens, "ignore_eos": True, "logprobs": 1}
    kinds: list[dict[str, Any]] = [
        {"stream": True},
        {"n": 2},
        {"structured_outputs": {"regex": "([a-d][0-9]-){30}"}, "ignore_eos": False},
        {"stop": ["return x", "zzz"]},
    ]
    return body | kinds[number % len(kinds)]


def comparable(response: httpx.Response) -> Any:
    """Return what must not differ between two answers to a request."""
    assert response.status_code == 200, response.text
    if not response.text.startswith("data:"):
        return [
            (c["text"], c["finish_reason"], c["stop_reason"], c["logprobs"])
            for c in response.json()["choices"]
        ]
    assert response.text.rstrip().endswith("data: [DONE]"), response.text[-300:]
    events = [
        httpx.Response(200, text=line[6:]).json()
        for line in response.text.splitlines()
        if line.startswith("data: {")
    ]
    assert not any("error" in event for event in events), events
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice["text"] for choice in choices)
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    scores = [x for c in choices if c["logprobs"] for x in c["logprobs"]["token_logprobs"]]
    return [(text, ends, scores)]


async def answers(path: Path, bodies: list[Any], during: Callable[[], Any] | None = None) -> Any:
    """Return comparable answers to all requests at once; call during() in a thread meanwhile."""
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    limits = {"transport": transport, "base_url": "http://localhost", "timeout": LIMIT}
    async with httpx.AsyncClient(**limits) as client:
        posts = [client.post("/v1/completions", json=body) for body in bodies]
        acting = asyncio.to_thread(during) if during else asyncio.sleep(0)
        results = await asyncio.gather(acting, *posts)
    return list(map(comparable, results[1:]))


def metric(client: httpx.Client, name: str) -> dict[str, float]:
    """Return the values of a metric by their replica or reason, "" for neither."""
    pattern = re.compile(rf"^lockstep:{name}(?:_total)?{{(.*)}} (\S+)$", re.MULTILINE)
    values = {}
    for labels, value in pattern.findall(client.get("/metrics").text):
        label = re.search(r'(?:replica|reason)="([^"]*)"', labels)
        values[label[1] if label else ""] = float(value)
    return values


def wait_until(condition: Callable[[], Any], seconds: float = LIMIT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.2)


@contextlib.contextmanager
def replicated(tmp_path: Path, *options: str) -> Iterator[tuple[Any, httpx.Client, Path]]:
    """Yield (server process, client, socket), and end the server as Ctrl-C does."""
    path = tmp_path / "socket"
    log = tmp_path / "log"
    with served(path, *OPTIONS, *options, log=log) as (running, client):
        try:
            yield running, client, path
            running.send_signal(signal.SIGINT)
            assert running.wait(PATIENCE) == 0, log.read_text()
            wait_until(lambda: not replica_processes(running.pid), 10)
        except BaseException:
            print(log.read_text())
            raise


def test_answers_outlive_replicas(tmp_path: Path) -> None:
    """Routing, kill -9 of a replica under 64 streams, a rolling restart under 32, and the end."""
    bodies = [body_of(number) for number in range(STREAMS)]
    with replicated(tmp_path, "--replicas", "2") as (running, client, path):
        wait_until(lambda: len(metric(client, "replica_info")) == 2)
        expected = asyncio.run(answers(path, bodies))
        prompts = metric(client, "replica_prompt_tokens")
        assert len(prompts) == 2 and min(prompts.values()) > 0.25 * sum(prompts.values())

        def kill() -> None:
            wait_until(lambda: min(metric(client, "replica_num_requests_running").values()) > 4)
            os.kill(replica_processes(running.pid)[0], signal.SIGKILL)

        assert asyncio.run(answers(path, bodies, kill)) == expected
        assert metric(client, "requests_moved")["lost"] > 4
        wait_until(lambda: len(metric(client, "replica_info")) == 2)
        before = set(metric(client, "replica_info"))

        def restart() -> None:
            wait_until(lambda: min(metric(client, "replica_num_requests_running").values()) > 4)
            running.send_signal(signal.SIGHUP)

        assert asyncio.run(answers(path, bodies[:32], restart)) == expected[:32]
        assert metric(client, "requests_moved")["drained"] > 4
        wait_until(lambda: len(set(metric(client, "replica_info")) - before) == 2)
        assert not set(metric(client, "replica_info")) & before


def test_replicas_of_two_ranks_answer_like_one_rank(tmp_path: Path) -> None:
    """A replica is killed under load, with its ranks; of another one a rank is killed."""
    bodies = [body_of(number, tokens=24) for number in range(12)]
    alone = tmp_path / "alone"
    with served(alone, *OPTIONS) as (running, _):
        expected = asyncio.run(answers(alone, bodies))
        running.send_signal(signal.SIGINT)
        assert running.wait(PATIENCE) == 0
    options = ["--replicas", "2", "--tensor-parallel-size", "2"]
    with replicated(tmp_path, *options) as (running, client, path):
        wait_until(lambda: len(metric(client, "replica_info")) == 2)
        (lost, *_) = replica_processes(running.pid)
        ranks = ranks_of(lost)
        assert len(ranks) == 1

        def wait_for_load() -> None:
            wait_until(lambda: min(metric(client, "replica_num_requests_running").values()) > 1)

        def kill() -> None:
            wait_for_load()
            os.kill(lost, signal.SIGKILL)

        assert asyncio.run(answers(path, bodies, kill)) == expected
        assert metric(client, "requests_moved")["lost"] > 1
        wait_until(lambda: all(map(is_gone, ranks)))
        wait_until(lambda: len(metric(client, "replica_info")) == 2)

        def kill_rank() -> None:
            wait_for_load()
            os.kill(ranks_of(replica_processes(running.pid)[0])[0], signal.SIGKILL)

        assert asyncio.run(answers(path, bodies, kill_rank)) == expected
        wait_until(lambda: sum(metric(client, "replica_engine_restarts").values()) == 1)


def ranks_of(replica: int) -> list[int]:
    """Return the processes of the ranks of a replica's engine but for the first."""
    return [rank for engine in children_of(replica) for rank in forked_children(engine)]


def test_replicas_follow_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is started here even if the environment names a cluster, as on a machine of one."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    options = ["--max-replicas", "2", "--target-ongoing-requests", "4", "--downscale-delay", "5"]
    with replicated(tmp_path, *options) as (_, client, path):
        wait_until(lambda: len(metric(client, "replica_info")) == 1)
        bodies = [body_of(number, 400) for number in range(32)]

        def grow() -> None:
            wait_until(lambda: len(metric(client, "replica_info")) == 2)

        first = asyncio.run(answers(path, bodies, grow))
        wait_until(lambda: len(metric(client, "replica_info")) == 1)
        assert client.get("/health").text == "ok"
        assert asyncio.run(answers(path, bodies[:4])) == first[:4]


def test_replicas_publish_their_blocks(tmp_path: Path) -> None:
    """Each replica has an endpoint, as data-parallel rank 0 and 1."""
    zmq = pytest.importorskip("zmq")
    msgspec = pytest.importorskip("msgspec")
    endpoint = f"ipc://{tmp_path}/events"
    config = json.dumps({"enable_kv_cache_events": True, "endpoint": endpoint})
    options = ["--replicas", "2", "--kv-events-config", config]
    with (
        replicated(tmp_path, *options) as (_, client, path),
        zmq.Context() as context,
        context.socket(zmq.SUB) as subscriber,
    ):
        subscriber.subscribe(b"")
        for rank, name in enumerate((endpoint, f"{endpoint}_dp1")):
            subscriber.connect(name)
            assert (tmp_path / ("events" + "_dp1" * rank)).exists()
        wait_until(lambda: len(metric(client, "replica_info")) == 2)
        # A subscriber may miss what is published before its connection is complete.
        time.sleep(1)
        bodies = [{**body_of(4 * number, 1), "prompt": [100 + number] * 200} for number in range(4)]
        asyncio.run(answers(path, bodies))
        ranks: dict[int, set[int]] = {}
        while sum(map(len, ranks.values())) < len(bodies):
            assert subscriber.poll(1000 * PATIENCE), ranks
            _, _, data = subscriber.recv_multipart()
            _, events, rank = msgspec.msgpack.decode(data)
            tokens = {token for event in events for token in event.get("token_ids", ())}
            ranks.setdefault(rank, set()).update(tokens)
        assert sorted(ranks) == [0, 1] and not ranks[0] & ranks[1]
        assert metric(client, "kv_event_batches")[""] >= 2


def test_ray_of_another_program_is_left_alone(tmp_path: Path) -> None:
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False)
    try:
        with replicated(tmp_path, "--replicas", "2") as (running, _, _):
            wait_until(lambda: len(replica_processes(running.pid)) == 2)
        assert ray.is_initialized()
    finally:
        ray.shutdown()


def test_ray_sends_no_usage_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ray.init() switches them off in its dashboard's process, which would send them."""
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    with replicated(tmp_path, "--replicas", "2") as (running, _, _):
        folders = [Path(f"/proc/{child}") for child in children_of(running.pid)]
        named = {folder: (folder / "cmdline").read_bytes() for folder in folders}
        (dashboard,) = (folder for folder, name in named.items() if b"dashboard.py" in name)
        variables = (dashboard / "environ").read_bytes().split(b"\0")
        assert b"RAY_USAGE_STATS_ENABLED=0" in variables


def test_an_unknown_cluster_is_an_error(tmp_path: Path) -> None:
    command = [*COMMAND, "--uds", str(tmp_path / "socket"), "--ray-address", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "ray_address='127.0.0.1:1' cannot be reached" in " ".join(done.stderr.split())
