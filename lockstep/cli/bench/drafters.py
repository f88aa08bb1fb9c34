"""lockstep bench drafters: what each drafter of a model gains."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lockstep.cli.bench.shared import (
    MOST_CONTEXT,
    MOST_RUNS,
    Json,
    Temperature,
    check_plot,
    short,
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
        check_plot(plot)
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
    rounded = [{k: short(v) for k, v in asdict(line).items()} for line in lines]
    print_result(about | {"lines": rounded}, json)
    raise typer.Exit(0 if all(line.agrees for line in lines) else 1)


def _drafters_of(settings: dict[str, Any], named: list[str], count: int) -> list[dict[str, Any]]:
    """The speculative_config of each drafter: those that the checkpoint allows by itself, and those
    named. Raises ConfigError where one is wrong, before a model is loaded."""
    from lockstep.cli.options import read_speculative_config
    from lockstep.models.checkpoint import Checkpoint
    from lockstep.spec import read, refusals, with_method
    from lockstep.spec.options import FolderOptions
    from lockstep.worker.build import find_model

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
