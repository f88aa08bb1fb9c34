"""lockstep bench: what an answer, a kernel or a server costs on this machine."""

import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lockstep.cli.bench_tables import (
    drafters_table,
    figures_table,
    floor_table,
    kernel_table,
    over_floor,
    serving_table,
    trace_table,
)
from lockstep.cli.command import PlainCommand
from lockstep.cli.groups import usual
from lockstep.cli.options import engine_options, settle_drafts
from lockstep.cli.show import (
    BUNDLED,
    load,
    model_name,
    note,
    print_json,
    print_result,
    progress_bar,
)
from lockstep.cli.vllm.command import FlagCommand, epilog
from lockstep.errors import ConfigError, choice_error
from lockstep.sampling_params import SamplingParams
from lockstep.settings import check_writable

if TYPE_CHECKING:
    import torch

    from lockstep.bench import Figures
    from lockstep.bench.floor import Sketch
    from lockstep.bench.http_client import Ask
    from lockstep.config import EngineConfig
    from lockstep.kernels.bench_types import Model
    from lockstep.llm import LLM
    from lockstep.runner.floor import Floor, StepFloor

MOST_CONTEXT = 1 << 20
"""Tokens of a row: of its prompt, of its answer, or in the cache that kernels are timed at."""
MOST_ROWS = 1 << 16
"""Rows of a kernel's call, and tokens of each of them."""
MOST_AT_ONCE = 4096
"""Requests at once: each has a thread."""
MOST_RUNS = 10_000
"""Runs of a measurement, those that do not count among them."""
MOST_REQUESTS = 1_000_000
"""Requests of one load."""
MOST_VOCAB = 1 << 19
"""Token ids that random prompts are drawn from: more than any vocabulary has."""
MOST_SECONDS = 86_400.0
"""A day: the longest wait that an option may ask for."""
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="print one JSON object alone; elsewhere than on a terminal it comes last"
    ),
]
Temperature = Annotated[float, typer.Option(min=0.0, max=100.0, help="0 is greedy")]
bench = typer.Typer(
    cls=usual("offline"),
    rich_markup_mode=None,
    help="Measure answers, drafters, kernels or servers.",
)


