"""lockstep bench kernels: time every op, or tune its tiles."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lockstep.cli.bench.shared import MAX_CONTEXT, MAX_ROWS, Json, parse_counts, round_floats
from lockstep.cli.bench.tables import kernel_table
from lockstep.cli.show import note, print_json, print_result
from lockstep.errors import ConfigError
from lockstep.progress import progress_bar

if TYPE_CHECKING:
    import torch

    from lockstep.kernels.bench_types import ModelShape


def kernels(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="use the dimensions of: Qwen3-8B, Qwen3.6-27B, Qwen3.6-35B-A3B, DeepSeek-V3, "
            "Nemotron-3-Nano-30B-A3B or small; may be "
            "repeated"
        ),
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help="only this op; may be repeated")] = None,
    rows: Annotated[str, typer.Option(help="rows per call, separated by commas")] = "1,8,64",
    query_len: Annotated[str, typer.Option(help="tokens per row, separated by commas")] = "1,4",
    dtype: Annotated[str, typer.Option(help="auto: bfloat16, or float32 on a CPU")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="format of the KV cache, or of MLA latents")
    ] = "auto",
    context: Annotated[
        int | None, typer.Option(min=1, max=MAX_CONTEXT, help="cached tokens per row")
    ] = None,
    tune: Annotated[
        Path | None, typer.Option(help="tune the tiles of linear instead; write the table here")
    ] = None,
    tune_packed: Annotated[
        Path | None,
        typer.Option(help="tune linear with quantized weights, at --rows; write the table here"),
    ] = None,
    json: Json = False,
) -> None:
    """Time every op against its memory roofline, and compare its bits at other batch sizes.

    The exit status is 1 if the bits of a row depend on the other rows of the batch.
    """
    from lockstep.bench.kernels import measure_kernels, pick_models
    from lockstep.config import EngineConfig
    from lockstep.kernels.formats.kv.table import kv_format
    from lockstep.worker.build import pick_device, pick_dtype

    config = EngineConfig.read(device=device, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    device_name = pick_device(config)
    torch_dtype = pick_dtype(config, {}, device_name)
    models = pick_models(model or (), device_name)
    if tune:
        _tune(models, torch_dtype, tune)
    if tune_packed:
        _tune_quantized(models, torch_dtype, tune_packed, parse_counts("rows", rows, MAX_ROWS))
    if tune or tune_packed:
        return
    sizes = (parse_counts("rows", rows, MAX_ROWS), parse_counts("query_len", query_len, MAX_ROWS))
    if context is not None:
        if context < max(sizes[1]):
            raise ConfigError(
                f"--context {context} is less than a row's tokens of --query-len {query_len}. "
                "Raise --context."
            )
        models = [replace(shape, context=context) for shape in models]
    arguments = (models, device_name, torch_dtype, *sizes, op or ())
    format = kv_format(kv_cache_dtype, torch_dtype)
    if json:
        lines = list(measure_kernels(*arguments, format=format))
    else:
        with progress_bar() as show:
            measured = measure_kernels(
                *arguments, format=format, progress=lambda what: show(what, 0, 0)
            )
            lines = list(measured)
        Console(highlight=False).print(kernel_table(lines))
    differing = any(line.differing for line in lines)
    about = {
        "bench": "kernels",
        "device": device_name,
        "dtype": str(torch_dtype).removeprefix("torch."),
    }
    rounded = [{k: round_floats(v) for k, v in asdict(line).items()} for line in lines]
    print_result(about | {"differing": differing, "lines": rounded}, json)
    raise typer.Exit(1 if differing else 0)


def _tune(models: "list[ModelShape]", dtype: "torch.dtype", path: Path) -> None:
    from lockstep.bench.tune_linear import tune_linears

    with progress_bar() as show:
        times = tune_linears(models, dtype, path, show)
    note(f"{path}: the table; lockstep/kernels/linear/tuning.json is the committed one")
    rounded = {key: {n: round_floats(us) for n, us in row.items()} for key, row in times.items()}
    print_json({"bench": "kernels", "tuned": str(path), "us": rounded})


def _tune_quantized(
    models: "list[ModelShape]", dtype: "torch.dtype", path: Path, tokens: tuple[int, ...]
) -> None:
    from lockstep.bench.tune_quantized import tune_quantized

    times: dict[str, dict[int, Any]] = {}
    for result in tune_quantized(models, dtype, path, tokens):
        note(str(result))
        for tile, reason in result.refused.items():
            note(f"tile {tile} was skipped: {reason}")
        times.setdefault(result.key, {})[result.job.tokens] = [
            (round_floats(us), str(tile)) for us, tile in result.times
        ]
    note(f"{path}: the table; lockstep/kernels/linear/quantized_tuning.json is the committed one")
    print_json({"bench": "kernels", "tuned": str(path), "us": times})
