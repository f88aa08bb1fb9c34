"""A sound engine passes the quick check's worlds, and they leave nothing of the house out."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lockstep.check import SIZES, Report, run_check
from lockstep.check.exercised import EVERY_DRAFTER, Exercised, engine_parameters
from lockstep.check.worlds import Effort
from lockstep.kernels.backends import all_ops, load
from lockstep.sampling_params import SamplingParams

WITH_FOLDER = {"eagle3", "draft_model", "dflash"}
"""Drafters that only run where a folder is named."""

WITHOUT_A_MODEL = {
    *("route", "experts", "dequantize_weight"),
    *("mamba2_step", "mamba2_chunk", "gated_group_norm", "relu2"),
    *("latent_attention", "latent_rope_and_cache", "head_linear"),
    "block_step",
}
"""Ops that the bundled model does not use; tests/kernels, tests/layers and tests/spec run them."""


@pytest.fixture(scope="module")
def calls() -> Iterator[Counter[tuple[str, str]]]:
    """How often each backend of each op is called meanwhile."""
    counted: Counter[tuple[str, str]] = Counter()

    def counting(key: tuple[str, str], inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            counted[key] += 1
            return inner(*given, **more)

        return call

    load()
    ops = all_ops()
    sound = {name: dict(op.backends) for name, op in ops.items()}
    for name, op in ops.items():
        for kind, backend in sound[name].items():
            op.backends[kind] = backend._replace(run=counting((name, kind), backend.run))
    yield counted
    for name, op in ops.items():
        op.backends.clear()
        op.backends.update(sound[name])


@pytest.fixture(scope="module")
def report(model: str, calls: Counter[tuple[str, str]]) -> Report:
    """The quick check of a tiny model: its worlds alone. test_sampling.py runs the sampling."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.check.run.run_matrix", lambda *rest: None)
        patch.setattr("lockstep.check.run.run_sampling", lambda *rest: None)
        effort = Effort(SIZES["quick"].worlds)
        return run_check("quick", model, seed=3, effort=effort, load_format="dummy")


def test_a_sound_engine_passes(report: Report) -> None:
    assert report.failed == 0, report.verdict


@pytest.mark.parametrize(
    "name",
    [
        *("cached tokens", "drafted", "accepted", "preemptions"),
        *("uneven steps of told", "uneven steps of ngram"),
    ],
)
def test_what_is_varied_takes_place(report: Report, name: str) -> None:
    assert report.exercised[name] > 0


def test_every_backend_that_serves_here_is_called(
    report: Report, calls: Counter[tuple[str, str]]
) -> None:
    assert report.used is not None
    for name, op in all_ops().items():
        called = {kind for kind in op.backends if calls[name, kind]}
        if name in WITHOUT_A_MODEL:
            assert not called
            continue
        assert report.used.backends[name] & called, name
    called = {f"{name} by {kind}" for name, kind in calls if calls[name, kind]}
    for lack in (lack for lack in report.used.lacks() if " by " in lack):
        backend, _, why = lack.partition(": ")
        assert backend not in called
        assert why != ""
        if not backend.endswith(" by reference"):
            assert why != "another backend is preferred", "it needs a GPU"


def test_every_drafter_drafts(report: Report) -> None:
    own = set(EVERY_DRAFTER) - WITH_FOLDER
    assert report.used is not None and report.used.drafters == own
    uneven = {t.setup.drafter for t in report.tallies if t.setup.changing}
    assert uneven == own, "each drafts a number that changes from step to step"


def test_every_parameter_is_used(report: Report) -> None:
    assert report.used is not None and report.used.parameters == engine_parameters()


def test_what_is_left_out_is_named() -> None:
    nothing = Exercised()
    lacks = nothing.lacks()
    assert {"drafter mtp", "parameter top_k", "op sample", "op gated_delta_step"} <= set(lacks)
    nothing.params(SamplingParams(top_k=random.randrange(1, 9)))
    assert nothing.parameters == {"top_k"}
    assert "parameter top_k" not in nothing.lacks()
    nothing.backends["sample"] = {"triton"}
    nothing.refused["sample"] = {}
    assert "sample by reference: another backend is preferred" in nothing.lacks()
