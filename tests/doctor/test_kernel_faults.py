"""Doctor names each kind of kernel fault exactly, survives it, and raises no false alarm."""

from collections.abc import Iterator

import pytest
import torch

from lockstep.config import EngineConfig
from lockstep.doctor.cases import Case, cases_of
from lockstep.doctor.children import Children, Result
from lockstep.doctor.examine import (
    ASYNCHRONOUS,
    BLOCKING,
    TOLERANCE,
    Examiner,
    Job,
    tolerance_of,
)
from lockstep.doctor.kernels import Doctor, backends_of, merge_modes
from lockstep.doctor.needs import kernels_of
from lockstep.kernels import Op
from lockstep.kernels.backends import uses_numba
from lockstep.kernels.formats.kv.table import kv_format
from lockstep.kernels.formats.weights import K_BLOCK, Fp4Weight, IntWeight, QuantizedWeight
from lockstep.kernels.fp8_linear import quantize_add_rms_norm, quantize_rows, quantize_silu_mul
from lockstep.kernels.health import health_path, read_health
from lockstep.kernels.norm import rms_norm
from lockstep.kernels.selection import BackendHealth, KernelSelection
from lockstep.layers.build_context import KernelNeed

FAULTY = "tests.doctor.faulty_backends"
NEED = KernelNeed("rms_norm", {"device": "cpu", "dtype": torch.float32, "width": 80})
ARCH = "sm_of_the_test"


@pytest.fixture(scope="module")
def children() -> Children:
    return Children(ARCH, stage_seconds=20.0)


def examine(children: Children, backend: str, mode: str = ASYNCHRONOUS) -> Result:
    return children.run_one(Job("rms_norm", backend, "cpu", (NEED,), mode, (FAULTY,)))


@pytest.mark.parametrize("weight", [IntWeight.empty(4, 128), Fp4Weight.empty(4, 128)])
def test_calls_know_the_scales_of_a_weight(weight: QuantizedWeight) -> None:
    """The first launch of the check of graphs may not wait for the device, so it reads no scale."""
    weight.fill_dummy(torch.Generator().manual_seed(0))
    examiner = Examiner(Job("linear", "reference", "cpu", ()), lambda message: None)
    arguments = examiner._fresh(Case("1x4x128", dict(x=torch.zeros(1, 128), weight=weight)))
    assert arguments["weight"] is not weight
    assert set(weight.derived) <= vars(arguments["weight"]).keys()


@pytest.mark.parametrize(
    ("backend", "kind", "check", "case", "detail"),
    [
        ("aborts", "crash", "call", "1x80", "SIGABRT"),
        ("segmentation_fault", "crash", "call", "1x80", "SIGSEGV"),
        ("illegal_instruction", "illegal instruction", "call", "1x80", "SIGILL"),
        ("exits", "exit", "call", "1x80", "exit status 3; out of registers"),
        ("raises", "error", "call", "1x80", "illegal memory access"),
        ("one_ulp_at_odd_rows", "rows", "rows", "1x80", "rows 0, 0, 0 in a batch of 3"),
        ("right_if_blocking", "wrong numbers", "reference", "1x80", "80 of 80 elements"),
        ("other_bits_alone", "rows", "rows", "5x33", "rows 0 in a batch of 1"),
        ("unstable", "unstable", "repeat", "1x80", "two calls with equal arguments"),
        ("writes_outside", "writes outside", "bounds", "1x80", "next to tensors of 320 bytes"),
        ("changes_inputs", "changes inputs", "call", "1x80", "the argument weight"),
        ("wrong_shape", "wrong numbers", "reference", "1x80", "[1, 79]"),
    ],
)
def test_fault_is_named(
    children: Children, backend: str, kind: str, check: str, case: str, detail: str
) -> None:
    finding = examine(children, backend).findings[0]
    assert (finding.op, finding.backend, finding.arch) == ("rms_norm", backend, ARCH)
    assert (finding.kind, finding.check, finding.case) == (kind, check, case)
    assert detail in finding.detail


def test_state_of_16_bits_widens_the_tolerance() -> None:
    """Outputs of fp32 follow a state that was rounded to bf16 within the kernel."""
    for dtype in (torch.float32, torch.bfloat16):
        case = Case("a state", {"x": torch.ones(2), "state": (torch.ones(2, dtype=dtype),)})
        assert tolerance_of(case, torch.float32) == TOLERANCE[dtype]


