"""Faults that only a GPU has, and no false alarm there."""

import pytest
import torch

from lockstep.doctor.children import Children
from lockstep.doctor.examine import Job
from lockstep.layers.build_context import KernelNeed

pytestmark = pytest.mark.gpu
FAULTY = "tests.doctor.faulty_backends"
NEED = KernelNeed("rms_norm", {"device": "cuda", "dtype": torch.bfloat16, "width": 80})


@pytest.mark.parametrize(
    ("backend", "kinds"),
    [("wrong_from_a_graph", {"graph"}), ("races", {"race"}), ("triton", set())],
)
def test_fault_is_named_on_a_gpu(backend: str, kinds: set[str]) -> None:
    """`races` waits for the host, so a capture of it fails too."""
    job = Job("rms_norm", backend, "cuda", (NEED,), imports=(FAULTY,))
    result = Children("gpu").run_one(job)
    found = {finding.kind for finding in result.findings}
    assert found - {"graph"} == kinds - {"graph"}
    assert kinds <= found
