"""Server latency and throughput with its engine in a thread and in a separate process.

    python benchmarks/engine_process.py --streams 32 --tokens 100 --rounds 3 [-- OPTIONS]

OPTIONS are those of serve. Each round starts both servers, one after the other. Each server gets
--streams concurrent chats with random sampling, every fourth with a grammar. Meanwhile /health is
requested every 20 ms: its latency is what the HTTP side adds to any answer.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from lockstep.bench.measurement import percentile, print_json, start_server

TIMEOUT_SECONDS = 300.0
"""Timeout of a request, in seconds."""
HEALTH_SECONDS = 0.02
"""Seconds between two requests for /health."""
ENGINE_OPTIONS = {"thread": ["--disable-frontend-multiprocessing"], "process": []}
"""Place of the engine -> options of serve."""


@dataclass(frozen=True)
class Figures:
    """Figures of one round; latencies in ms.

    tokens_per_s: generated tokens of all streams. health_p50, health_p99: latency of /health.
    gap_p99: time between two events of a stream. first_event_p99: time to the first event.
    """

    tokens_per_s: float
    health_p50: float
    health_p99: float
    gap_p99: float
    first_event_p99: float


def percentile_ms(seconds: list[float], share: float) -> float:
    """Return a percentile of seconds, in ms."""
    return percentile(seconds, share) * 1e3


async def stream(
    client: httpx.AsyncClient, number: int, tokens: int, firsts: list[float], gaps: list[float]
) -> int:
    """Run one chat and record its latencies; return its number of tokens."""
    body = {
        "messages": [{"role": "user", "content": f"Write down number {number} and what follows."}],
        "max_tokens": tokens,
        "min_tokens": tokens,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if number % 4 == 0:
        del body["min_tokens"]
        body["structured_outputs"] = {"regex": "[a-z ]{" + str(4 * tokens) + ",}"}
    last = time.monotonic()
    is_started = False
    num_tokens = 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.monotonic()
            (gaps if is_started else firsts).append(now - last)
            is_started = True
            last = now
            usage = json.loads(line[6:]).get("usage")
            num_tokens = usage["completion_tokens"] if usage else num_tokens
    return num_tokens


async def ask_health(client: httpx.AsyncClient, times: list[float]) -> None:
    """Request /health again and again until cancelled."""
    while True:
        began = time.monotonic()
        await client.get("/health")
        times.append(time.monotonic() - began)
        await asyncio.sleep(HEALTH_SECONDS)


async def load(path: str, streams: int, tokens: int) -> Figures:
    """Run one load against a server that listens."""
    limits = httpx.Limits(max_connections=streams + 1)
    transport = httpx.AsyncHTTPTransport(uds=path, limits=limits)
    firsts: list[float] = []
    gaps: list[float] = []
    health: list[float] = []
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", timeout=TIMEOUT_SECONDS
    ) as client:
        await stream(client, 0, tokens, [], [])
        asking = asyncio.create_task(ask_health(client, health))
        began = time.monotonic()
        work = (stream(client, number, tokens, firsts, gaps) for number in range(streams))
        total = sum(await asyncio.gather(*work))
        seconds = time.monotonic() - began
        asking.cancel()
    return Figures(
        total / seconds,
        percentile_ms(health, 0.5),
        percentile_ms(health, 0.99),
        percentile_ms(gaps, 0.99),
        percentile_ms(firsts, 0.99),
    )


def measure(engine_place: str, args: argparse.Namespace) -> Figures:
    """Start a server, load it, and stop it. engine_place: a key of ENGINE_OPTIONS."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "socket")
        options = [
            "--uds",
            path,
            *ENGINE_OPTIONS[engine_place],
            "--max-num-seqs",
            str(args.streams),
        ]
        server = start_server([*options, *args.options])
        try:
            return asyncio.run(load(path, args.streams, args.tokens))
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    """Print the medians over the rounds, a line for each place of the engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("options", nargs="*", help="options of lockstep serve, after --")
    args = parser.parse_args()
    figures: dict[str, list[Figures]] = {engine_place: [] for engine_place in ENGINE_OPTIONS}
    for _ in range(args.rounds):
        for engine_place in ENGINE_OPTIONS:
            figures[engine_place].append(measure(engine_place, args))
    for engine_place, rounds in figures.items():
        medians = {
            name: round(
                statistics.median(getattr(round_figures, name) for round_figures in rounds), 1
            )
            for name in vars(rounds[0])
        }
        print_json({"engine": engine_place, **medians})


if __name__ == "__main__":
    main()
