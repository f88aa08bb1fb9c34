"""load(): makes the Triton faces of all ops known, where Triton can be imported."""

from importlib import import_module
from importlib.util import find_spec

OPS = ("linear", "norm", "attention", "gated_delta_rule", "sampling")


def load() -> None:
    """Imports every op's triton.py. Idempotent; does nothing where Triton is not installed."""
    if find_spec("triton") is None:
        return
    for op in OPS:
        import_module(f"lockstep.kernels.{op}.triton")
