"""Models with initial weights, saved as training saves them, and their prompts."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from training import train
from training.models.base import LanguageModel
from training.models.functional import CHUNK

VOCAB = 4096
MAX_BYTES = 10 << 20


def save_model(name: str, parent: Path) -> tuple[Path, LanguageModel]:
    """Return the folder of a saved model, and the model as it was saved."""
    torch.manual_seed(0)
    folder = parent / name
    train._prepare(folder, argparse.Namespace(tokenizer=False, resume=False))
    model = train.MODELS[name][0]()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key or "bias" in key:
                p.add_(torch.randn_like(p) * 0.2)
            elif "gate.weight" in key:
                p.mul_(2.0)
    train._save(model, folder)
    model.load(folder)
    return folder, model.eval()


def random_prompts() -> list[list[int]]:
    """Return two prompts, one shorter and one longer than a chunk."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (n,), generator=draw).tolist() for n in (20, 150)]


def row_of(ids: list[int]) -> Tensor:
    """Return ids as a row [1, T] of whole chunks."""
    row = torch.tensor([ids])
    return F.pad(row, (0, -len(ids) % CHUNK))
