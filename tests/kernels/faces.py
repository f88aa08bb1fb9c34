"""Which backends these tests run, where, and how arguments travel to them and back."""

import copy
import dataclasses
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.kernels import Op
from lockstep.kernels.activations import silu_mul
from lockstep.kernels.activations.cases import silu_mul_cases
from lockstep.kernels.attention import paged_attention
from lockstep.kernels.attention.cases import paged_attention_cases
from lockstep.kernels.gated_delta_rule import gated_delta_chunk, gated_delta_step
from lockstep.kernels.gated_delta_rule.cases import gated_delta_chunk_cases, gated_delta_step_cases
from lockstep.kernels.linear import linear
from lockstep.kernels.linear.cases import linear_cases
from lockstep.kernels.norm import add_rms_norm, gated_rms_norm, rms_norm
from lockstep.kernels.norm.cases import add_rms_norm_cases, gated_rms_norm_cases, rms_norm_cases
from lockstep.kernels.rotary import rope_and_cache
from lockstep.kernels.rotary.cases import rope_and_cache_cases
from lockstep.kernels.sampling import sample
from lockstep.kernels.sampling.cases import sample_cases
from lockstep.kernels.table import advance_rows, draft_step, follow, lookup, prepare_step
from lockstep.kernels.table.cases import (
    advance_rows_cases,
    draft_step_cases,
    follow_cases,
    lookup_cases,
    prepare_step_cases,
)

CASES = {
    linear: linear_cases,
    rms_norm: rms_norm_cases,
    add_rms_norm: add_rms_norm_cases,
    gated_rms_norm: gated_rms_norm_cases,
    silu_mul: silu_mul_cases,
    rope_and_cache: rope_and_cache_cases,
    paged_attention: paged_attention_cases,
    gated_delta_step: gated_delta_step_cases,
    gated_delta_chunk: gated_delta_chunk_cases,
    sample: sample_cases,
    prepare_step: prepare_step_cases,
    advance_rows: advance_rows_cases,
    follow: follow_cases,
    draft_step: draft_step_cases,
    lookup: lookup_cases,
}


@dataclass(frozen=True)
class Face:
    """A backend on a device in a dtype."""

    backend: str
    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def interpreted(self) -> bool:
        return self.backend == "triton" and not self.on_gpu

    def run(self, op: Op, arguments: dict[str, Any]) -> Any:
        """Calls the backend; in-place arguments must be on the face's device already.

        An op without a "cpu" backend is served by its reference there.
        """
        lacks = self.backend == "cpu" and "cpu" not in op.backends
        return op.backends["reference" if lacks else self.backend][0](**self.place(arguments))

    def place(self, value: Any) -> Any:
        """The same arguments on this face's device: what is there already is not copied."""
        if isinstance(value, Tensor):
            return value.to(self.device)
        if isinstance(value, dict):
            return {name: self.place(part) for name, part in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {f.name: self.place(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return type(value)(**parts)
        return value

    def fresh(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """A copy of the arguments on this face's device."""
        return self.place(copy.deepcopy(arguments))


def faces(*interpreted_marks: pytest.MarkDecorator) -> list[Any]:
    """What serves on a CPU; Triton under its interpreter, if installed; Triton on a GPU."""
    face = Face("cpu", "cpu", torch.float32)
    found = [pytest.param(face, id=str(face))]
    if find_spec("triton") and not torch.cuda.is_available():
        face = Face("triton", "cpu", torch.float32)
        found.append(pytest.param(face, id=str(face), marks=interpreted_marks))
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    gpu = [Face("triton", "cuda", dtype) for dtype in dtypes]
    return found + [pytest.param(f, id=str(f), marks=pytest.mark.gpu) for f in gpu]


def tensors_of(*values: Any) -> list[Tensor]:
    """All tensors in tensors, state dataclasses and tuples, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            found.extend(tensors_of(*value))
        elif dataclasses.is_dataclass(value):
            found.extend(getattr(value, f.name) for f in dataclasses.fields(value))
    return found


def changed(arguments: dict[str, Any]) -> list[Tensor]:
    """The tensors that an op may write in place."""
    names = ("state", "k_cache", "v_cache", "lines", "counts", "drafts")
    return tensors_of(*(arguments.get(name) for name in names))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal element for element, NaN where NaN."""
    a, b = a.detach().cpu(), b.detach().cpu()
    if not a.is_floating_point():
        return torch.equal(a, b)
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
