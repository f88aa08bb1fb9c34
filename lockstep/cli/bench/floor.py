"""The least time that a step can take, beside a run or alone."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lockstep.cli.bench.tables import floor_table
from lockstep.cli.show import BUNDLED, note, print_result

if TYPE_CHECKING:
    from lockstep.bench import Figures
    from lockstep.bench.floor import Sketch
    from lockstep.config import EngineConfig
    from lockstep.llm import LLM
    from lockstep.worker.roofline import Floor, StepFloor


def has_weights(settings: dict[str, Any]) -> bool:
    """Whether there is anything to run: weights in the folder, or random ones asked for."""
    from lockstep.models import weight_files
    from lockstep.worker.build import find_model

    if settings["load_format"] == "dummy":
        return True
    return weight_files.has_weights(find_model(settings["model"]))


def _sketch(folder: Path, dtype: str, config: "EngineConfig") -> "Sketch":
    import torch

    from lockstep.bench.floor import sketch
    from lockstep.worker.build import kv_layers, state_dtype

    numbers = getattr(torch, dtype)
    kept = (kv_layers(config, numbers), state_dtype(config), config.hf_overrides)
    return sketch(folder, numbers, config.speculative_config, config.quantization, *kept)


def show_floor_alone(settings: dict[str, Any], batch_size: int, input_len: int, json: bool) -> None:
    """Prints the floors of a checkpoint that holds no weights."""
    from lockstep.bench.floor import describe_floors, prompt_floor, step_floor
    from lockstep.config import EngineConfig
    from lockstep.models.checkpoint import Checkpoint
    from lockstep.worker.build import find_model, pick_dtype

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


def floors_of_run(llm: "LLM", f: "Figures") -> "tuple[StepFloor, Floor]":
    """The floors of the run's mean step, with half of an answer in the cache, and mean prompt."""
    from lockstep.bench.floor import prompt_floor, step_floor

    engine = llm.engine
    model = _sketch(engine.plan.model_path, engine.plan.dtype, engine.config)
    context = (f.prompt_tokens + f.tokens // 2) // f.requests
    prompt = prompt_floor(model, f.prompt_tokens // f.requests)
    return step_floor(model, f.requests, context), prompt
