"""Load test of any OpenAI-compatible server, by request rate or by concurrency.

Open loop: requests are due at the times of a seeded Poisson process, whether or not the server
keeps up; latency counts from the due time. Closed loop: a number of callers with one request each.
"""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.bench.http_client import Server, StreamRequest, StreamResult, send
from lockstep.errors import ConfigError, choice_error, install_extra
from lockstep.example_prompts import CONVERSATIONS
from lockstep.progress import Progress, ignore_progress

PERCENTILES = (50, 90, 99)
FIRST_ID = 10
"""First id of random prompts; many vocabularies have special tokens below it."""
MAX_PROMPT_TOKENS = 1 << 27
"""Maximum random prompt tokens of a load: all prompts are in memory before the first is sent."""


@dataclass(frozen=True)
class Load:
    """Load: rate in requests/s of an open loop, or concurrency of a closed loop."""

    rate: float | None = None
    concurrency: int | None = None

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s" if self.rate else f"{self.concurrency} at once"


@dataclass(frozen=True)
class ServingFigures:
    """Figures of a load. Latencies in ms: p50, p90, p99.

    ttft: time to first token. tpot: time per token after the first, by request. itl: time between
    chunks. tokens_per_s: generated tokens over the time from the first request to the last answer.
    Failed requests count only in `failed`.
    """

    rate: float | None
    concurrency: int | None
    requests: int
    failed: int
    seconds: float
    requests_per_s: float
    prompt_tokens: int
    tokens: int
    tokens_per_s: float
    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]


def random_requests(
    model: str, count: int, input_len: int, output_len: int, vocab: int, seed: int, **extra: Any
) -> list[StreamRequest]:
    """Return `count` distinct completions of random token ids below `vocab`."""
    if vocab <= FIRST_ID or input_len < 1:
        raise ConfigError(
            f"input_len={input_len}, vocab_size={vocab} are not allowed; allowed: input_len from "
            f"1, vocab_size from {FIRST_ID + 1}. Raise the one that is too small."
        )
    if count * input_len > MAX_PROMPT_TOKENS:
        raise ConfigError(
            f"num_requests={count} times input_len={input_len} is not allowed; allowed: at most "
            f"{MAX_PROMPT_TOKENS:,} prompt tokens per load. Lower one of them."
        )
    rng = random.Random(seed)
    prompts = [rng.choices(range(FIRST_ID, vocab), k=input_len) for _ in range(count)]
    body = _common_body(model, output_len) | extra
    return [StreamRequest("/completions", {**body, "prompt": prompt}) for prompt in prompts]


def conversation_requests(
    model: str, count: int, output_len: int, **extra: Any
) -> list[StreamRequest]:
    """Return `count` chat requests that cycle through the bundled conversations."""
    common = _common_body(model, output_len) | extra
    requests = []
    roles = ("user", "assistant")
    for index in range(count):
        turns, tools = CONVERSATIONS[index % len(CONVERSATIONS)]
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
        body = {**common, "messages": messages} | ({"tools": tools} if tools else {})
        requests.append(StreamRequest("/chat/completions", body))
    return requests


def make_requests(
    dataset: str,
    model: str,
    count: int,
    input_len: int,
    output_len: int,
    vocab: int,
    seed: int,
    **extra: Any,
) -> list[StreamRequest]:
    """Return requests of a dataset: random or samples. Raises ConfigError for another name."""
    if dataset == "random":
        return random_requests(model, count, input_len, output_len, vocab, seed, **extra)
    if dataset == "samples":
        return conversation_requests(model, count, output_len, **extra)
    raise choice_error(ConfigError, "dataset", dataset, "random, samples", "Choose one of them.")


def _common_body(model: str, output_len: int) -> dict[str, Any]:
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, "max_tokens": output_len, **stream}


def run_loads(
    server: Server,
    make_requests: Callable[[int], Sequence[StreamRequest]],
    loads: Sequence[Load],
    seed: int,
    progress: Progress = ignore_progress,
) -> list[ServingFigures]:
    """Run the loads one after the other, after one warm-up request.

    make_requests(seed) returns new requests for each load, whose prompts the server has not cached.
    """
    send(server, make_requests(seed)[0], time.perf_counter())
    return [
        run_load(
            server, make_requests(seed + index), load, seed + index, partial(progress, str(load))
        )
        for index, load in enumerate(loads, 1)
    ]


