"""lockstep bench offline: speed of offline inference."""

import random
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lockstep.cli.bench.floor import floors_of_run, has_weights, print_floor
from lockstep.cli.bench.shared import MAX_CONTEXT, MAX_RUNS, Json, Temperature, round_floats
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
    batch_size: Annotated[int, typer.Option(min=1, help="concurrent requests")] = 1,
    input_len: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_CONTEXT,
            help="random prompt tokens; 0: bundled prompts, with realistic acceptance",
        ),
    ] = 0,
    output_len: Annotated[
        int, typer.Option(min=1, max=MAX_CONTEXT, help="output tokens per request")
    ] = 128,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="drafts per step of the chosen drafter; 0: no drafts")
    ] = None,
    synthetic_acceptance: Annotated[
        float | None,
        typer.Option(
            help="with --load-format dummy: accept each next draft with this probability p; with "
            "K drafts the acceptance length is 1 + p + ... + p^K"
        ),
    ] = None,
    temperature: Temperature = 0.0,
    num_iters_warmup: Annotated[int, typer.Option(min=0, max=MAX_RUNS, help="warm-up runs")] = 3,
    num_iters: Annotated[int, typer.Option(min=1, max=MAX_RUNS, help="measured runs")] = 5,
    floor: Annotated[
        bool,
        typer.Option(
            "--floor", help="add the roofline bound of a step; without weights, show it alone"
        ),
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="write a profiler trace of a few steps here, for Perfetto")
    ] = None,
    json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Measure tokens/s, ms per step, time to first token and acceptance length.

    The prefix cache is off, so every run computes its prompts.

    Other benchmarks: lockstep bench drafters, kernels or serving; see their --help.
    """
    from lockstep.bench import measure

    # With a prefix cache, only the first run would process the prompts.
    settings["enable_prefix_caching"] = False
    settings["max_num_seqs"] = batch_size
    _choose_drafts(settings, num_speculative_tokens, synthetic_acceptance)
    if floor and not has_weights(settings):
        print_floor(settings, batch_size, input_len, json)
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

    result = _about(llm) | {k: round_floats(v) for k, v in asdict(figures).items()}
    step, prompt = floors_of_run(llm, figures) if floor else (None, None)
    if step and prompt:
        result |= describe_floors(step, prompt) | {"over_floor": over_floor(figures, step)}
    if not json:
        console = Console(highlight=False)
        if step:
            console.print(floor_table(step, prompt))
        console.print(figures_table(figures, step, prompt))
    print_result(result, json)


def _choose_drafts(
    settings: dict[str, Any], count: int | None, acceptance: float | None = None
) -> None:
    """Resolve the "auto" drafter, K and synthetic acceptance in the settings.

    Raises ConfigError if an option needs a drafter and there is none.
    """
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
    # An explicit K is measured as it is, not adapted.
    drafting = {"adaptive": False, **(spec or {}), "num_speculative_tokens": count}
    settings["speculative_config"] = drafting if count else None


def _about(llm: "LLM") -> dict[str, Any]:
    spec = llm.engine.config.speculative_config
    return {
        "bench": "offline",
        "model": model_name(llm.engine.config),
        "numerics": llm.engine.numerics,
        "tensor_parallel_size": llm.engine.config.tensor_parallel_size,
        "speculative_config": asdict(spec) if spec else None,
    }


def _prompts(llm: "LLM", batch_size: int, input_len: int) -> list[list[int]]:
    from lockstep.example_prompts import short_prompts

    if input_len:
        rng = random.Random(0)
        vocabulary = range(llm.engine.vocab_size)
        return [rng.choices(vocabulary, k=input_len) for _ in range(batch_size)]
    examples = short_prompts(llm)
    return [examples[i % len(examples)] for i in range(batch_size)]


def _trace(
    llm: "LLM", prompts: list[dict[str, Any]], temperature: float, path: Path, json: bool
) -> None:
    from lockstep.bench.trace import trace_steps

    lines = trace_steps(llm, prompts, temperature, path)
    if not json:
        Console(highlight=False).print(trace_table(lines, llm.engine.plan.device == "cuda"))
        note(f"{path}: open it at https://ui.perfetto.dev")
    rounded = [{k: round_floats(v) for k, v in asdict(line).items()} for line in lines]
    print_result(_about(llm) | {"bench": "trace", "file": str(path), "lines": rounded}, json)
