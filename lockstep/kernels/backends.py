"""load() makes the faces of all ops known; gpu_trait() and cpu_trait() are what they ask first."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

FACES = (
    "linear.triton",
    "linear.cublas",
    "norm.rms",
    "activations.elementwise",
    "rotary.rope",
    "attention.cpu",
    "attention.paged",
    "attention.hopper",
    "gated_delta_rule.cpu",
    "gated_delta_rule.step",
    "gated_delta_rule.chunk",
    "sampling.triton",
    "table.triton",
)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def load() -> None:
    """Imports every op's faces: those for a GPU only where Triton is installed. Idempotent."""
    triton = find_spec("triton") is not None
    for face in FACES:
        if triton or face.endswith(".cpu"):
            import_module(f"lockstep.kernels.{face}")


def cpu_trait(**traits: Any) -> str | None:
    """None on a CPU, else the reason why not."""
    if str(traits.get("device", "cpu")).partition(":")[0] == "cpu":
        return None
    return "it reads lengths on the host, and its bits are those of a CPU's libraries"


def gpu_trait(**traits: Any) -> str | None:
    """None where a Triton kernel can run: a CUDA device, and a dtype of FLOATS if one is named."""
    if str(traits.get("device", "cpu")).partition(":")[0] != "cuda":
        return "Triton kernels need a CUDA device"
    dtype = traits.get("dtype", torch.float32)
    return None if dtype in FLOATS else f"dtype {dtype} is none of bf16, fp16 and fp32"
