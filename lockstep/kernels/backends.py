"""load() makes the GPU faces of all ops known; gpu_trait() is what the Triton ones ask first."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

FACES = (
    "linear.triton",
    "linear.cublas",
    "norm.triton",
    "activations.triton",
    "rotary.triton",
    "attention.triton",
    "attention.hopper",
    "gated_delta_rule.triton",
    "gated_delta_rule.triton_chunk",
    "sampling.triton",
    "table.triton",
)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def load() -> None:
    """Imports every op's GPU faces. Idempotent; does nothing where Triton is not installed."""
    if find_spec("triton") is None:
        return
    for face in FACES:
        import_module(f"lockstep.kernels.{face}")


def gpu_trait(**traits: Any) -> str | None:
    """None where a Triton kernel can run: a CUDA device, and a dtype of FLOATS if one is named."""
    if str(traits.get("device", "cpu")).partition(":")[0] != "cuda":
        return "Triton kernels need a CUDA device"
    dtype = traits.get("dtype", torch.float32)
    return None if dtype in FLOATS else f"dtype {dtype} is none of bf16, fp16 and fp32"