@bench.command(cls=FlagCommand, epilog=epilog())
@engine_options
def offline(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="requests at once")] = 1,
    input_len: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST_CONTEXT,
            help="random prompt tokens; 0: real prompts, so that drafts count",
        ),
    ] = 0,
    output_len: Annotated[
        int, typer.Option(min=1, max=MOST_CONTEXT, help="tokens per answer")
    ] = 128,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="K of the chosen drafter, in every step; 0: no drafts")
    ] = None,
    synthetic_acceptance: Annotated[
        float | None,
        typer.Option(
            help="with --load-format dummy: accept a draft behind accepted ones with this "
            "probability; with p and K drafts the acceptance length is 1 + p + ... + p^K"
        ),
    ] = None,
    temperature: Temperature = 0.0,
    num_iters_warmup: Annotated[
        int, typer.Option(min=0, max=MOST_RUNS, help="runs that do not count")
    ] = 3,
    num_iters: Annotated[int, typer.Option(min=1, max=MOST_RUNS, help="runs that count")] = 5,
    floor: Annotated[
        bool,
        typer.Option("--floor", help="the least time of a step; no weights, no run: that alone"),
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="write the timeline of a few steps here, for Perfetto")
    ] = None,
    json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Measure tokens/s, ms per step, time to first token and acceptance length.

    Prompts are computed anew in every run.

    Other benchmarks: lockstep bench drafters, kernels or serving; each has its --help.
    """
    from lockstep.bench import measure

    settings["enable_prefix_caching"] = False
    settings["max_num_seqs"] = batch_size
    _choose_drafts(settings, num_speculative_tokens, synthetic_acceptance)
    if floor and not _has_weights(settings):
        _show_floor_alone(settings, batch_size, input_len, json)
        return
    if trace:
        check_writable("trace", trace)
    llm = load(settings, quiet=json)
    prompts = [{"prompt_token_ids": ids} for ids in _prompts(llm, batch_size, input_len)]
    if trace:
        _trace(llm, prompts, temperature, trace, json)
        return
    common: dict[str, Any] = dict(max_tokens=output_len, ignore_eos=True, detokenize=False)
    params = [SamplingParams(temperature=temperature, seed=i, **common) for i in range(batch_size)]
    counts = (num_iters_warmup, num_iters)
    if json:
        figures, _ = measure(llm, prompts, params, *counts)
    else:
        with progress_bar() as show:
            figures, _ = measure(llm, prompts, params, *counts, show)
    _report(llm, figures, floor, json)


def _report(llm: "LLM", figures: "Figures", floor: bool, json: bool) -> None:
    from lockstep.bench.floor import describe_floors

    found = _about(llm) | {k: round(v, 4) for k, v in asdict(figures).items()}
    least, prompt = _floors_of_run(llm, figures) if floor else (None, None)
    if least and prompt:
        found |= describe_floors(least, prompt) | {"over_floor": over_floor(figures, least)}
    if not json:
        console = Console(highlight=False)
        if least:
            console.print(floor_table(least, prompt))
        console.print(figures_table(figures, least, prompt))
    print_result(found, json)


def _choose_drafts(
    settings: dict[str, Any], count: int | None, acceptance: float | None = None
) -> None:
    """Settles "auto" drafting, K and synthetic acceptance. Raises ConfigError without a drafter."""
    settings.update(settle_drafts(settings))
    spec = settings["speculative_config"]
    if acceptance is not None:
        if spec is None or count == 0:
            raise ConfigError(
                f"--synthetic-acceptance {acceptance:g} needs a drafter. Name one, e.g. "
                """--speculative-config '{"method": "ngram"}', or leave it out."""
            )
        spec = {**spec, "synthetic_acceptance": acceptance}
        settings["speculative_config"] = spec
    if count is None:
        return
    if count and spec is None:
        raise ConfigError(
            f"--num-speculative-tokens {count} needs a drafter, and this checkpoint has no draft "
            """module. Name one, e.g. --speculative-config '{"method": "ngram"}'."""
        )
    given = {"adaptive": False, **(spec or {}), "num_speculative_tokens": count}
    settings["speculative_config"] = given if count else None


def _about(llm: "LLM") -> dict[str, Any]:
    spec = llm.engine.config.speculative_config
    return {
        "bench": "offline",
        "model": model_name(llm.engine.config),
        "numerics": llm.engine.numerics,
        "speculative_config": asdict(spec) if spec else None,
    }


def _prompts(llm: "LLM", batch_size: int, input_len: int) -> list[list[int]]:
    from lockstep.example_prompts import short_prompts

    if input_len:
        draw = random.Random(0)
        vocabulary = range(llm.engine.vocab_size)
        return [draw.choices(vocabulary, k=input_len) for _ in range(batch_size)]
    real = short_prompts(llm)
    return [real[i % len(real)] for i in range(batch_size)]


@bench.command(cls=FlagCommand, epilog=epilog())
@engine_options
def drafters(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="a speculative_config beside those that the checkpoint allows by itself, e.g. "
            """'{"method": "eagle3", "model": FOLDER}'; may be repeated"""
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option(help="K, in every step, where --drafter does not say")
    ] = 7,
    batch_size: Annotated[int, typer.Option(min=1, help="requests at once")] = 1,
    output_len: Annotated[
        int, typer.Option(min=2, max=MOST_CONTEXT, help="tokens per answer")
    ] = 128,
    temperature: Temperature = 0.0,
    num_iters: Annotated[int, typer.Option(min=1, max=MOST_RUNS, help="runs that count")] = 3,
    plot: Annotated[Path | None, typer.Option(help="a PNG of acceptance and speed")] = None,
    json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Compare the drafters of a model: acceptance by position, cost, tokens/s.

    Status 1 if a drafter changes a token.
    """
    from lockstep.bench import drafters as bench_drafters
    from lockstep.bench.serving import need_plots

    if plot:
        need_plots()
        _check_plot(plot)
    chosen = _drafters_of(settings, drafter or [], num_speculative_tokens)
    params = SamplingParams(
        temperature=temperature, seed=0, max_tokens=output_len, ignore_eos=True, detokenize=False
    )
    asked = (settings, chosen, batch_size, params, num_iters)
    if json:
        lines = bench_drafters.compare_drafters(*asked)
    else:
        with progress_bar() as show:
            lines = bench_drafters.compare_drafters(*asked, show)
        Console(highlight=False).print(drafters_table(lines))
    name = settings["model"] or BUNDLED
    if plot:
        bench_drafters.plot(lines, plot, f"{name}, {batch_size} at once")
    about = {"bench": "drafters", "model": name, "batch_size": batch_size}
    rounded = [{k: _short(v) for k, v in asdict(line).items()} for line in lines]
    print_result(about | {"lines": rounded}, json)
    raise typer.Exit(0 if all(line.agrees for line in lines) else 1)


