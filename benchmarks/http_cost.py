"""Throughput through HTTP as a share of the engine's own throughput.

    python benchmarks/http_cost.py MODEL --streams 64 --input-len 128 --output-len 256 --rounds 3

Starts one engine in its process, as `lockstep serve` does. Each round requests --streams answers
concurrently, once without HTTP and once through the server with the client of `lockstep bench
serving`; rounds alternate which comes first. The first round does not count, since new prompt
shapes compile kernels. Prints a line of JSON: tokens/s of all rounds, and the median share over the
other rounds. --settings takes engine settings as JSON.
"""

import argparse
import asyncio
import json
import os
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any

from lockstep.bench.http_client import Server
from lockstep.bench.measurement import Stopwatch, greedy_params, print_json
from lockstep.bench.serving import FIRST_ID, Load, random_requests, run_load
from lockstep.config import EngineConfig
from lockstep.engine.async_engine import AsyncEngine
from lockstep.engine.process_transport import ProcessTransport
from lockstep.llm import processor_of
from lockstep.scheduling.request import Request
from lockstep.serve.engine_factory import engine_factory
from lockstep.serve.server import Address, Options, serve
from lockstep.text.settings import TextSettings

STEP_SECONDS = 120.0
"""Watchdog limit of one engine step."""
PATIENCE = 60.0
"""Seconds until the server must answer."""
VOCABULARY = 4096
"""Upper bound of random token ids, whatever the tokenizer's vocabulary."""


def bodies(args: argparse.Namespace, seed: int) -> list[Any]:
    """Return the requests of a round. Rounds share no prompt."""
    sizes = (args.streams, args.input_len, args.output_len, VOCABULARY, seed)
    return random_requests("lockstep", *sizes, temperature=0.0, ignore_eos=True)


async def without_http(engine: AsyncEngine, args: argparse.Namespace, seed: int) -> float:
    """Return the tokens/s of a round that goes directly to the engine's process."""

    async def one(number: int, prompt: list[int]) -> int:
        request = Request(f"round {seed} request {number}", prompt, params)
        return sum([len(update.token_ids) async for update in engine.stream(request)])

    params = greedy_params(args.output_len)
    prompts = [request.body["prompt"] for request in bodies(args, seed)]
    watch = Stopwatch()
    tokens = sum(await asyncio.gather(*(one(*pair) for pair in enumerate(prompts))))
    return tokens / watch.wall


def wait_for(url: str) -> None:
    """Wait until the server answers. Raises SystemExit after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=PATIENCE).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"{url} does not answer")


def serving(engine: AsyncEngine, transport: ProcessTransport) -> Server:
    """Start an HTTP server of the engine in a thread; return its client."""
    facts = transport.facts
    address = Address(port=0)
    listener = address.bind()
    url = address.url(listener, tls=False)
    work = partial(
        serve,
        engine,
        processor_of(facts, TextSettings()),
        listener,
        model_names=("lockstep",),
        fingerprint=facts.fingerprint,
        address=address,
        options=Options(),
        show=lambda line: None,
    )
    threading.Thread(target=work, daemon=True).start()
    wait_for(url)
    return Server.at(url)


def main() -> None:
    """Measure both ways and print the line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON: the engine's")
    args = parser.parse_args()
    assert VOCABULARY > FIRST_ID and args.rounds > 1
    settings = {"max_num_seqs": args.streams, **args.settings}
    config = EngineConfig.read(model=args.model, **settings)
    make = partial(engine_factory, config, TextSettings(), "text")
    transport = ProcessTransport(make, STEP_SECONDS)
    engine = AsyncEngine(transport)
    engine.start()
    server = serving(engine, transport)
    concurrency = Load(concurrency=args.streams)
    ways: dict[str, Callable[[int], float]] = {
        "own": lambda seed: asyncio.run(without_http(engine, args, seed)),
        "served": lambda seed: run_load(server, bodies(args, seed), concurrency).tokens_per_s,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds):
        order = list(ways)[:: 1 if number % 2 else -1]
        for index, name in enumerate(order):
            rates[name].append(round(ways[name](2 * number + index), 1))
    engine.shutdown()
    shares = [through / alone for alone, through in zip(*rates.values(), strict=True)][1:]
    share = round(statistics.median(shares), 4)
    print_json({"streams": args.streams, **rates, "share": share})
    os._exit(0)  # the server's thread does not outlive the interpreter


if __name__ == "__main__":
    main()
