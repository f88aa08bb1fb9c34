"""Doctor names faults of kernels on a GPU exactly, and raises no false alarm there."""

import pytest
import torch

from lockstep.doctor.children import Children
from lockstep.doctor.examine import ASYNCHRONOUS, BLOCKING, Job
from lockstep.layers.build_context import KernelNeed

pytestmark = pytest.mark.gpu
FAULTY = "tests.doctor.faulty_gpu_backends"
STAGE_SECONDS = 60.0
"""Time limit of a check, in which a fresh machine imports torch and compiles."""
HANG_SECONDS = 15.0
NEED = KernelNeed("rms_norm", {"device": "cuda", "dtype": torch.bfloat16, "width": 80})


def examine(backend: str, mode: str = ASYNCHRONOUS) -> dict[str, str]:
    """Return what was found: kind -> details."""
    job = Job("rms_norm", f"gpu_{backend}", "cuda", (NEED,), mode, imports=(FAULTY,))
    seconds = HANG_SECONDS if backend == "hangs" else STAGE_SECONDS
    result = Children("gpu", stage_seconds=seconds).run_one(job)
    return {finding.kind: f"{finding.check}: {finding.detail}" for finding in result.findings}


@pytest.mark.parametrize(
    ("backend", "kinds", "detail"),
    [
        ("illegal_address", {"error"}, "illegal memory access"),
        ("traps", {"error"}, "call: "),
        ("hangs", {"hang"}, "no end within 15 s"),
        ("aborts", {"crash"}, "SIGABRT"),
        ("one_ulp_at_odd_rows", {"rows"}, "in a batch of"),
        ("other_bits_alone", {"rows"}, "in a batch of 1"),
        ("wrong_numbers", {"wrong numbers"}, "reference: "),
        ("changes_inputs", {"changes inputs", "graph"}, "the argument weight"),
        ("writes_outside", {"writes outside"}, "next to tensors of"),
        ("wrong_from_a_graph", {"graph"}, "a replay differs"),
        ("waits_for_the_host", {"graph"}, "graph: "),
        ("races", {"race"}, "under the load of a second stream"),
    ],
)
def test_fault_is_named(backend: str, kinds: set[str], detail: str) -> None:
    findings = examine(backend)
    assert set(findings) == kinds
    assert detail in " ".join(findings.values())


def test_unwritten_memory_is_named() -> None:
    """It differs from call to call, so that other checks may find it too."""
    assert "memory that no one wrote" in examine("leaves_an_element")["unwritten"]


def test_race_is_not_found_with_blocking_launches() -> None:
    """Each launch then waits for the device."""
    assert not examine("races", BLOCKING)


def test_healthy_backend_has_no_finding_in_repeated_runs() -> None:
    assert not any(examine("healthy", mode) for mode in (ASYNCHRONOUS, BLOCKING) for _ in range(5))
