"""Models that begin, saved as training leaves them, and what they are asked."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from training import train
from training.models.base import LanguageModel
from training.models.functional import CHUNK

VOCAB = 4096
MOST_BYTES = 10 << 20


def save_model(name: str, parent: Path) -> tuple[Path, LanguageModel]:
    """The folder of one of the trainer's models, and that model as it was saved."""
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
    """Two, of less than a chunk and of more."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (n,), generator=draw).tolist() for n in (20, 150)]


def row_of(ids: list[int]) -> Tensor:
    """[1, T], filled up to whole chunks."""
    row = torch.tensor([ids])
    return F.pad(row, (0, -len(ids) % CHUNK))
