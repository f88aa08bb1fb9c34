"""The token matrix passes on a correct engine, and names the layer of a fault."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from lockstep.check import Interrupted, run_check
from lockstep.check.deadline import TIME_UP, Deadline
from lockstep.check.engines import CheckEngine, Comparison
from lockstep.check.judges.digests import LogitDigests
from lockstep.check.matrix import setups, tokens
from lockstep.check.matrix.setups import Setup
from lockstep.check.report.report import MATRIX_CASES, Report
from lockstep.check.run import STOPPED
from lockstep.check.scenarios.examiner import Effort
from lockstep.layers.mlp import GatedMLP
from lockstep.models.decoder import Block
from lockstep.scheduling.scheduler import Scheduler
from lockstep.step import StepContext

pytestmark = pytest.mark.usefixtures("small_check")
Check = Callable[..., Report]
FEW = setups.Size(max_tokens=8, alone=2, companions=1)
"""Size that suffices for a fault that every request has."""


@pytest.fixture
def check(model: str, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Return run_check over the given setups only."""

    def run(*engines: Setup, **effort: Any) -> Report:
        monkeypatch.setattr(tokens, "setups", lambda size, drafters, graphs: list(engines))
        options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
        options["effort"] = Effort.of(setups.SIZES["quick"], **effort)
        return run_check("quick", model, sections=("tokens", "cache"), **options)

    return run


@pytest.mark.slow
def test_clean_engine_passes_and_exercises_what_it_varies(check: Check) -> None:
    report = check(Setup("mtp", 3, "prefix hit", "none"), Setup("ngram", 2, "preempted", "none"))
    assert report.failed == 0, report.verdict
    assert report.cases == report.planned[MATRIX_CASES] == 2 * (8 + 7 + 5)
    assert not report.interrupted
    assert all(report.exercised[n] > 0 for n in ("draft tokens", "cached tokens", "preemptions"))


