"""From a checkpoint folder to a filled model: every tensor used, every parameter filled."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lockstep.errors import CheckpointError
from lockstep.layers.build import Build
from lockstep.models import architecture

Progress = Callable[[int, int], None]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder. Raises CheckpointError if it is none that we build."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
        if not isinstance(raw, dict) or not isinstance(raw.get("text_config", {}), dict):
            raise ValueError("it holds no settings by name")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). Name a folder that holds a checkpoint: "
            "config.json and *.safetensors."
        ) from None
    architecture(raw.get("model_type"))
    return raw


def build_model(raw: dict[str, Any], build: Build, drafting: bool) -> tuple[nn.Module, Any]:
    """The target and, if `drafting` with the checkpoint's own module, its draft module or None."""
    module = architecture(raw.get("model_type"))
    config = module.Config.read(raw)
    model = module.Model(config, build)
    if not drafting:
        return model, None
    if not config.draft_layers:
        raise CheckpointError(
            "speculative_config method='mtp' needs a checkpoint with an MTP module, and this one "
            "has mtp_num_hidden_layers=0. Choose another method, e.g. ngram."
        )
    return model, module.Draft(model, _inexact(build))


def _inexact(build: Build) -> Build:
    draft = build.at("draft")
    draft.exact = False
    return draft


def load_weights(
    folder: Path, raw: dict[str, Any], model: nn.Module, draft: nn.Module | None, progress: Progress
) -> None:
    """Fills model and draft from the folder's safetensors.

    Raises CheckpointError naming every missing, spare or misshapen tensor.
    """
    module = architecture(raw["model_type"])
    wanted = dict(_targets(module, model, draft))
    spare: list[str] = []
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file; name another model folder.")
    filled: set[str] = set()
    for index, path in enumerate(files):
        for name, tensor in _tensors(path):
            key = _strip(module, name)
            if key in filled:
                spare.append(f"{name} (again, in {path.name})")
            elif key in wanted:
                _fill(name, wanted[key], tensor)
                filled.add(key)
            elif not _ignored(module, model, draft, name, key):
                spare.append(name)
        progress(index + 1, len(files))
    missing = sorted(set(wanted) - filled)
    if missing or spare:
        raise CheckpointError(
            f"{folder}: the checkpoint does not fit its config.json. Missing tensors "
            f"({len(missing)}): {_some(missing)}; spare tensors ({len(spare)}): {_some(spare)}. "
            "Mend config.json or the checkpoint."
        )


def fill_dummy(model: nn.Module, draft: nn.Module | None, seed: int) -> None:
    """Random weights at the scale of trained ones, the same for the same seed on one device."""
    modules = [model] if draft is None else [model, draft]
    parameters = {id(p): (n, p) for m in modules for n, p in m.named_parameters()}
    for index, (name, parameter) in enumerate(parameters.values()):
        generator = torch.Generator(parameter.device).manual_seed(seed * 100003 + index)
        if parameter.dim() == 1:
            parameter.data.uniform_(-0.2, 0.2, generator=generator)
            if name.endswith("mixer.norm.weight"):
                parameter.data.add_(1.0)
        else:
            scale = 0.7 * parameter.shape[-1] ** -0.5
            parameter.data.normal_(0.0, scale, generator=generator)


def _targets(
    module: Any, model: nn.Module, draft: nn.Module | None
) -> Iterator[tuple[str, Tensor]]:
    yield from model.weights().items()
    if draft is not None:
        for name, tensor in draft.weights().items():
            yield module.DRAFT_PREFIX + name, tensor


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Fetch the file again.") from None


def _strip(module: Any, name: str) -> str:
    for prefix in module.PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def _ignored(module: Any, model: nn.Module, draft: nn.Module | None, name: str, key: str) -> bool:
    if name.startswith(module.IGNORED):
        return True
    if key == "lm_head.weight" and model.config.tied:
        return True
    return draft is None and name.startswith(module.DRAFT_PREFIX)


def _fill(name: str, target: Tensor, tensor: Tensor) -> None:
    if target.shape != tensor.shape:
        raise CheckpointError(
            f"{name} has shape {tuple(tensor.shape)}; config.json asks for "
            f"{tuple(target.shape)}. Mend config.json or the checkpoint."
        )
    if tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"{name} has dtype {_short(tensor.dtype)}; allowed: {', '.join(map(_short, DTYPES))}. "
            "Serve a checkpoint that is not quantised."
        )
    target.data.copy_(tensor)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "") if names else "none"
