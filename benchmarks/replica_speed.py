"""Tokens per second of replicas on two GPUs, against two servers without a router.

    python benchmarks/replica_speed.py FOLDER [--streams 32,128] [--what servers,replicas,ranks]

FOLDER contains a config.json; weights are random. `servers` are two servers with a GPU each, and
each gets half of the requests. `replicas` is one server with two replicas, `ranks` one server with
one replica of two ranks; both run on the same Ray, which has to run on this machine (`ray start
--head`), since a single replica needs no Ray otherwise. Prints a line of JSON per load: tokens per
second, the time to the first event, and the CPU time of the servers' own processes. `replicas`
also kills a replica (SIGKILL) under 64 streams. All answers must equal those of the first load of
the same size. With --cpu two engines of the bundled model run on a CPU.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer
from tokenizers.models import BPE

from lockstep.bench.measurement import children_of, cpu_seconds, parse_counts, print_json

PROMPT_TOKENS = 200
VOCAB = 250
"""Prompts have ids below."""
CLIENTS = 8
"""Processes that read streams."""
KILL_STREAMS = 64
PATIENCE = 150.0
"""Seconds until a server must answer, on idle cores."""
WHAT = ("servers", "replicas", "ranks")
Answer = tuple[float, float, list[int]]
"""Seconds to the first event and to the end, since the load began; tokens."""


def body_of(number: int, tokens: int) -> dict[str, Any]:
    """Return a request whose prompt and seed depend on its number."""
    prompt = [(7 * i + i * i * number + number) % VOCAB for i in range(PROMPT_TOKENS)]
    body: dict[str, Any] = {"model": "lockstep", "prompt": prompt, "seed": number}
    body |= {"max_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    return body | {"stream": True, "return_token_ids": True}


async def read_stream(path: str, body: dict[str, Any], begun: float) -> Answer:
    """Send a request, and read its stream to the end without parsing it meanwhile."""
    reader, writer = await asyncio.open_unix_connection(path)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode())
    writer.write(data)
    parts: list[bytes] = []
    first = 0.0
    while part := await reader.read(1 << 16):
        parts.append(part)
        if not first and b"data: " in part:
            first = time.monotonic() - begun
    writer.close()
    text = b"".join(parts).decode()
    end = time.monotonic() - begun
    assert "data: [DONE]" in text, text[-500:]
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    assert not any("error" in event for event in events), text[-500:]
    tokens = [t for e in events for c in e["choices"] for t in c.get("token_ids") or ()]
    return first, end, tokens


def read_streams(paths: Sequence[str], bodies: Sequence[dict[str, Any]], begun: float) -> Any:
    """Return the answers to requests at once, in a client process."""

    async def work() -> list[Answer]:
        pairs = zip(paths, bodies, strict=True)
        return list(await asyncio.gather(*(read_stream(p, b, begun) for p, b in pairs)))

    return asyncio.run(work())


class Clients:
    """Processes that send requests, so that reading their streams takes no time of a server."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool
        self.expected: dict[tuple[int, int], list[list[int]]] = {}

    def send(self, paths: Sequence[str], count: int, tokens: int) -> tuple[list[Answer], bool]:
        """Return the answers to `count` requests at once, and whether they are the expected ones.

        paths: sockets that take turns.
        """
        bodies = [body_of(number, tokens) for number in range(count)]
        targets = [paths[number % len(paths)] for number in range(count)]
        begun = time.monotonic()
        futures = [
            self._pool.submit(read_streams, targets[i::CLIENTS], bodies[i::CLIENTS], begun)
            for i in range(min(CLIENTS, count))
        ]
        answers: list[Any] = [None] * count
        for i, future in enumerate(futures):
            answers[i::CLIENTS] = future.result(PATIENCE)
        ids = [answer[2] for answer in answers]
        assert all(len(one) == tokens for one in ids)
        return answers, ids == self.expected.setdefault((count, tokens), ids)


