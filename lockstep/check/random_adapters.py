"""Random LoRA adapters of a model, in the files of PEFT, for checks."""

import json
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from lockstep.layers.linear import Linear
from lockstep.models.json_files import ADAPTER
from lockstep.models.lora_adapters import PREFIX, SUFFIXES, WEIGHTS
from lockstep.quantization import CheckpointLinear

NAMES = ("first", "second")
"""Names of the adapters of a check."""
ALPHA = 2.0
"""lora_alpha of random adapters: with it a rank of 1 changes most answers of the bundled model."""


def write_random_adapter(model: nn.Module, folder: Path, seed: int, rank: int = 1) -> Path:
    """Write an adapter of all linear layers of a model to a folder, and return the folder.

    A and B are such that each layer's output changes by a fraction of itself.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    modules = list(_modules(model))
    for module in modules:
        a = torch.randn(rank, module.inputs, generator=generator) * module.inputs**-0.5
        b = torch.randn(module.whole_outputs, rank, generator=generator) * 0.1
        for suffix, tensor in zip(SUFFIXES, (a, b), strict=True):
            tensors[f"{PREFIX}{module.path}{suffix}"] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    targets = sorted({module.path.rpartition(".")[2] for module in modules})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": ALPHA * rank,
        "target_modules": targets,
    }
    (folder / ADAPTER).write_text(json.dumps(settings), encoding="utf-8")
    return folder


class RandomAdapters:
    """Two random adapters of rank 1 of a model. Their files exist as long as this object."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @cached_property
    def _folder(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="lockstep-check-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        for seed, name in enumerate(NAMES):
            write_random_adapter(self.model, folder / name, seed)
        return folder

    def settings(self) -> dict[str, Any]:
        """Return the LLM arguments of an engine with these adapters."""
        return {"lora_modules": {name: self._folder / name for name in NAMES}}


def _modules(model: nn.Module) -> Iterator[CheckpointLinear]:
    for layer in model.modules():
        if isinstance(layer, Linear):
            yield from layer.sources
