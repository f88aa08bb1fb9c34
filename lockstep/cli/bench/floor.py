"""Roofline floors of a step and a prompt: printed alone, or next to measured figures."""

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
    """Return whether the model can run: its folder has weights, or they are random."""
    from lockstep.models import weight_files
    from lockstep.worker.build import find_model

    if settings["load_format"] == "dummy":
        return True
    return weight_files.has_weights(find_model(settings["model"]))


def _sketch(folder: Path, dtype: str, config: "EngineConfig") -> "Sketch":
    """Build the model of an engine config without memory. dtype: name without "torch."."""
    import torch

    from lockstep.bench.floor import sketch
    from lockstep.worker.build import kv_layers, state_dtype

    torch_dtype = getattr(torch, dtype)
    return sketch(
        folder,
        torch_dtype,
        config.speculative_config,
        config.quantization,
        kv_layers(config, torch_dtype),
        state_dtype(config),
        config.hf_overrides,
        ranks=config.tensor_parallel_size,
    )


def print_floor(settings: dict[str, Any], batch_size: int, input_len: int, json: bool) -> None:
    """Print the floors of a checkpoint without weights."""
    from lockstep.bench.floor import describe_floors, prompt_floor, step_floor
    from lockstep.config import EngineConfig
    from lockstep.models.checkpoint import Checkpoint
    from lockstep.worker.build import find_model, pick_dtype

    folder = find_model(settings["model"])
    setting_names = (
        "dtype",
        "speculative_config",
        "quantization",
        "kv_cache_dtype",
        "hf_overrides",
        "tensor_parallel_size",
    )
    cache_settings = ("kv_cache_dtype_skip_layers", "mamba_ssm_cache_dtype")
    config = EngineConfig(**{name: settings[name] for name in (*setting_names, *cache_settings)})
    dtype = pick_dtype(config, Checkpoint.read(folder, config.hf_overrides).raw, "cuda")
    name = str(dtype).removeprefix("torch.")
    model = _sketch(folder, name, config)
    step = step_floor(model, batch_size, input_len)
    prompt = prompt_floor(model, input_len)
    result = {"bench": "floor", "model": settings["model"] or BUNDLED, "dtype": name}
    result["tensor_parallel_size"] = config.tensor_parallel_size
    result |= describe_floors(step, prompt)
    if not json:
        Console(highlight=False).print(floor_table(step, prompt))
        note(f"{folder} has no weights, so nothing was run; --load-format dummy runs it")
    print_result(result, json)


def floors_of_run(llm: "LLM", figures: "Figures") -> "tuple[StepFloor, Floor]":
    """Return the floors of the run's mean step and of its mean prompt.

    The mean step has the prompt and half of the output in the cache.
    """
    from lockstep.bench.floor import prompt_floor, step_floor

    engine = llm.engine
    model = _sketch(engine.plan.model_path, engine.plan.dtype, engine.config)
    context = (figures.prompt_tokens + figures.tokens // 2) // figures.requests
    prompt = prompt_floor(model, figures.prompt_tokens // figures.requests)
    return step_floor(model, figures.requests, context), prompt