def measure(clients: Clients, what: str, servers: "Servers", streams: int, tokens: int) -> None:
    """Send a load twice, which also warms up, and print the figures of the faster run."""
    runs = []
    equal = True
    for _ in range(2):
        cpu = servers.cpu()
        answers, as_expected = clients.send(servers.paths, streams, tokens)
        equal &= as_expected
        seconds = max(end for _, end, _ in answers)
        runs.append((seconds, servers.cpu() - cpu, statistics.median(a[0] for a in answers)))
        servers.reset()
    seconds, cpu, first = min(runs)
    print_json(
        {
            "what": what,
            "streams": streams,
            "tokens_per_s": round(streams * tokens / seconds),
            "first_event_ms": round(1e3 * first, 1),
            "server_cpu_ms_per_token": round(1e3 * cpu / streams / tokens, 4),
            "server_cores": round(cpu / seconds, 2),
            "equal": equal,
        }
    )


class Servers:
    """Servers of one setting. paths: their sockets."""

    def __init__(self, processes: "list[subprocess.Popen[bytes]]", paths: list[str]) -> None:
        self.processes = processes
        self.paths = paths

    def cpu(self) -> float:
        """Return the CPU seconds of the servers' own processes."""
        return sum(cpu_seconds(process.pid) for process in self.processes)

    def client(self, path: str) -> httpx.Client:
        """Return a client of one of the servers."""
        transport = httpx.HTTPTransport(uds=path)
        return httpx.Client(transport=transport, base_url="http://localhost", timeout=PATIENCE)

    def reset(self) -> None:
        """Drop cached prefixes, so that each load computes its prompts."""
        for path in self.paths:
            with self.client(path) as client:
                client.post("/reset_prefix_cache").raise_for_status()

    def metric(self, name: str) -> list[float]:
        """Return the values of a metric of the first server."""
        with self.client(self.paths[0]) as client:
            text = client.get("/metrics").text
        lines = re.findall(rf"^lockstep:{name}{{.*}} (\S+)$", text, re.MULTILINE)
        return [float(value) for value in lines]


@contextlib.contextmanager
def started(commands: Sequence[tuple[Sequence[str], dict[str, str]]]) -> Iterator[Servers]:
    """Start servers with these options and environments, and yield them once they are healthy."""
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [str(folder / f"socket{i}") for i in range(len(commands))]
        logs = [folder / f"log{i}" for i in range(len(commands))]
        try:
            for (options, environment), path, log in zip(commands, paths, logs, strict=True):
                command = [sys.executable, "-m", "lockstep", "serve", "--uds", path, *options]
                with log.open("w") as file:
                    processes.append(
                        subprocess.Popen(
                            command, stdout=file, stderr=file, env=os.environ | environment
                        )
                    )
            servers = Servers(processes, paths)
            deadline = time.monotonic() + PATIENCE
            for process, path, log in zip(processes, paths, logs, strict=True):
                wait_for_server(process, path, log, servers, deadline)
            yield servers
        except BaseException:
            print("\n".join(log.read_text()[-3000:] for log in logs), file=sys.stderr)
            raise
        finally:
            for process in processes:
                process.send_signal(signal.SIGINT)
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
                process.kill()


def wait_for_server(
    process: "subprocess.Popen[bytes]", path: str, log: Path, servers: Servers, deadline: float
) -> None:
    """Wait until a server is healthy. Raises RuntimeError with its log if it ends."""
    wait_until(lambda: Path(path).exists() or process.poll() is not None, deadline)
    if process.poll() is not None:
        raise RuntimeError(log.read_text())
    with servers.client(path) as client:
        wait_until(lambda: client.get("/health").status_code == 200, deadline)


def wait_until(condition: Callable[[], bool], deadline: float) -> None:
    """Wait for a condition. Raises TimeoutError after the deadline."""
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not become true in time")
        time.sleep(0.05)


