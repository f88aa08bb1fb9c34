"""lockstep bench kernels: what every op costs, and its tiles."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lockstep.cli.bench.shared import MOST_CONTEXT, MOST_ROWS, Json, numbers, short
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
    from lockstep.kernels.formats.kv.table import kv_format
    from lockstep.worker.build import pick_device, pick_dtype

    config = EngineConfig.read(device=device, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    place = pick_device(config)
    kind = pick_dtype(config, {}, place)
    models = pick_models(model or (), place)
    if tune:
        _tune(models, kind, tune)
    if tune_packed:
        _tune_packed(models, kind, tune_packed, numbers("rows", rows, MOST_ROWS))
    if tune or tune_packed:
        return
    sizes = (numbers("rows", rows, MOST_ROWS), numbers("query_len", query_len, MOST_ROWS))
    if context is not None:
        if context < max(sizes[1]):
            raise ConfigError(
                f"--context {context} is less than a row's tokens of --query-len {query_len}. "
                "Raise it."
            )
        models = [replace(one, context=context) for one in models]
    asked = (models, place, kind, *sizes, op or ())
    format = kv_format(kv_cache_dtype, kind)
    if json:
        lines = list(measure_kernels(*asked, format=format))
    else:
        with progress_bar() as show:
            found = measure_kernels(*asked, format=format, progress=lambda what: show(what, 0, 0))
            lines = list(found)
        Console(highlight=False).print(kernel_table(lines))
    wrong = any(line.differing for line in lines)
    about = {"bench": "kernels", "device": place, "dtype": str(kind).removeprefix("torch.")}
    rounded = [{k: short(v) for k, v in asdict(line).items()} for line in lines]
    print_result(about | {"differing": wrong, "lines": rounded}, json)
    raise typer.Exit(1 if wrong else 0)


def _tune(models: "list[ModelShape]", dtype: "torch.dtype", path: Path) -> None:
    from lockstep.bench.tune_linear import tune_linears

    with progress_bar() as show:
        times = tune_linears(models, dtype, path, show)
    note(f"{path}: the table; lockstep/kernels/linear/tuning.json is the committed one")
    rounded = {key: {n: short(us) for n, us in row.items()} for key, row in times.items()}
    print_json({"bench": "kernels", "tuned": str(path), "us": rounded})


def _tune_packed(
    models: "list[ModelShape]", dtype: "torch.dtype", path: Path, tokens: tuple[int, ...]
) -> None:
    from lockstep.bench.tune_packed import tune_packed

    times: dict[str, dict[int, Any]] = {}
    for tuned in tune_packed(models, dtype, path, tokens):
        note(str(tuned))
        for tile, reason in tuned.refused.items():
            note(f"not {tile}: {reason}")
        times.setdefault(tuned.key, {})[tuned.job.tokens] = [
            (short(us), str(tile)) for us, tile in tuned.times
        ]
    note(f"{path}: the table; lockstep/kernels/linear/quantized_tuning.json is the committed one")
    print_json({"bench": "kernels", "tuned": str(path), "us": times})
