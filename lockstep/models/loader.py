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
from lockstep.layers.norm import GatedRMSNorm, Norm
from lockstep.models import architecture
from lockstep.models.reading import ConfigReader

Progress = Callable[[int, int], None]
TIED_HEAD = "lm_head.weight"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder. Raises CheckpointError if it is not there or no JSON."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
        if not isinstance(raw, dict) or not isinstance(raw.get("text_config", {}), dict):
            raise ValueError("it holds no JSON object")
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
    inner = ConfigReader(raw).raw.get("model_type")
    if architecture(inner) is not module:
        raise CheckpointError(
            f"config.json text_config.model_type={inner!r} is not allowed; allowed: that of the "
            f"architecture {raw.get('model_type')!r} around it. Mend config.json."
        )
    config = module.Config.read(raw)
    model = module.Model(config, build)
    if not drafting:
        return model, None
    if not (hasattr(module, "Draft") and config.draft_layers):
        raise CheckpointError(
            "speculative_config method='mtp' needs a checkpoint with an MTP module, and this one "
            "has none (mtp_num_hidden_layers). Choose another method, e.g. ngram."
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

    Raises CheckpointError naming every tensor that is missing, spare, there twice, or does not fit.
    """
    module = architecture(raw["model_type"])
    wanted = dict(_targets(module, model, draft))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file; name another model folder.")
    filled: set[str] = set()
    twins: list[tuple[str, Tensor]] = []
    faults: dict[str, list[str]] = {"missing": [], "spare": [], "doubled": [], "unfit": []}
    for index, path in enumerate(files):
        for name, tensor in _tensors(path):
            key = _strip(module, name)
            if key in filled:
                faults["doubled"].append(name)
            elif key in wanted:
                faults["unfit"] += _fill(name, wanted[key], tensor)
                filled.add(key)
            elif key == TIED_HEAD and model.config.tied:
                twins.append((name, tensor))
            elif not _ignored(module, draft, name):
                faults["spare"].append(name)
        progress(index + 1, len(files))
    faults["missing"] = sorted(set(wanted) - filled)
    faults["unfit"] += [f for twin in twins for f in _differs(*twin, model.embed.weight)]
    if any(faults.values()):
        kinds = [(kind, names) for kind, names in faults.items() if names]
        found = "; ".join(f"{kind} tensors ({len(names)}): {_some(names)}" for kind, names in kinds)
        raise CheckpointError(
            f"{folder}: the checkpoint does not fit its config.json: {found}. "
            "Mend config.json or the checkpoint."
        )


def fill_dummy(model: nn.Module, draft: nn.Module | None, seed: int) -> None:
    """Random weights at the scale of trained ones, the same for the same seed on one device."""
    modules = [model] if draft is None else [model, draft]
    parameters = {id(p): p for m in modules for p in m.parameters()}
    norms = [n for m in modules for n in m.modules() if isinstance(n, Norm | GatedRMSNorm)]
    centres = {id(norm.weight): 1.0 - norm.offset for norm in norms}
    for index, parameter in enumerate(parameters.values()):
        generator = torch.Generator(parameter.device).manual_seed(seed * 100003 + index)
        if parameter.dim() == 1:
            parameter.data.uniform_(-0.2, 0.2, generator=generator)
            parameter.data.add_(centres.get(id(parameter), 0.0))
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


def _ignored(module: Any, draft: nn.Module | None, name: str) -> bool:
    if name.startswith(module.IGNORED):
        return True
    return hasattr(module, "Draft") and draft is None and name.startswith(module.DRAFT_PREFIX)


def _fill(name: str, target: Tensor, tensor: Tensor) -> list[str]:
    """Copies the tensor, or says why it does not fit."""
    if target.shape != tensor.shape:
        shapes = f"{tuple(tensor.shape)}, config.json asks for {tuple(target.shape)}"
        return [f"{name} (shape {shapes})"]
    if tensor.dtype not in DTYPES:
        return [f"{name} ({tensor.dtype}, which is no plain weight)"]
    target.data.copy_(tensor)
    return []


def _differs(name: str, tensor: Tensor, embedding: Tensor) -> list[str]:
    """A tied head may stand in the file too, but only as the embedding that it is."""
    if torch.equal(tensor.to(embedding), embedding):
        return []
    return [f"{name} (not embed_tokens.weight, to which tie_word_embeddings ties it)"]


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