def test_coverage_includes_the_matrix(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.check.run.run_scenarios", lambda *rest: None)
    monkeypatch.setitem(setups.SIZES, "quick", FEW)
    report = check(Setup("ngram", 2, "cold", "none"))
    missing = {part for parts in report.not_exercised().values() for part in parts}
    assert not {"drafter ngram", "parameter min_p", "op sample"} & missing
    assert "drafter mtp" in missing


@pytest.mark.slow
def test_a_fault_that_depends_on_drafting_is_named(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The MLP of layer 1 is wrong by 0.1 % in decode steps with more than one token per row."""
    forward = Block.forward
    is_draft_step = []

    def faulty_block(
        self: Block, x: Tensor, delta: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        is_draft_step[:] = [not step.shape.prompt and step.shape.query_len > 1]
        return forward(self, x, delta, step)

    def faulty_mlp(self: GatedMLP, x: Tensor, ctx: StepContext) -> Tensor:
        out = plain(self, x, ctx)
        return (
            out * (1 + 1e-3) if is_draft_step == [True] and getattr(self, "marked", False) else out
        )

    plain = GatedMLP.forward
    build = GatedMLP.__init__

    def marked_build(self: GatedMLP, b: Any, *rest: Any, **options: Any) -> None:
        build(self, b, *rest, **options)
        self.marked = b.layer == "layers.1"

    monkeypatch.setitem(setups.SIZES, "quick", FEW)
    monkeypatch.setattr(GatedMLP, "__init__", marked_build)
    monkeypatch.setattr(Block, "forward", faulty_block)
    monkeypatch.setattr(GatedMLP, "forward", faulty_mlp)
    report = check(Setup("none", 0, "cold", "none"), Setup("mtp", 2, "cold", "none"))
    assert report.failed > 0
    assert {f.setup.drafter for f in report.failures} == {"mtp"}
    first = report.failures[0]
    assert first.where is not None and "blocks.1.mlp" in first.where, report.verdict
    assert first.where in report.verdict


def test_layer_is_named_where_the_first_failure_ends_the_check(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = GatedMLP.forward

    def faulty(self: GatedMLP, x: Tensor, ctx: StepContext) -> Tensor:
        is_draft_step = not ctx.shape.prompt and ctx.shape.query_len > 1
        return plain(self, x, ctx) * (1 + is_draft_step * 1e-3)

    monkeypatch.setitem(setups.SIZES, "quick", FEW)
    monkeypatch.setattr(GatedMLP, "forward", faulty)
    drafting = Setup("mtp", 2, "cold", "none")
    report = check(drafting, Setup("mtp", 3, "cold", "none"), fail_fast=True)
    assert {tally.setup for tally in report.tallies} == {drafting}
    where = report.failures[0].where
    assert where is not None and "blocks.0.mlp" in where, report.verdict


def test_missing_event_is_a_failure(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that ignores preempt_every gives correct outputs and proves nothing."""
    init = Scheduler.__init__

    def idle(self: Scheduler, *args: Any, **options: Any) -> None:
        init(self, *args, **{**options, "preempt_every": 0})

    monkeypatch.setitem(setups.SIZES, "quick", FEW)
    monkeypatch.setattr(Scheduler, "__init__", idle)
    report = check(Setup("none", 0, "preempted", "none"))
    assert [f.what for f in report.failures] == ["the run had no preemptions"]


def test_an_interruption_keeps_the_batches_that_were_done(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interruption comes before the long prompt's batch of the first of two engines."""
    run = Comparison.run

    def interrupted(self: Comparison, engine: Any, setup: Setup, batch: Any) -> Any:
        if batch.name == "long prompt":
            raise KeyboardInterrupt
        return run(self, engine, setup, batch)

    monkeypatch.setattr(Comparison, "run", interrupted)
    with pytest.raises(Interrupted) as ended:
        check(Setup("none", 0, "cold", "none"), Setup("none", 0, "preempted", "none"))
    report = ended.value.report
    assert (report.interrupted, report.failed, report.cases) == (True, 0, 8 + 7)
    assert "Stopped early: 15 of 40 matrix cases were run. 15 cases, all equal" in report.verdict


def test_an_interruption_before_anything_was_compared(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lockstep.check.checked_model.build_plain", interrupted)
    with pytest.raises(Interrupted) as ended:
        check(Setup("none", 0, "cold", "none"))
    report = ended.value.report
    stopped = "Stopped early: 0 of 20 matrix cases were run. Nothing was compared."
    assert report.verdict.startswith(stopped)
    assert report.not_exercised()[STOPPED] == ["random scenarios", "matrix of tokens"]


def test_requested_settings_have_an_engine_that_fills_its_rows(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's K and max_num_seqs; a step has as many rows."""
    num_rows = []
    run = Comparison.run

    def counted(self: Comparison, engine: CheckEngine, *rest: Any) -> Any:
        digests = LogitDigests()
        with engine.observed(digests):
            answers = run(self, engine, *rest)
        num_rows.append(digests.max_rows)
        return answers

    monkeypatch.setattr(Comparison, "run", counted)
    monkeypatch.setattr(tokens, "setups", lambda *rest: [])
    monkeypatch.setitem(setups.SIZES, "quick", setups.Size(max_tokens=24, alone=1, companions=1))
    drafting = {"method": "ngram", "num_speculative_tokens": 5}
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 11}
    report = run_check(
        "quick", model, sections=("tokens",), speculative_config=drafting, **settings
    )
    assert report.failed == 0, report.verdict
    assert {t.setup for t in report.tallies} == {Setup("ngram", 5, "cold", "none", rows=11)}
    assert report.cases == report.planned[MATRIX_CASES] == 1 + 7 + 2 + 11
    assert max(num_rows) == 11


def test_deadline_leaves_batches_out(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is up after the first batch of the first of two engines."""
    run = Comparison.run

    def last(self: Comparison, *rest: Any) -> Any:
        monkeypatch.setattr(Deadline, "passed", property(lambda self: True))
        return run(self, *rest)

    monkeypatch.setitem(setups.SIZES, "quick", FEW)
    monkeypatch.setattr(Comparison, "run", last)
    report = check(Setup("none", 0, "cold", "none"), Setup("none", 0, "prefix hit", "none"))
    assert (report.cases, report.failed) == (1, 0)
    late = report.not_exercised()[TIME_UP]
    assert late == ["10 of 11 outputs of tokens", "matrix of cache"]
    assert "Not run: kernels, logits, sampling, cache, capture. In part: tokens." in report.verdict
