"""load() makes the Triton faces of all ops known; gpu_trait() is what each of them asks first."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

OPS = ("linear", "norm", "attention", "gated_delta_rule", "sampling")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def load() -> None:
    """Imports every op's triton.py. Idempotent; does nothing where Triton is not installed."""
    if find_spec("triton") is None:
        return
    for op in OPS:
        import_module(f"lockstep.kernels.{op}.triton")


def gpu_trait(**traits: Any) -> str | None:
    """None where a Triton kernel can run: a CUDA device, and bf16, fp16 or fp32 if a dtype is named."""
    if str(traits.get("device", "cpu")).partition(":")[0] != "cuda":
        return "Triton kernels need a CUDA device"
    dtype = traits.get("dtype", torch.float32)
    return None if dtype in FLOATS else f"dtype {dtype} is none of bf16, fp16 and fp32"
