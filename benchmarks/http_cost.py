"""Tokens/s through HTTP over those of the engine alone: what serving costs.

    python benchmarks/http_cost.py MODEL --streams 64 --input-len 128 --output-len 256 --rounds 3

Starts one engine in its process, as `lockstep serve` does. Each round asks it for so many answers
at once, without HTTP and through the server, by `lockstep bench serving`'s own client; which of the
two goes first changes with the round. The first round does not count: prompts of new shapes compile
kernels. Prints a line of JSON: tokens/s of the rounds, and the share through HTTP, the median over
the other rounds of the one divided by the other. Further options are the engine's, as JSON.
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
from lockstep.bench.serving import FIRST_ID, Load, random_requests, run_load
from lockstep.config import EngineConfig
from lockstep.engine.async_engine import AsyncEngine
from lockstep.engine.process_transport import ProcessTransport
from lockstep.llm import processor_of
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.serve.engine_factory import engine_factory
from lockstep.serve.server import Address, Options, serve
from lockstep.text.settings import TextSettings

STEP_SECONDS = 120.0
PATIENCE = 60.0
VOCABULARY = 4096
"""Random token ids are below this, whatever the tokenizer knows."""


def bodies(asked: argparse.Namespace, seed: int) -> list[Any]:
    """A round's requests; no two rounds share a prompt."""
    sizes = (asked.streams, asked.input_len, asked.output_len, VOCABULARY, seed)
    return random_requests("lockstep", *sizes, temperature=0.0, ignore_eos=True)


async def without_http(engine: AsyncEngine, asked: argparse.Namespace, seed: int) -> float:
    """Tokens/s of a round that goes straight to the engine's process."""

    async def one(number: int, prompt: list[int]) -> int:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=asked.output_len)
        request = Request(f"round {seed} request {number}", prompt, params)
        return sum([len(update.token_ids) async for update in engine.stream(request)])

    prompts = [ask.body["prompt"] for ask in bodies(asked, seed)]
    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*(one(*pair) for pair in enumerate(prompts))))
    return tokens / (time.perf_counter() - began)


def wait_for(url: str) -> None:
    """Returns once the server answers."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=PATIENCE).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"{url} does not answer")


def serving(engine: AsyncEngine, transport: ProcessTransport) -> Server:
    """Serves the engine over HTTP from now on."""
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
    """Measures both ways, and prints the line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON: the engine's")
    asked = parser.parse_args()
    assert VOCABULARY > FIRST_ID and asked.rounds > 1
    settings = {"max_num_seqs": asked.streams, **asked.settings}
    config = EngineConfig.read(model=asked.model, **settings)
    make = partial(engine_factory, config, TextSettings(), "text")
    transport = ProcessTransport(make, STEP_SECONDS)
    engine = AsyncEngine(transport)
    engine.start()
    server = serving(engine, transport)
    load = Load(concurrency=asked.streams)
    ways: dict[str, Callable[[int], float]] = {
        "own": lambda seed: asyncio.run(without_http(engine, asked, seed)),
        "served": lambda seed: run_load(server, bodies(asked, seed), load).tokens_per_s,
    }
    told: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(asked.rounds):
        order = list(ways)[:: 1 if number % 2 else -1]
        for place, name in enumerate(order):
            told[name].append(round(ways[name](2 * number + place), 1))
    engine.shutdown()
    shares = [through / alone for alone, through in zip(*told.values(), strict=True)][1:]
    share = round(statistics.median(shares), 4)
    print(json.dumps({"streams": asked.streams, **told, "share": share}), flush=True)
    os._exit(0)  # the server's thread does not outlive the interpreter


if __name__ == "__main__":
    main()
