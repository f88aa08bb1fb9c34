"""A server's start, and its latencies at 50 and 90 % of its capacity.

    python benchmarks/serving_load.py MODEL [--cold] [--start-only] [-- OPTIONS of serve]
    python benchmarks/serving_load.py m/27b --cold -- --load-format dummy --max-num-seqs 64

Starts `lockstep serve MODEL`. Prints one line of JSON for the start, in seconds since the process
began: until it listens, and until the first token of a first request arrives. --cold: Triton's
cache is an empty folder; a second start then uses the cache that the first one filled.

Then --streams callers send --requests completions of --input-len + --output-len random tokens in a
closed loop. Its requests/s are the capacity. Open loops of as many Poisson arrivals follow, at each
share of the capacity in --shares. Prints one line of JSON for each load: output tokens/s, all
tokens/s, and TTFT, TPOT and ITL in ms at p50, p90 and p99. No prompt is repeated.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from lockstep.bench.http_client import Server, StreamRequest, send
from lockstep.bench.measurement import print_json, start_server
from lockstep.bench.serving import PERCENTILES, Load, ServingFigures, random_requests, run_load

STOP_SECONDS = 30.0
"""Seconds from SIGTERM until the server is killed."""
FIRST_TOKENS = 16
"""Tokens of the first answer. Without a tokenizer the last chunk of an answer has no text."""
CACHE = "TRITON_CACHE_DIR"


class StartedServer:
    """Process of `lockstep serve`, and the seconds that its start took.

    listens: until it printed its first line. first_token: until a first request's first token.
    """

    def __init__(self, options: Sequence[str], cache: str | None, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {**os.environ, CACHE: cache} if cache else None
        began = time.perf_counter()
        self.process = start_server(
            [*options, "--port", str(port)], stderr=None, environment=environment
        )
        self.listens = time.perf_counter() - began
        self.server = Server.at(f"http://127.0.0.1:{port}")
        try:
            self.name = self.server.first_model()
            (request,) = self.requests(1, 16, FIRST_TOKENS, 0)
            sent = time.perf_counter()
            result = send(self.server, request, sent)
            if result.error is not None:
                raise SystemExit(f"the first request failed: {result.error}")
        except BaseException:
            self.end()
            raise
        self.first_token = sent - began + result.ttft

    def requests(
        self, count: int, input_len: int, output_len: int, seed: int
    ) -> list[StreamRequest]:
        """Return completions of random token ids, exactly output_len tokens each."""
        sizes = (count, input_len, output_len, self.vocab_size, seed)
        return random_requests(self.name, *sizes, temperature=0.0, ignore_eos=True)

    def end(self) -> None:
        """End the server and wait for it."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(options: Sequence[str], cache: str | None, vocab_size: int, kind: str) -> StartedServer:
    """Start a server and print the seconds that it took. kind: of Triton's cache."""
    started = StartedServer(options, cache, vocab_size)
    seconds = {"listens_s": started.listens, "first_token_s": started.first_token}
    print_json({"start": kind, **{name: round(value, 1) for name, value in seconds.items()}})
    return started


def report(figures: ServingFigures, share: float | None) -> None:
    """Print the figures of a load. share: of the capacity, None for the load that measures it."""
    line: dict[str, Any] = {"share": share, "percentiles": PERCENTILES}
    for name, value in asdict(figures).items():
        rounded = [round(v, 1) for v in value] if isinstance(value, tuple) else value
        line[name] = round(rounded, 2) if isinstance(rounded, float) else rounded
    all_tokens = figures.tokens + figures.prompt_tokens
    print_json(line | {"all_tokens_per_s": round(all_tokens / figures.seconds, 1)})


def measure_loads(
    server: Server,
    make_requests: Callable[[int], list[StreamRequest]],
    streams: int,
    shares: Sequence[float],
) -> None:
    """Run the closed loop and the open loops. make_requests(seed) returns those of one load."""
    # The closed loop runs twice: the first one compiles kernels of prompt shapes that no start did.
    run_load(server, make_requests(1)[:streams], Load(concurrency=streams))
    capacity = run_load(server, make_requests(2), Load(concurrency=streams))
    report(capacity, None)
    for seed, share in enumerate(shares, 3):
        rate = share * capacity.requests_per_s
        report(run_load(server, make_requests(seed), Load(rate=rate), seed), share)


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--cold", action="store_true", help="start with no compiled kernel")
    parser.add_argument("--start-only", action="store_true", help="measure no load")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=4096, help="bound of token ids")
    parser.add_argument(
        "--shares",
        type=lambda text: tuple(float(part) for part in text.split(",")),
        default=(0.5, 0.9),
        help="shares of the capacity, separated by commas",
    )
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    serve_options = sys.argv[at + 1 :]
    args = parser.parse_args(sys.argv[1:at])
    with tempfile.TemporaryDirectory() as folder:
        cache = folder if args.cold else None
        options = [args.model, *serve_options]
        if args.cold:
            start(options, cache, args.vocab_size, "cold").end()
        started = start(options, cache, args.vocab_size, "warm")
        try:
            if not args.start_only:
                sizes = (args.requests, args.input_len, args.output_len)
                make_requests = partial(started.requests, *sizes)
                measure_loads(started.server, make_requests, args.streams, args.shares)
        finally:
            started.end()


if __name__ == "__main__":
    main()
