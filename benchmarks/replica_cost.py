"""Costs of replicas on Ray Serve against one engine, with the bundled model on a CPU.

    python benchmarks/replica_cost.py servers
    python benchmarks/replica_cost.py messages

`servers` prints a line of JSON for one engine and one for two replicas: CPU milliseconds of the
server's process per token of 16 streams, and per request of one token of 200 at once, and the
memory of all processes. `messages` prints a line each for Ray's objects and for gRPC: what an item
of a stream and a call cost between two processes that do nothing else. Both need Ray
(`pip install '.[ray]'`).
"""

import argparse
import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from lockstep.bench.measurement import children_of, cpu_seconds, print_json

OPTIONS = ["--max-model-len", "1024", "--max-num-seqs", "16", "--speculative-config", "none"]
PATIENCE = 600.0
"""Seconds until a server must answer."""
STREAMS = 16
STREAM_TOKENS = 200
REQUESTS = 200
ROUNDS = 3
ITEMS = 2000
"""Items of a stream whose CPU time is measured."""
CALLS = 300
PAUSED_ITEMS = 100
"""Items of a stream whose latency is measured."""
PAUSE_SECONDS = 0.02
"""Seconds before each of them, so that none waits for another."""


def descendants(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    return [pid, *(one for child in children_of(pid) for one in descendants(child))]


def memory_mib(pid: int) -> float:
    """Return the proportional set size of a process in MiB."""
    size = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    return int(size[1]) / 1024 if size else 0.0


def measure_server(replicas: int) -> dict[str, Any]:
    """Start a server, measure it and end it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = start_server(folder, replicas)
        try:
            return {"replicas": replicas, **asyncio.run(load(server, folder))}
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()


def start_server(folder: Path, replicas: int) -> "subprocess.Popen[bytes]":
    """Start a server with its socket and its log in the folder. Ray writes to stdout too."""
    socket = folder / "socket"
    command = [sys.executable, "-m", "lockstep", "serve", "--uds", str(socket), *OPTIONS]
    command += ["--replicas", str(replicas)] if replicas > 1 else []
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


async def load(server: "subprocess.Popen[bytes]", folder: Path) -> dict[str, float]:
    """Wait until the server answers, and measure it."""
    socket = folder / "socket"
    transport = httpx.AsyncHTTPTransport(uds=str(socket))
    body: dict[str, Any] = {"model": "lockstep", "temperature": 0, "ignore_eos": True}

    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", timeout=PATIENCE
    ) as client:
        deadline = time.monotonic() + PATIENCE
        while not (socket.exists() and (await client.get("/health")).status_code == 200):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((folder / "log").read_text())
            await asyncio.sleep(0.2)

        async def cpu_of(bodies: list[dict[str, Any]]) -> float:
            """Return the server's CPU seconds for these requests at once, the lowest of ROUNDS."""
            rounds = []
            for _ in range(ROUNDS):
                before = cpu_seconds(server.pid)
                posts = [client.post("/v1/completions", json=body | one) for one in bodies]
                for response in await asyncio.gather(*posts):
                    response.raise_for_status()
                rounds.append(cpu_seconds(server.pid) - before)
            return min(rounds)

        short = {"prompt": "def f(x):", "max_tokens": 1}
        long = {"max_tokens": STREAM_TOKENS, "stream": True}
        tokens = await cpu_of([{"prompt": f"def f{i}(x):", **long} for i in range(STREAMS)])
        requests = await cpu_of([short] * REQUESTS)
    memory = sum(map(memory_mib, set(descendants(server.pid))))
    return {
        "cpu_ms_per_token": round(1e3 * tokens / (STREAMS * STREAM_TOKENS), 3),
        "cpu_ms_per_request": round(1e3 * requests / REQUESTS, 2),
        "memory_gb": round(memory / 1024, 2),
    }


async def cpu_ms(count: int, work: Callable[[], Awaitable[Any]]) -> float:
    """Return the CPU ms of this process per item of a work of `count` items.

    It is the lowest of ROUNDS rounds.
    """
    rounds = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        await work()
        rounds.append(time.process_time() - begun)
    return round(1e3 * min(rounds) / count, 2)


async def measure_messages(handle: Any, by_reference: bool) -> dict[str, Any]:
    """Measure a handle of a deployment that sends items of 500 bytes."""
    one = handle.options(_by_reference=by_reference).one
    items = handle.options(stream=True, _by_reference=by_reference).items

    async def read(count: int, pause: float, latencies: list[float]) -> None:
        async for sent, _ in items.remote(count, pause):
            latencies.append(1e3 * (time.time() - sent))

    async def call(count: int) -> None:
        await asyncio.gather(*(one.remote() for _ in range(count)))

    await call(10)
    latencies: list[float] = []
    await read(PAUSED_ITEMS, PAUSE_SECONDS, latencies)
    return {
        "by": "objects" if by_reference else "gRPC",
        "item_cpu_ms": await cpu_ms(ITEMS, lambda: read(ITEMS, 0, [])),
        "item_latency_ms": round(statistics.median(latencies), 2),
        "call_cpu_ms": await cpu_ms(CALLS, lambda: call(CALLS)),
    }


def messages() -> None:
    """Start Ray and a deployment, and measure both ways to call it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve
    from ray.serve.config import ProxyLocation

    logs = {"log_level": "WARNING", "enable_access_log": False}

    @serve.deployment(
        max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}, logging_config=logs
    )
    class Sender:
        async def one(self) -> int:
            return 1

        async def items(self, count: int, pause: float) -> Any:
            for _ in range(count):
                await asyncio.sleep(pause)
                yield time.time(), b"x" * 500

    ray.init(include_dashboard=False, object_store_memory=100 << 20, logging_level="ERROR")
    serve.start(proxy_location=ProxyLocation.Disabled, logging_config=logs)
    try:
        handle = serve.run(Sender.bind(), name="messages", route_prefix=None)

        async def work() -> None:
            for by_reference in (True, False):
                print_json(await measure_messages(handle, by_reference))

        asyncio.run(work())
    finally:
        ray.shutdown()


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("servers", "messages"))
    if parser.parse_args().what == "messages":
        messages()
        return
    for replicas in (1, 2):
        print_json(measure_server(replicas))


if __name__ == "__main__":
    main()