def _drafters_of(settings: dict[str, Any], named: list[str], count: int) -> list[dict[str, Any]]:
    """The speculative_config of each drafter: those that the checkpoint allows by itself, and those
    named. Raises ConfigError where one is wrong, before a model is loaded."""
    from lockstep.cli.options import read_speculative_config
    from lockstep.engine.build import find_model
    from lockstep.models.checkpoint import Checkpoint
    from lockstep.spec import read, refusals, with_method
    from lockstep.spec.options import FolderOptions

    found: list[dict[str, Any]] = []
    for value in (*named, settings["speculative_config"]):
        config = read_speculative_config(value) if isinstance(value, str) else value
        if isinstance(config, dict):
            given = with_method({"num_speculative_tokens": count, **config})
            options = read(given)
            if isinstance(options, FolderOptions):
                Checkpoint.read(options.folder)
            found.append(given)
    checkpoint = Checkpoint.read(find_model(settings["model"]), settings["hf_overrides"])
    allowed = [method for method, why in refusals(checkpoint).items() if why is None]
    taken = {config["method"] for config in found}
    own = [{"method": m, "num_speculative_tokens": count} for m in allowed if m not in taken]
    for config in own:
        read(config)
    return own + found


@bench.command(cls=PlainCommand)
def kernels(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="whose dimensions: Qwen3-8B, Qwen3.6-27B, Qwen3.6-35B-A3B, DeepSeek-V3, "
            "Nemotron-3-Nano-30B-A3B or small; may be "
            "repeated"
        ),
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help="only this op; may be repeated")] = None,
    rows: Annotated[str, typer.Option(help="rows of a call, with commas between")] = "1,8,64",
    query_len: Annotated[str, typer.Option(help="tokens of a row, with commas between")] = "1,4",
    dtype: Annotated[str, typer.Option(help="auto is bfloat16, float32 on a CPU")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="format of keys and values, or of latents")
    ] = "auto",
    context: Annotated[
        int | None, typer.Option(min=1, max=MOST_CONTEXT, help="tokens of a row in the cache")
    ] = None,
    tune: Annotated[
        Path | None, typer.Option(help="time linear's tiles instead, and write their table here")
    ] = None,
    tune_packed: Annotated[
        Path | None, typer.Option(help="the same for linear's tiles with packed weights, at --rows")
    ] = None,
    json: Json = False,
) -> None:
    """Time every op against the floor of its bytes, and compare its bits at other row counts.

    Status 1 if the bits of a row depend on the rows beside it.
    """
    from lockstep.bench.kernels import measure_kernels, pick_models
    from lockstep.config import EngineConfig
    from lockstep.engine.build import pick_device, pick_dtype
    from lockstep.kernels.kv.formats import format_of

    config = EngineConfig.read(device=device, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    place = pick_device(config)
    kind = pick_dtype(config, {}, place)
    models = pick_models(model or (), place)
    if tune:
        _tune(models, kind, tune)
    if tune_packed:
        _tune_packed(models, kind, tune_packed, _numbers("rows", rows, MOST_ROWS))
    if tune or tune_packed:
        return
    sizes = (_numbers("rows", rows, MOST_ROWS), _numbers("query_len", query_len, MOST_ROWS))
    if context is not None:
        if context < max(sizes[1]):
            raise ConfigError(
                f"--context {context} is less than a row's tokens of --query-len {query_len}. "
                "Raise it."
            )
        models = [replace(one, context=context) for one in models]
    asked = (models, place, kind, *sizes, op or ())
    format = format_of(kv_cache_dtype, kind)
    if json:
        lines = list(measure_kernels(*asked, format=format))
    else:
        with progress_bar() as show:
            found = measure_kernels(*asked, format=format, progress=lambda what: show(what, 0, 0))
            lines = list(found)
        Console(highlight=False).print(kernel_table(lines))
    wrong = any(line.differing for line in lines)
    about = {"bench": "kernels", "device": place, "dtype": str(kind).removeprefix("torch.")}
    rounded = [{k: _short(v) for k, v in asdict(line).items()} for line in lines]
    print_result(about | {"differing": wrong, "lines": rounded}, json)
    raise typer.Exit(1 if wrong else 0)


@bench.command(cls=PlainCommand)
def serving(
    url: Annotated[str, typer.Option(help="the server, with /v1 or without")] = (
        "http://127.0.0.1:8000"
    ),
    model: Annotated[str | None, typer.Option(help="its model; the first that it names")] = None,
    dataset: Annotated[
        str, typer.Option(help="random (token ids), or samples (the bundled conversations)")
    ] = "random",
    input_len: Annotated[
        int, typer.Option(min=1, max=MOST_CONTEXT, help="tokens of a random prompt")
    ] = 1024,
    output_len: Annotated[
        int, typer.Option(min=1, max=MOST_CONTEXT, help="most tokens of an answer")
    ] = 128,
    vocab_size: Annotated[
        int, typer.Option(min=1, max=MOST_VOCAB, help="random token ids are below this")
    ] = 4096,
    num_requests: Annotated[
        int, typer.Option(min=1, max=MOST_REQUESTS, help="requests per load")
    ] = 100,
    rate: Annotated[str, typer.Option(help="requests/s (Poisson), with commas between")] = "",
    concurrency: Annotated[str, typer.Option(help="requests at once, with commas between")] = "",
    temperature: Temperature = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option(help="answers of output_len tokens; not all servers know it")
    ] = False,
    seed: Annotated[int, typer.Option(help="of prompts and arrivals")] = 0,
    api_key: Annotated[str | None, typer.Option(help="sent as a bearer token")] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=MOST_SECONDS, help="seconds without a byte")
    ] = 600.0,
    plot: Annotated[Path | None, typer.Option(help="a PNG of latencies over loads")] = None,
    json: Json = False,
) -> None:
    """Load a running OpenAI-compatible server, this one or another, and measure its latencies.

    Every rate is an open loop, every concurrency a closed one; 1, 8 and 64 at once if neither is
    given.
    """
    from lockstep.bench import serving as bench_serving
    from lockstep.bench.http_client import Server

    if plot:
        bench_serving.need_plots()
        _check_plot(plot)
    loads = [bench_serving.Load(rate=value) for value in _rates(rate)]
    counts = concurrency or ("" if loads else "1,8,64")
    if counts:
        many = _numbers("concurrency", counts, MOST_AT_ONCE)
        loads += [bench_serving.Load(concurrency=value) for value in many]
    server = Server.at(url, api_key, timeout)
    name = model or server.first_model()
    extra: dict[str, Any] = {"temperature": temperature}
    if ignore_eos:
        extra["ignore_eos"] = True
    sizes = (name, num_requests, input_len, output_len, vocab_size)

    def make(seed: int) -> "list[Ask]":
        return bench_serving.make_asks(dataset, *sizes, seed, **extra)

    with progress_bar() as show:
        runs = bench_serving.run_loads(server, make, loads, seed, show)
    if plot:
        bench_serving.plot(runs, plot, f"{name} at {url}")
    if not json:
        Console(highlight=False).print(serving_table(runs))
    about = {"bench": "serving", "url": url, "model": name, "dataset": dataset}
    rounded = [{k: _short(v) for k, v in asdict(run).items()} for run in runs]
    print_result(about | {"output_len": output_len, "runs": rounded}, json)