def run_load(
    server: Server,
    requests: Sequence[StreamRequest],
    load: Load,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> ServingFigures:
    """Send all requests under a load. Raises ConfigError if none is answered."""
    futures: list[Future[StreamResult]] = []
    rng = random.Random(seed)
    with ThreadPoolExecutor(load.concurrency or len(requests)) as callers:
        started = time.perf_counter()
        due_time = started
        for request in requests:
            if load.rate:
                time.sleep(max(due_time - time.perf_counter(), 0.0))
                futures.append(callers.submit(send, server, request, due_time))
                # From the due time, not from now: a slow server must not slow down the load.
                due_time += rng.expovariate(load.rate)
            else:
                futures.append(callers.submit(_send_now, server, request))
        results = []
        for done, future in enumerate(futures):
            progress(done, len(futures))
            results.append(future.result())
    return figures_of(results, load, started)


def _send_now(server: Server, request: StreamRequest) -> StreamResult:
    return send(server, request, time.perf_counter())


def figures_of(results: Sequence[StreamResult], load: Load, started: float) -> ServingFigures:
    """Return the figures of a load that began at `started`."""
    succeeded = [result for result in results if result.error is None]
    if not succeeded:
        raise ConfigError(
            f"none of {len(results)} requests was answered; the first: {results[0].error}. "
            "Look at the server, its URL and the name of its model."
        )
    seconds = max(result.end_time for result in succeeded) - started
    tokens = sum(result.tokens for result in succeeded)
    return ServingFigures(
        rate=load.rate,
        concurrency=load.concurrency,
        requests=len(results),
        failed=len(results) - len(succeeded),
        seconds=seconds,
        requests_per_s=len(succeeded) / seconds,
        prompt_tokens=sum(result.prompt_tokens for result in succeeded),
        tokens=tokens,
        tokens_per_s=tokens / seconds,
        ttft_ms=_percentiles([result.ttft for result in succeeded]),
        tpot_ms=_percentiles([result.tpot for result in succeeded if result.tpot is not None]),
        itl_ms=_percentiles([gap for result in succeeded for gap in result.itl]),
    )


def _percentiles(seconds: list[float]) -> tuple[float, ...]:
    """Return PERCENTILES in ms, interpolated; 0 without values."""
    ordered = sorted(seconds) or [0.0]
    values = []
    for percent in PERCENTILES:
        rank = (len(ordered) - 1) * percent / 100
        lower = int(rank)
        upper = min(lower + 1, len(ordered) - 1)
        value = ordered[lower] + (ordered[upper] - ordered[lower]) * (rank - lower)
        values.append(1e3 * value)
    return tuple(values)


def need_plots() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"plot needs matplotlib, which is not installed: {install_extra('bench')}, or "
            "leave --plot out."
        ) from None


def plot(runs: Sequence[ServingFigures], path: Path, title: str) -> None:
    """Write a PNG of latencies and throughput over the loads."""
    need_plots()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(2, 2).flat
    positions = range(len(runs))
    labels = [f"{r.rate:g}/s" if r.rate else str(r.concurrency) for r in runs]
    latencies = (
        ("time to first token, ms", [r.ttft_ms for r in runs]),
        ("time per token after the first, ms", [r.tpot_ms for r in runs]),
        ("inter-token latency, ms", [r.itl_ms for r in runs]),
    )
    for panel, (name, values) in zip(panels, latencies, strict=False):
        for index, percent in enumerate(PERCENTILES):
            panel.plot(positions, [v[index] for v in values], marker="o", label=f"p{percent}")
        panel.set_title(name)
        panel.legend()
    last = figure.axes[-1]
    last.plot(positions, [r.tokens_per_s for r in runs], marker="o", color="black")
    last.set_title("generated tokens/s")
    for panel in figure.axes:
        panel.set_xticks(positions, labels)
        panel.set_xlabel("requests/s, or concurrent requests")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
