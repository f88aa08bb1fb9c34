"""The quick check's scenarios pass on a correct engine and cover every backend and parameter."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lockstep.check import SIZES, Report, run_check
from lockstep.check.report.coverage import (
    ALL_DRAFTERS,
    NO_EARLY_STARTS,
    NO_JOINT_STEPS,
    Coverage,
    engine_parameters,
)
from lockstep.check.scenarios.examiner import Effort
from lockstep.kernels.backends import all_ops, load
from lockstep.sampling_params import SamplingParams

NEEDS_FOLDER = {"eagle3", "draft_model", "dflash"}
"""Drafters that need a checkpoint folder in speculative_config."""

UNUSED_OPS = {
    *("route", "experts", "dequantize_weight"),
    *("mamba2_step", "mamba2_chunk", "gated_group_norm", "relu2"),
    *("latent_attention", "latent_rope_and_cache", "head_linear"),
    *("block_step", "exchange", "exchange_add_rms_norm", "fp8_linear", "quantize_rows"),
    *("quantize_silu_mul", "quantize_add_rms_norm"),
}
"""Ops that the tiny model does not use; tests/kernels, tests/layers and tests/spec run them."""


@pytest.fixture(scope="module")
def calls() -> Iterator[Counter[tuple[str, str]]]:
    """Count the calls of each backend of each op while the module's tests run."""
    counts: Counter[tuple[str, str]] = Counter()

    def counting(key: tuple[str, str], inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            counts[key] += 1
            return inner(*args, **options)

        return call

    load()
    ops = all_ops()
    backends = {name: dict(op.backends) for name, op in ops.items()}
    for name, op in ops.items():
        for kind, backend in backends[name].items():
            op.backends[kind] = backend._replace(run=counting((name, kind), backend.run))
    yield counts
    for name, op in ops.items():
        op.backends.clear()
        op.backends.update(backends[name])


@pytest.fixture(scope="module")
def report(model: str, calls: Counter[tuple[str, str]]) -> Report:
    """Return the report of the quick check's scenarios; test_distributions.py tests sampling."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.check.matrix.tokens.TokenMatrix.run", lambda *rest: None)
        settings = {"effort": Effort.of(SIZES["quick"]), "load_format": "dummy"}
        return run_check("quick", model, seed=3, sections=("tokens",), **settings)


@pytest.mark.slow
def test_a_sound_engine_passes(report: Report) -> None:
    assert report.failed == 0, report.verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("cached tokens", "draft tokens", "accepted draft tokens", "preemptions"),
        *("ids used again", "steps that raised", "returns under another row", "joint steps"),
    ],
)
def test_every_required_event_occurs(report: Report, name: str) -> None:
    assert report.exercised[name] > 0


@pytest.mark.slow
def test_every_backend_that_serves_here_is_called(
    report: Report, calls: Counter[tuple[str, str]]
) -> None:
    assert report.coverage is not None
    for name, op in all_ops().items():
        called = {kind for kind in op.backends if calls[name, kind]}
        if name in UNUSED_OPS:
            assert not called
            continue
        assert report.coverage.backends[name] & called, name
    for lack, why in report.coverage.missing():
        assert why != ""
        if not lack.startswith("backend "):
            continue
        backend, _, ops = lack.removeprefix("backend ").partition(" of ")
        assert not any(calls[name, backend] for name in ops.split(", "))
        if backend not in ("reference", "cpu"):
            assert why != "another backend is preferred", "it needs a GPU"


@pytest.mark.slow
def test_every_drafter_drafts(report: Report) -> None:
    expected = set(ALL_DRAFTERS) - NEEDS_FOLDER
    assert report.coverage is not None and report.coverage.drafters == expected
    assert any(t.setup.changing for t in report.tallies)


@pytest.mark.slow
def test_every_parameter_is_used(report: Report) -> None:
    assert report.coverage is not None and report.coverage.parameters >= engine_parameters()


def test_missing_coverage_is_named_with_its_reason() -> None:
    coverage = Coverage(refused_drafters={"mtp": "no MTP module"})
    missing = dict(coverage.missing())
    assert missing["drafter mtp"] == "no MTP module"
    assert missing["drafter ngram"] == "no engine of this run had it"
    assert missing["op route"] == "no engine of this run needed it"
    assert {"parameter top_k", "op sample", "op gated_delta_step"} <= set(missing)
    coverage.record_params(SamplingParams(top_k=random.randrange(1, 9)))
    assert coverage.parameters == {"top_k"}
    assert "parameter top_k" not in dict(coverage.missing())
    coverage.record_kernel("sample", "triton")
    coverage.record_kernel("rms_norm", "triton")
    missing = dict(coverage.missing())
    assert missing["backend reference of rms_norm, sample"] == "another backend is preferred"
    assert "op sample" not in missing


def test_joint_steps_are_missing_until_a_scenario_had_one() -> None:
    coverage = Coverage()
    assert dict(coverage.missing())["joint steps"] == NO_JOINT_STEPS
    coverage.has_joint_steps = True
    assert "joint steps" not in dict(coverage.missing())


def test_early_starts_are_missing_until_an_engine_had_one() -> None:
    coverage = Coverage()
    assert dict(coverage.missing())["kernels that start early"] == NO_EARLY_STARTS
    coverage.has_early_starts = True
    assert "kernels that start early" not in dict(coverage.missing())


def test_feature_is_missing_only_where_an_engine_ran() -> None:
    coverage = Coverage(has_engine=True)
    assert dict(coverage.missing())["op route"] == "no engine of this run has experts"


def test_op_that_another_op_runs_is_missing_with_that_reason() -> None:
    coverage = Coverage(has_engine=True)
    assert (
        dict(coverage.missing())["op quantize_rows"] == "no engine of this run has FP8 activations"
    )
    coverage.record_kernel("fp8_linear", "hopper")
    reason = "no layer chooses it; backends of fp8_linear may run it"
    assert dict(coverage.missing())["op quantize_rows"] == reason


def test_callers_are_ops() -> None:
    ops = all_ops()
    callers = {caller for op in ops.values() for caller in op.callers}
    assert callers and callers <= ops.keys()