@pytest.mark.parametrize("op", [quantize_silu_mul, quantize_add_rms_norm], ids=lambda op: op.name)
def test_code_of_a_number_that_is_an_ulp_away_is_no_fault(op: Op) -> None:
    """A GPU's norm or activation may differ from a CPU's in its last bit, and a code with it."""
    rows = torch.randn(19, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows_an_ulp_away = (rows.view(torch.int16) + 1).view(torch.bfloat16)
    words, _ = quantize_rows(rows, K_BLOCK)
    other, _ = quantize_rows(rows_an_ulp_away, K_BLOCK)
    assert not torch.equal(words, other)
    examiner = Examiner(Job(op.name, "reference", "cuda", ()), lambda message: None)
    assert not examiner._difference("result 2", other, words, TOLERANCE[torch.bfloat16])
    # A kernel that stores its words in another order is still found.
    assert examiner._difference("result 2", words.flip(1), words, TOLERANCE[torch.bfloat16])
    given = Examiner(Job("quantize_rows", "reference", "cuda", ()), lambda message: None)
    assert given._difference("result 0", other, words, TOLERANCE[torch.bfloat16])


def test_hang_is_named_after_the_time_limit() -> None:
    result = examine(Children(ARCH, stage_seconds=5.0), "hangs")
    (finding,) = result.findings
    assert (finding.kind, finding.check, finding.case) == ("hang", "call", "4x3x64")
    assert "5 s" in finding.detail


def test_unwritten_memory_is_named(children: Children) -> None:
    """It differs from call to call, so that other checks may find it too."""
    findings = {
        finding.kind: finding for finding in examine(children, "leaves_an_element").findings
    }
    assert "memory that no one wrote" in findings["unwritten"].detail


def test_process_that_does_not_exit_is_ended() -> None:
    """It sent all of its results."""
    result = examine(Children(ARCH, stage_seconds=5.0), "hangs_at_exit")
    assert result.checks and not result.findings


def test_fault_of_asynchronous_launches_alone_names_them(children: Children) -> None:
    results = [examine(children, "right_if_blocking", mode) for mode in (ASYNCHRONOUS, BLOCKING)]
    assert results[0].findings and not results[1].findings
    (entry,) = merge_modes(results)
    assert entry.findings[0].modes == (ASYNCHRONOUS,)
    assert "with asynchronous launches" in entry.findings[0].brief


def test_fault_of_both_kinds_of_launches_is_one_finding(children: Children) -> None:
    results = [examine(children, "wrong_shape", mode) for mode in (ASYNCHRONOUS, BLOCKING)]
    (entry,) = merge_modes(results)
    assert [finding.modes for finding in entry.findings] == [(ASYNCHRONOUS, BLOCKING)]


@pytest.mark.parametrize("runs", [20, pytest.param(50, marks=pytest.mark.slow)])
def test_healthy_backend_has_no_finding_in_repeated_runs(children: Children, runs: int) -> None:
    results = [examine(children, "healthy") for _ in range(runs)]
    assert not any(result.findings for result in results)
    assert {result.checks for result in results} == {5 * (len(rms_norm_cases()) - 1)}


def rms_norm_cases() -> list[str]:
    return [case.name for case in cases_of(rms_norm, NEED, torch.float32)]


@pytest.fixture
def sick_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register faulty backends of rms_norm in this process too, preferred to healthy ones."""
    from tests.doctor import faulty_backends

    for name in faulty_backends.FAULTS:
        rms_norm.backends.pop(name, None)  # importing them registered them, for other tests too
    monkeypatch.setattr(rms_norm, "backends", dict(rms_norm.backends))
    for name in ("healthy", "one_ulp_at_odd_rows", "aborts"):
        rms_norm.backend(name, supports=lambda **traits: None)(faulty_backends.FAULTS[name])
    yield


def test_sick_backends_are_replaced_and_remembered(
    sick_backends: None, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """Doctor goes on to the next backend until a healthy one; a server then reads the results."""
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path))
    doctor = Doctor("cpu", imports=(FAULTY,), stage_seconds=20.0)
    report = doctor.examine([NEED], lambda *progress: None)
    examined = {entry.backend: bool(entry.findings) for entry in report.examined}
    assert examined == {"aborts": True, "one_ulp_at_odd_rows": True, "healthy": False}
    (replacement,) = report.replacements
    assert (replacement.replaced, replacement.backend) == ("aborts", "healthy")
    assert replacement.slowdown is None  # what aborts has no time
    assert report.path == health_path("cpu") and not report.unserved
    selection = KernelSelection(health=read_health("cpu"))
    name, refused, chosen = selection.choose(rms_norm, **NEED.traits)
    assert name == "healthy" and chosen == replacement
    assert refused["aborts"].startswith("sick: crash at 1x80")
    assert selection.slowdown("rms_norm", "one_ulp_at_odd_rows", "healthy")


def test_best_backend_of_each_need_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best backend of the second need does not serve the first one."""
    from tests.doctor import faulty_backends

    wide = KernelNeed("rms_norm", NEED.traits | {"width": 96})
    monkeypatch.setattr(rms_norm, "backends", {"reference": rms_norm.backends["reference"]})
    run = faulty_backends.FAULTS["healthy"]
    rms_norm.backend("any", supports=lambda **traits: None)(run)
    rms_norm.backend("narrow", supports=lambda width, **traits: "wide" * (width > 80) or None)(run)
    served = backends_of([wide, NEED])
    assert list(served) == [("rms_norm", name) for name in ("narrow", "any", "reference")]
    monkeypatch.setattr(Children, "run", lambda self, jobs, progress: map(Result, jobs, [[]] * 9))
    report = Doctor("cpu", save=False).examine([wide, NEED], lambda *progress: None)
    assert [entry.backend for entry in report.examined] == ["narrow", "any"]


def test_layers_of_each_cache_format_have_a_case_of_their_own() -> None:
    """kv_cache_dtype_skip_layers mixes formats: layers of equal sizes have one name for all."""
    format = kv_format("fp8", torch.float32)
    assert format is not None
    traits = {
        "device": "cpu", "dtype": torch.float32, "heads": 4, "kv_heads": 2, "head_dim": 32,
        "quantizers": None,
    }  # fmt: skip
    needs = [
        KernelNeed("paged_attention", traits | {"quantizers": quantizers})
        for quantizers in (None, (format.k, format.v))
    ]
    jobs = [Job("paged_attention", "reference", "cpu", chosen) for chosen in (needs, *zip(needs))]
    counts = [len(list(Examiner(job, print)._cases())) for job in jobs]
    assert counts[0] == counts[1] + counts[2]


def test_op_without_a_healthy_backend_is_reported(children: Children) -> None:
    from lockstep.errors import ConfigError

    traits = NEED.traits
    sick = {
        ("rms_norm", name): BackendHealth("rms_norm", name, "hang") for name in rms_norm.backends
    }
    with pytest.raises(ConfigError, match="no healthy backend.*reference: hang"):
        KernelSelection(health=sick).choose(rms_norm, **traits)
    forced = KernelSelection({"rms_norm": "reference"}, sick)
    assert forced.choose(rms_norm, **traits)[0] == "reference"


def test_results_of_another_release_are_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from lockstep.kernels import health

    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path))
    health.write_health("cpu", [BackendHealth("rms_norm", "cpu", "hang")])
    assert read_health("cpu")
    monkeypatch.setattr(health, "__version__", "0.0.0")
    assert not read_health("cpu")


def test_kernels_of_the_bundled_model_are_those_that_its_engine_chooses() -> None:
    needs = kernels_of(EngineConfig.read(), "cpu")
    ops = {need.op for need in needs}
    assert {"linear", "paged_attention", "gated_delta_step", "gated_delta_chunk", "sample"} <= ops
    served = backends_of(needs)
    expected = "numba" if uses_numba(torch.float32) else "cpu"
    assert next(name for op, name in served if op == "paged_attention") == expected


@pytest.mark.slow
def test_bundled_model_raises_no_alarm() -> None:
    needs = kernels_of(EngineConfig.read(), "cpu")
    report = Doctor("cpu", save=False).examine(needs, lambda *progress: None)
    assert not report.findings and not report.unserved
    assert {entry.op for entry in report.examined} == {need.op for need in needs}
