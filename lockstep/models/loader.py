"""From a checkpoint folder to a filled model: every tensor used, every parameter filled."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lockstep.errors import CheckpointError, choice_error
from lockstep.layers.build import Build
from lockstep.layers.norm import GatedRMSNorm, Norm
from lockstep.models import architecture
from lockstep.models.reading import ConfigReader

Progress = Callable[[int, int], None]
TIED_HEAD = "lm_head.weight"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_BYTES = 64 << 20
"""Of a JSON file; the indices of the largest models are a tenth of it."""


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder. Raises CheckpointError if it is not there or no JSON."""
    raw = _read_object(
        folder / "config.json",
        "Name a folder that holds a checkpoint: config.json and *.safetensors.",
    )
    architecture(raw.get("model_type"))
    return raw


def _read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The object in a JSON file of at most MOST_BYTES. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"it is longer than {MOST_BYTES} bytes")
        raw = json.loads(data.decode("utf-8"))
        if not isinstance(raw, dict) or not isinstance(raw.get("text_config", {}), dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). {remedy}") from None
    return raw


def weight_files(folder: Path) -> list[Path]:
    """The folder's *.safetensors. Raises CheckpointError if there is none, or not all of the index.

    An index names files of the folder itself, and says which file holds which tensor.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file; name another model folder.")
    for path in sorted(folder.glob("*.safetensors.index.json")):
        remedy = "Fetch the file again, or delete it: it is not needed."
        places = _read_object(path, remedy).get("weight_map")
        if not isinstance(places, dict):
            allowed = "an object of tensor names and files"
            raise choice_error(CheckpointError, f"{path} weight_map", places, allowed, remedy)
        known = {file.name for file in files}
        for name, file in places.items():
            if not isinstance(file, str) or file not in known:
                allowed = f"files of the folder: {_some(sorted(known))}"
                field = f"{path} weight_map[{name[:100]!r}]"
                raise choice_error(
                    CheckpointError, field, file, allowed, "Fetch the missing file again."
                )
    return files


def build_model(raw: dict[str, Any], build: Build) -> nn.Module:
    """The target that config.json describes, to be filled."""
    module = architecture(raw.get("model_type"))
    inner = ConfigReader(raw).raw.get("model_type")
    if architecture(inner) is not module:
        raise CheckpointError(
            f"config.json text_config.model_type={inner!r} is not allowed; allowed: that of the "
            f"architecture {raw.get('model_type')!r} around it. Mend config.json."
        )
    return module.Model(module.Config.read(raw), build)


def load_weights(
    folder: Path, raw: dict[str, Any], model: nn.Module, draft: nn.Module | None, progress: Progress
) -> None:
    """Fills model and draft from the folder's safetensors.

    Raises CheckpointError naming every tensor that is missing, spare, there twice, or does not fit.
    """
    module = architecture(raw["model_type"])
    wanted = dict(_targets(module, model, draft))
    files = weight_files(folder)
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
    return ", ".join(name[:200] for name in names[:5]) + (" ..." if len(names) > 5 else "")
