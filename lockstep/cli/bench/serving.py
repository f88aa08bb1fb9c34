"""lockstep bench serving: latencies of a running server under load."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lockstep.cli.bench.shared import (
    MAX_CONTEXT,
    Json,
    Temperature,
    check_plot,
    parse_counts,
    round_floats,
)
from lockstep.cli.bench.tables import serving_table
from lockstep.cli.show import print_result
from lockstep.errors import ConfigError, choice_error
from lockstep.progress import progress_bar

if TYPE_CHECKING:
    from lockstep.bench.http_client import StreamRequest

MAX_CONCURRENCY = 4096
"""Maximum concurrent requests; each has a thread."""
MAX_REQUESTS = 1_000_000
"""Maximum requests of one load."""
MAX_VOCAB_SIZE = 1 << 19
"""Maximum vocabulary size of random prompts; no known model has as many tokens."""
MAX_TIMEOUT = 86_400.0
"""Maximum seconds to wait for a byte: one day."""


def serving(
    url: Annotated[str, typer.Option(help="address of the server, with /v1 or without")] = (
        "http://127.0.0.1:8000"
    ),
    model: Annotated[
        str | None, typer.Option(help="model name; default: the first of /v1/models")
    ] = None,
    dataset: Annotated[
        str, typer.Option(help="random (token ids), or samples (the bundled conversations)")
    ] = "random",
    input_len: Annotated[
        int, typer.Option(min=1, max=MAX_CONTEXT, help="tokens of a random prompt")
    ] = 1024,
    output_len: Annotated[
        int, typer.Option(min=1, max=MAX_CONTEXT, help="maximum output tokens")
    ] = 128,
    vocab_size: Annotated[
        int, typer.Option(min=1, max=MAX_VOCAB_SIZE, help="random token ids are below this")
    ] = 4096,
    num_requests: Annotated[
        int, typer.Option(min=1, max=MAX_REQUESTS, help="requests per load")
    ] = 100,
    rate: Annotated[str, typer.Option(help="requests/s (Poisson), separated by commas")] = "",
    concurrency: Annotated[str, typer.Option(help="concurrent requests, separated by commas")] = "",
    temperature: Temperature = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option(help="generate exactly output_len tokens; not every server supports it")
    ] = False,
    seed: Annotated[int, typer.Option(help="seed of prompts and arrival times")] = 0,
    api_key: Annotated[str | None, typer.Option(help="API key, sent as a bearer token")] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=MAX_TIMEOUT, help="seconds to wait for the next byte")
    ] = 600.0,
    plot: Annotated[
        Path | None, typer.Option(help="write a plot of latencies by load, .png")
    ] = None,
    json: Json = False,
) -> None:
    """Send load to a running OpenAI-compatible server and measure its latencies.

    Each --rate is an open loop, each --concurrency a closed loop. The default is --concurrency
    1,8,64.
    """
    from lockstep.bench import serving as bench_serving
    from lockstep.bench.http_client import Server

    if plot:
        # Before the load: a missing library must not cost a long measurement.
        bench_serving.need_plots()
        check_plot(plot)
    loads = [bench_serving.Load(rate=value) for value in _rates(rate)]
    counts = concurrency or ("" if loads else "1,8,64")
    if counts:
        concurrencies = parse_counts("concurrency", counts, MAX_CONCURRENCY)
        loads += [bench_serving.Load(concurrency=value) for value in concurrencies]
    server = Server.at(url, api_key, timeout)
    name = model or server.first_model()
    extra: dict[str, Any] = {"temperature": temperature}
    if ignore_eos:
        extra["ignore_eos"] = True
    sizes = (name, num_requests, input_len, output_len, vocab_size)

    def make_requests(seed: int) -> "list[StreamRequest]":
        return bench_serving.make_requests(dataset, *sizes, seed, **extra)

    with progress_bar() as show:
        runs = bench_serving.run_loads(server, make_requests, loads, seed, show)
    if plot:
        bench_serving.plot(runs, plot, f"{name} at {url}")
    if not json:
        Console(highlight=False).print(serving_table(runs))
    about = {"bench": "serving", "url": url, "model": name, "dataset": dataset}
    rounded = [{k: round_floats(v) for k, v in asdict(run).items()} for run in runs]
    print_result(about | {"output_len": output_len, "runs": rounded}, json)


def _rates(value: str) -> list[float]:
    """Parse the option --rate such as 0.5,2. Raises ConfigError."""
    try:
        rates = [float(rate) for rate in value.split(",")] if value else []
    except ValueError:
        rates = [0.0]
    if any(not 0 < rate < 1e6 for rate in rates):
        allowed = "requests/s above 0, separated by commas, e.g. 0.5,2,8"
        raise choice_error(ConfigError, "rate", value, allowed, "Pass such rates.")
    return rates
