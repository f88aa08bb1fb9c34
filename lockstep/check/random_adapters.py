"""Random LoRA adapters of a model, in the files of PEFT, for checks."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from lockstep.layers.linear import Linear
from lockstep.models.json_files import ADAPTER
from lockstep.models.lora_adapters import PREFIX, SUFFIXES, WEIGHTS
from lockstep.quantization import CheckpointLinear

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


def _modules(model: nn.Module) -> Iterator[CheckpointLinear]:
    for layer in model.modules():
        if isinstance(layer, Linear):
            yield from layer.reads
