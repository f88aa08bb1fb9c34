"""lockstep bench drafters: acceptance, cost and speedup of each drafter of a model."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lockstep.cli.bench.shared import (
    MAX_CONTEXT,
    MAX_RUNS,
    Json,
    Temperature,
    check_plot,
    round_floats,
)
from lockstep.cli.bench.tables import drafters_table
from lockstep.cli.options import engine_options
from lockstep.cli.show import BUNDLED, print_result
from lockstep.progress import progress_bar
from lockstep.sampling_params import SamplingParams


@engine_options
def drafters(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="another speculative_config, in addition to those that need no settings, e.g. "
            """'{"method": "eagle3", "model": FOLDER}'; may be repeated"""
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option(help="drafts per step, unless --drafter sets a number")
    ] = 7,
    batch_size: Annotated[int, typer.Option(min=1, help="concurrent requests")] = 1,
    output_len: Annotated[
        int, typer.Option(min=2, max=MAX_CONTEXT, help="output tokens per request")
    ] = 128,
    temperature: Temperature = 0.0,
    num_iters: Annotated[int, typer.Option(min=1, max=MAX_RUNS, help="measured runs")] = 3,
    plot: Annotated[
        Path | None, typer.Option(help="write a plot of acceptance and speed, .png")
    ] = None,
    json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Compare the drafters of a model: acceptance by position, cost, tokens/s.

    The exit status is 1 if a drafter changes a token.
    """
    from lockstep.bench import drafters as bench_drafters
    from lockstep.bench.serving import need_plots

    if plot:
        # Before the runs: a missing library must not cost a long measurement.
        need_plots()
        check_plot(plot)
    chosen = _drafters_of(settings, drafter or [], num_speculative_tokens)
    params = SamplingParams(
        temperature=temperature, seed=0, max_tokens=output_len, ignore_eos=True, detokenize=False
    )
    arguments = (settings, chosen, batch_size, params, num_iters)
    if json:
        lines = bench_drafters.compare_drafters(*arguments)
    else:
        with progress_bar() as show:
            lines = bench_drafters.compare_drafters(*arguments, show)
        Console(highlight=False).print(drafters_table(lines))
    name = settings["model"] or BUNDLED
    if plot:
        bench_drafters.plot(lines, plot, f"{name}, {batch_size} concurrent")
    about = {"bench": "drafters", "model": name, "batch_size": batch_size}
    about["tensor_parallel_size"] = settings["tensor_parallel_size"]
    rounded = [{k: round_floats(v) for k, v in asdict(line).items()} for line in lines]
    print_result(about | {"lines": rounded}, json)
    raise typer.Exit(0 if all(line.agrees for line in lines) else 1)


def _drafters_of(settings: dict[str, Any], values: list[str], count: int) -> list[dict[str, Any]]:
    """Return the speculative_configs to compare: those that the checkpoint allows, and the user's.

    values: values of --drafter. count: K if a value has none. Raises ConfigError for an invalid
    one, before a model is loaded.
    """
    from lockstep.cli.options import read_speculative_config
    from lockstep.models.checkpoint import Checkpoint
    from lockstep.spec import prediction, read, refusals, with_method
    from lockstep.spec.options import FolderOptions
    from lockstep.worker.build import find_model

    configs: list[dict[str, Any]] = []
    for value in (*values, settings["speculative_config"]):
        config = read_speculative_config(value) if isinstance(value, str) else value
        if isinstance(config, dict):
            resolved = with_method({"num_speculative_tokens": count, **config})
            options = read(resolved)
            if isinstance(options, FolderOptions):
                Checkpoint.read(options.folder)
            configs.append(resolved)
    checkpoint = Checkpoint.read(find_model(settings["model"]), settings["hf_overrides"])
    # The prompts of the benchmark have no predicted texts.
    allowed = [
        method
        for method, why in refusals(checkpoint).items()
        if why is None and method != prediction.METHOD
    ]
    named_methods = {config["method"] for config in configs}
    allowed_configs = [
        {"method": m, "num_speculative_tokens": count} for m in allowed if m not in named_methods
    ]
    for config in allowed_configs:
        read(config)
    return allowed_configs + configs