def _check_plot(path: Path) -> None:
    """Raises ConfigError where no PNG can be written."""
    if path.suffix.lower() != ".png":
        allowed = "a name that ends in .png"
        raise choice_error(ConfigError, "plot", str(path), allowed, "Name another file.")
    check_writable("plot", path)


def _rates(value: str) -> list[float]:
    """0.5,2 -> [0.5, 2.0]. Raises ConfigError."""
    try:
        found = [float(part) for part in value.split(",")] if value else []
    except ValueError:
        found = [0.0]
    if any(not 0 < part < 1e6 for part in found):
        allowed = "requests/s above 0 with commas between, e.g. 0.5,2,8"
        raise choice_error(ConfigError, "rate", value, allowed, "Change it.")
    return found


def _short(value: Any) -> Any:
    """Floats to six digits, in lists too."""
    if isinstance(value, (list, tuple)):
        return [_short(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _tune(models: "list[Model]", dtype: "torch.dtype", path: Path) -> None:
    from lockstep.bench.tune_linear import tune_linears

    with progress_bar() as show:
        times = tune_linears(models, dtype, path, show)
    note(f"{path}: the table; lockstep/kernels/linear/tuning.json is the committed one")
    rounded = {key: {n: _short(us) for n, us in row.items()} for key, row in times.items()}
    print_json({"bench": "kernels", "tuned": str(path), "us": rounded})


def _tune_packed(
    models: "list[Model]", dtype: "torch.dtype", path: Path, tokens: tuple[int, ...]
) -> None:
    from lockstep.bench.tune_packed import tune_packed

    times: dict[str, dict[int, Any]] = {}
    for tuned in tune_packed(models, dtype, path, tokens):
        note(str(tuned))
        for tile, reason in tuned.refused.items():
            note(f"not {tile}: {reason}")
        times.setdefault(tuned.key, {})[tuned.job.tokens] = [
            (_short(us), str(tile)) for us, tile in tuned.times
        ]
    note(f"{path}: the table; lockstep/kernels/linear/packed_tuning.json is the committed one")
    print_json({"bench": "kernels", "tuned": str(path), "us": times})


def _numbers(name: str, value: str, most: int) -> tuple[int, ...]:
    """1,8,64 -> (1, 8, 64). Raises ConfigError."""
    try:
        found = tuple(int(part) for part in value.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or max(found) > most:
        allowed = f"whole numbers from 1 to {most} with commas between, e.g. 1,8,64"
        raise choice_error(ConfigError, name, value, allowed, "Change it.")
    return found


# The trace.


def _trace(
    llm: "LLM", prompts: list[dict[str, Any]], temperature: float, path: Path, json: bool
) -> None:
    from lockstep.bench.trace import trace_steps

    lines = trace_steps(llm, prompts, temperature, path)
    if not json:
        Console(highlight=False).print(trace_table(lines, llm.engine.plan.device == "cuda"))
        note(f"{path}: open it at https://ui.perfetto.dev")
    rounded = [{k: _short(v) for k, v in asdict(line).items()} for line in lines]
    print_result(_about(llm) | {"bench": "trace", "file": str(path), "lines": rounded}, json)


# The floor.


def _has_weights(settings: dict[str, Any]) -> bool:
    """Whether there is anything to run: weights in the folder, or random ones asked for."""
    from lockstep.engine.build import find_model

    if settings["load_format"] == "dummy":
        return True
    return any(find_model(settings["model"]).glob("*.safetensors"))


def _sketch(folder: Path, dtype: str, config: "EngineConfig") -> "Sketch":
    import torch

    from lockstep.bench.floor import sketch
    from lockstep.engine.build import kv_layers, state_dtype

    numbers = getattr(torch, dtype)
    kept = (kv_layers(config, numbers), state_dtype(config), config.hf_overrides)
    return sketch(folder, numbers, config.speculative_config, config.quantization, *kept)


def _show_floor_alone(
    settings: dict[str, Any], batch_size: int, input_len: int, json: bool
) -> None:
    from lockstep.bench.floor import describe_floors, prompt_floor, step_floor
    from lockstep.config import EngineConfig
    from lockstep.engine.build import find_model, pick_dtype
    from lockstep.models.checkpoint import Checkpoint

    folder = find_model(settings["model"])
    names = ("dtype", "speculative_config", "quantization", "kv_cache_dtype", "hf_overrides")
    kept = ("kv_cache_dtype_skip_layers", "mamba_ssm_cache_dtype")
    config = EngineConfig(**{name: settings[name] for name in (*names, *kept)})
    dtype = pick_dtype(config, Checkpoint.read(folder, config.hf_overrides).raw, "cuda")
    name = str(dtype).removeprefix("torch.")
    model = _sketch(folder, name, config)
    least = step_floor(model, batch_size, input_len)
    prompt = prompt_floor(model, input_len)
    found = {"bench": "floor", "model": settings["model"] or BUNDLED, "dtype": name}
    found |= describe_floors(least, prompt)
    if not json:
        Console(highlight=False).print(floor_table(least, prompt))
        note(f"{folder} holds no weights, so nothing was run; --load-format dummy runs it")
    print_result(found, json)


def _floors_of_run(llm: "LLM", f: "Figures") -> "tuple[StepFloor, Floor]":
    """The floors of the run's mean step, with half of an answer in the cache, and mean prompt."""
    from lockstep.bench.floor import prompt_floor, step_floor

    engine = llm.engine
    model = _sketch(engine.plan.model_path, engine.plan.dtype, engine.config)
    context = (f.prompt_tokens + f.tokens // 2) // f.requests
    prompt = prompt_floor(model, f.prompt_tokens // f.requests)
    return step_floor(model, f.requests, context), prompt
