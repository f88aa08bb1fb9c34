"""Tokens/s through HTTP over those of the engine alone: what serving costs.

    python benchmarks/http_cost.py MODEL --streams 64 --input-len 128 --output-len 256 --rounds 3

Starts one engine in its process, as `lockstep serve` does. Each round asks it for so many answers
at once, first without HTTP, then through the server, by `lockstep bench serving`'s own client. The
first round of both does not count: prompts of new shapes compile kernels. Prints a line of JSON:
medians over the other rounds. Further options are the engine's, as JSON.
"""

import argparse
import asyncio
import json
import statistics
import threading
import time
import urllib.request
from functools import partial
from typing import Any

from lockstep.bench.http_client import Server
from lockstep.bench.serving import FIRST_ID, Load, random_asks, run_load
from lockstep.config import EngineConfig
from lockstep.engine.async_engine import AsyncEngine
from lockstep.engine.process import ProcessTransport
from lockstep.llm import processor_of
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.serve.hosted import served_engine
from lockstep.serve.run import Address, Options, serve
from lockstep.text.settings import TextSettings

STEP_SECONDS = 120.0
PATIENCE = 60.0
VOCABULARY = 4096
"""Random token ids are below this, whatever the tokenizer knows."""


def bodies(asked: argparse.Namespace, seed: int) -> list[Any]:
    """A round's requests; no two rounds share a prompt."""
    sizes = (asked.streams, asked.input_len, asked.output_len, VOCABULARY, seed)
    return random_asks("lockstep", *sizes, temperature=0.0, ignore_eos=True)


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


def through_http(
    engine: AsyncEngine, transport: ProcessTransport, asked: argparse.Namespace, seeds: list[int]
) -> list[float]:
    """Tokens/s of each round through the server."""
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
    server = Server.at(url)
    load = Load(concurrency=asked.streams)
    return [run_load(server, bodies(asked, seed), load).tokens_per_s for seed in seeds]


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
    make = partial(served_engine, config, TextSettings(), "text")
    transport = ProcessTransport(make, STEP_SECONDS)
    engine = AsyncEngine(transport)
    engine.start()
    own = [asyncio.run(without_http(engine, asked, seed)) for seed in range(asked.rounds)]
    seeds = list(range(asked.rounds, 2 * asked.rounds))
    served = through_http(engine, transport, asked, seeds)
    engine.shutdown()
    alone = statistics.median(own[1:])
    through = statistics.median(served[1:])
    told = {"own": own, "served": served}
    rounded = {name: [round(value, 1) for value in values] for name, values in told.items()}
    print(json.dumps({"streams": asked.streams, **rounded, "share": round(through / alone, 4)}))


if __name__ == "__main__":
    main()
