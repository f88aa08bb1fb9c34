"""lockstep bench offline: what answers cost."""

import random
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lockstep.cli.bench.floor import floors_of_run, has_weights, show_floor_alone
from lockstep.cli.bench.shared import MOST_CONTEXT, MOST_RUNS, Json, Temperature, short
from lockstep.cli.bench.tables import figures_table, floor_table, over_floor, trace_table
from lockstep.cli.options import engine_options
from lockstep.cli.show import load, model_name, note, print_result
from lockstep.errors import ConfigError
from lockstep.progress import progress_bar
from lockstep.sampling_params import SamplingParams
from lockstep.settings import check_writable

if TYPE_CHECKING:
    from lockstep.bench import Figures
    from lockstep.llm import LLM


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
    if floor and not has_weights(settings):
        show_floor_alone(settings, batch_size, input_len, json)
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
    least, prompt = floors_of_run(llm, figures) if floor else (None, None)
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
    from lockstep.engine_args import resolve_auto_drafter

    settings.update(resolve_auto_drafter(settings))
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


def _trace(
    llm: "LLM", prompts: list[dict[str, Any]], temperature: float, path: Path, json: bool
) -> None:
    from lockstep.bench.trace import trace_steps

    lines = trace_steps(llm, prompts, temperature, path)
    if not json:
        Console(highlight=False).print(trace_table(lines, llm.engine.plan.device == "cuda"))
        note(f"{path}: open it at https://ui.perfetto.dev")
    rounded = [{k: short(v) for k, v in asdict(line).items()} for line in lines]
    print_result(_about(llm) | {"bench": "trace", "file": str(path), "lines": rounded}, json)