def replica_processes(server: int) -> list[int]:
    """Return the processes of a server's replicas. server: its process id."""
    name = f"ray::ServeReplica:lockstep-{os.uname().nodename.lower()}-{server}:".encode()
    result = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cmdline").read_bytes().startswith(name):
                result.append(int(entry.name))
    return sorted(result)


def kill_a_replica(clients: Clients, servers: Servers, tokens: int) -> None:
    """Kill a replica and its engine under KILL_STREAMS streams, and print what came of them."""
    clients.send(servers.paths, KILL_STREAMS, tokens)
    servers.reset()

    def kill() -> float:
        deadline = time.monotonic() + PATIENCE
        wait_until(lambda: min(servers.metric("replica_num_requests_running")) > 4, deadline)
        time.sleep(0.5)
        replica, *_ = replica_processes(servers.processes[0].pid)
        for pid in (replica, *children_of(replica)):
            os.kill(pid, signal.SIGKILL)
        return time.monotonic()

    begun = time.monotonic()
    with ThreadPoolExecutor(1) as killer:
        future = killer.submit(kill)
        answers, equal = clients.send(servers.paths, KILL_STREAMS, tokens)
        killed = future.result()
    print_json(
        {
            "what": "kill -9 of a replica",
            "streams": KILL_STREAMS,
            "killed_after_s": round(killed - begun, 2),
            "complete_after_s": round(max(end for _, end, _ in answers), 2),
            "moved": servers.metric("requests_moved_total"),
            "equal": equal,
        }
    )


def make_folder(source: str, folder: Path) -> str:
    """Copy a config.json, and add the smallest tokenizer: the load works with token ids."""
    folder.mkdir()
    (folder / "config.json").write_text((Path(source) / "config.json").read_text())
    vocab = {chr(i): i for i in range(VOCAB)}
    Tokenizer(BPE(vocab=vocab, merges=[])).save(str(folder / "tokenizer.json"))
    return str(folder)


def main() -> None:
    """Measure the settings that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", type=parse_counts, default=(32, 128))
    parser.add_argument("--tokens", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--kill-tokens", type=int, default=768, help="the same, at the kill")
    parser.add_argument("--rows", type=int, default=64, help="rows of an engine")
    parser.add_argument("--what", default=",".join(WHAT))
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    kinds = args.what.split(",")
    if not set(kinds) <= set(WHAT):
        parser.error(f"--what={args.what!r} is not allowed; allowed: {', '.join(WHAT)}")
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(CLIENTS, context) as pool,
    ):
        options = ["--max-num-seqs", str(args.rows), "--max-model-len", "2048"]
        options += ["--served-model-name", "lockstep", "--speculative-config", "none"]
        options += ["--enable-reset-prefix-cache"]
        if args.model:
            options = [
                make_folder(args.model, Path(name) / "m"),
                "--load-format",
                "dummy",
                *options,
            ]
        options += ["--device", "cpu"] if args.cpu else []
        on_ray = [*options, "--ray-address", "auto"]
        settings: dict[str, list[tuple[list[str], dict[str, str]]]] = {
            "servers": [(options, {"CUDA_VISIBLE_DEVICES": str(gpu)}) for gpu in range(2)],
            "replicas": [([*on_ray, "--replicas", "2"], {})],
            "ranks": [([*on_ray, "--replicas", "1", "--tensor-parallel-size", "2"], {})],
        }
        clients = Clients(pool)
        for what in kinds:
            begun = time.monotonic()
            with started(settings[what]) as servers:
                print_json({"what": what, "start_s": round(time.monotonic() - begun, 1)})
                if what == "replicas":
                    deadline = time.monotonic() + PATIENCE
                    wait_until(lambda: len(servers.metric("replica_info")) == 2, deadline)
                for streams in args.streams:
                    measure(clients, what, servers, streams, args.tokens)
                if what == "replicas":
                    kill_a_replica(clients, servers, args.kill_tokens)


if __name__ == "__main__":
    main()
