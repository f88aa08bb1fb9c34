"""lockstep bench: what an answer costs on this machine, offline."""

import random
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lockstep.cli.options import engine_options
from lockstep.cli.show import load, print_json, progress_bar
from lockstep.sampling_params import SamplingParams

if TYPE_CHECKING:
    from lockstep.bench import Figures
    from lockstep.llm import LLM


@engine_options
def bench(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    batch_size: Annotated[int, typer.Option(help="requests at once")] = 1,
    input_len: Annotated[
        int, typer.Option(help="random prompt tokens; 0: real prompts, so that drafts count")
    ] = 0,
    output_len: Annotated[int, typer.Option(help="tokens per answer")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="runs that do not count")] = 3,
    num_iters: Annotated[int, typer.Option(min=1, help="runs that count")] = 5,
    json: Annotated[bool, typer.Option("--json", help="the last line only")] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Measure tokens/s, ms per step, time to first token and acceptance length.

    Prompts are computed anew in every run. The last line is JSON.
    """
    from lockstep.bench import measure

    settings["enable_prefix_caching"] = False
    settings["max_num_seqs"] = max(batch_size, 1)
    llm = load(settings, quiet=json)
    params = SamplingParams(
        temperature=temperature, max_tokens=output_len, ignore_eos=True, seed=0, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in _prompts(llm, batch_size, input_len)]
    counts = (num_iters_warmup, num_iters)
    if json:
        figures, _ = measure(llm, prompts, params, *counts)
    else:
        with progress_bar() as show:
            figures, _ = measure(llm, prompts, params, *counts, show)
        Console(highlight=False).print(_table(figures))
    spec = llm.engine.config.speculative_config
    about = {
        "bench": "offline",
        "model": llm.engine.plan.model_path.name,
        "numerics": llm.engine.numerics,
        "speculative_config": asdict(spec) if spec else None,
    }
    print_json(about | {k: round(v, 4) for k, v in asdict(figures).items()})


def _prompts(llm: "LLM", batch_size: int, input_len: int) -> list[list[int]]:
    from lockstep.samples import short_prompts

    if input_len:
        draw = random.Random(0)
        vocabulary = range(llm.engine.vocab_size)
        return [draw.choices(vocabulary, k=input_len) for _ in range(batch_size)]
    real = short_prompts(llm)
    return [real[i % len(real)] for i in range(batch_size)]


def _table(f: "Figures") -> Table:
    table = Table("", "mean", "deviation", "CV")
    wall = (f.wall_tokens_per_s, f.wall_deviation, f.wall_cv)
    decode = (f.decode_tokens_per_s, f.decode_deviation, f.decode_cv)
    for name, (mean, deviation, cv) in (("decode tokens/s", decode), ("wall tokens/s", wall)):
        table.add_row(name, f"{mean:.1f}", f"{deviation:.1f}", f"{100 * cv:.1f} %")
    table.add_row("ms per step", f"{f.ms_per_step:.2f}", "", "")
    table.add_row("time to first token, ms", f"{f.ttft_ms:.1f}", "", "")
    table.add_row("acceptance length", f"{f.acceptance_length:.2f}", "", "")
    table.add_row("acceptance rate", f"{100 * f.acceptance_rate:.1f} %", "", "")
    table.caption = (
        f"{f.requests} requests, {f.prompt_tokens} prompt tokens, {f.tokens} tokens, {f.runs} runs"
    )
    return table
