"""The logits check passes on a correct engine, and detects a single wrong bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.check import Interrupted, run_check
from lockstep.check.checked_model import CheckedModel
from lockstep.check.deadline import TIME_UP, Deadline
from lockstep.check.engines import CheckEngine
from lockstep.check.judges.digests import digest
from lockstep.check.matrix import logits, logits_setups
from lockstep.check.matrix.cases import Batch
from lockstep.check.matrix.logits import run_logits
from lockstep.check.matrix.logits_setups import (
    CHUNKS,
    SIZES,
    Size,
    batches,
    engines,
    long_length,
    make_cases,
)
from lockstep.check.matrix.setups import Setup
from lockstep.check.oracle_drafter import OracleDrafter
from lockstep.check.report.report import LOGITS_CASES, Report
from lockstep.errors import CapacityError
from lockstep.worker import executor
from tests.check.faulty import flip_last_logit_bit
from tests.thread_ranks import ThreadGroup, ThreadRanks

GRAPH_MODES = ("full", "piecewise", "none")
SMALL = Size((1, 2, 7), (0, 3, 7), (), 1, 1, 300, 10)
Check = Callable[..., Report]


@pytest.fixture
def check(model: str, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Return the section of logits at a small size over the tiny model."""

    def run(size: Size = SMALL, **settings: Any) -> Report:
        monkeypatch.setitem(SIZES, "quick", size)
        return run_check("quick", model, sections=("logits",), load_format="dummy", **settings)

    return run


def test_digest_depends_on_every_bit_of_its_row_only() -> None:
    logits = torch.randn(70, 300, generator=torch.Generator().manual_seed(0))
    digests = digest(logits)
    assert len(set(digests.tolist())) == 70
    assert torch.equal(digest(logits[5:6]), digests[5:6])
    for row, column, bit in ((0, 0, 0), (3, 299, 31), (69, 150, 23)):
        other = logits.clone()
        other.view(torch.int32)[row, column] ^= torch.tensor(1 << bit).int()
        assert (digest(other) != digests).nonzero().flatten().tolist() == [row]


@pytest.mark.slow
def test_a_clean_engine_passes_and_exercises_what_it_varies(check: Check) -> None:
    report = check()
    assert report.failed == 0, report.verdict
    assert "all equal to the plain run, bit for bit" in report.verdict
    assert report.cases == report.planned[LOGITS_CASES] and not report.interrupted
    hits = report.cases - 4 * (1 + 2 + 7) - sum(t.cases for t in report.tallies if "ch" in t.batch)
    assert hits == 4 * 7, "each of four engines, the MTP one included, ran seven prefix hits"
    assert all(
        report.exercised[name] > 0
        for name in ("cached tokens", "draft tokens", "accepted draft tokens")
    )


def test_engines_without_known_outputs_are_not_built(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the time was up after the first plain output, which one engine alone compares."""
    monkeypatch.setitem(SIZES, "quick", Size((1, 2), (0, 1), (), 0, 1, 300, 6))
    monkeypatch.setattr(Deadline, "share", lambda *rest: Deadline.after(0.0))
    report = Report("quick")
    settings = {"load_format": "dummy", "device": "cpu"}
    checked = CheckedModel(model, settings, report, lambda *rest: None)
    built = []
    build = logits.build

    def counted(*rest: Any) -> CheckEngine:
        built.append(rest)
        return build(*rest)

    monkeypatch.setattr(logits, "build", counted)
    run_logits(checked, Deadline.after(600.0))
    total = report.planned[LOGITS_CASES]
    assert (report.failed, report.cases) == (0, 1)
    assert report.not_exercised()[TIME_UP] == [f"{total - 1} of {total} outputs of logits"]
    assert len(built) == 2, "the plain engine, and the first of three"


@pytest.mark.default_cases("one rank")
@pytest.mark.parametrize("fits", [True, False], ids=["one rank", "too large for one rank"])
def test_plain_runs_have_one_rank(
    fits: bool, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exchange that changes values is found, unless the plain runs need it too."""
    gather = ThreadGroup.all_gather
    build = logits.build

    def inexact(group: ThreadGroup, local: Tensor) -> Tensor:
        gathered = gather(group, local)
        return gathered * 1.01 if gathered.is_floating_point() else gathered

    def build_where_it_fits(name: str, settings: dict[str, Any], *rest: Any) -> CheckEngine:
        if not fits and settings["tensor_parallel_size"] == 1:
            raise CapacityError("it needs another rank")
        return build(name, settings, *rest)

    monkeypatch.setattr(executor, "start_ranks", ThreadRanks)
    monkeypatch.setattr(ThreadGroup, "all_gather", inexact)
    monkeypatch.setattr(logits, "build", build_where_it_fits)
    report = check(Size((1, 2), (0,), (), 0, 1, 300, 4), tensor_parallel_size=2)
    reason = "one rank has not enough memory: it needs another rank"
    if fits:
        assert report.failed and reason not in report.not_exercised()
    else:
        assert not report.failed
        assert report.not_exercised()[reason] == ["plain run on one rank"]


def test_model_that_does_not_fit_is_built_once(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    def fail(name: str, settings: dict[str, Any], *rest: Any) -> CheckEngine:
        built.append(settings)
        raise CapacityError("it needs more memory")

    monkeypatch.setattr(logits, "build", fail)
    assert check().not_exercised()["it needs more memory"] == ["logits of other batches"]
    assert len(built) == 1


@pytest.mark.gpu
def test_the_bundled_model_in_every_graph_mode_on_a_gpu() -> None:
    report = run_check("quick", sections=("logits",), device="cuda")
    assert report.failed == 0, report.verdict
    assert {t.setup.graph for t in report.tallies} == set(GRAPH_MODES)


@pytest.mark.slow
def test_an_interruption_keeps_the_engines_that_were_done(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interruption comes when the second of two engines starts."""

    def progress(what: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    monkeypatch.setitem(SIZES, "quick", Size((1, 2), (0,), (), 0, 1, 300, 6))
    with pytest.raises(Interrupted) as ended:
        run_check("quick", model, progress, sections=("logits",), load_format="dummy")
    report = ended.value.report
    assert report.interrupted and report.to_json()["interrupted"] is True
    assert (report.failed, report.cases, report.planned[LOGITS_CASES]) == (
        0,
        1 + 2 + 7,
        2 * (1 + 2 + 7),
    )
    assert report.verdict.startswith("Stopped early: 10 of 20 logits cases were run. 10 case")
    assert report.seconds > 0 and {t.setup.drafting for t in report.tallies} == {"none"}


def test_row_dependent_bit_is_detected(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_last_logit_bit(monkeypatch)
    report = check(Size((1, 2), (0,), (), 0, 1, 300, 6))
    failures = [f for f in report.failures if f.setup.drafter == "none"]
    assert {f.batch for f in failures} == {"2 rows", "prefix hit"}
    assert {f.what for f in failures} == {"the bits of the logits differ"}
    assert report.to_json()["failed"] == len(report.failures)


def test_engine_exception_is_a_failure(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two engines raises in its second batch; the other engine still runs."""
    run_batch = logits._run_batch
    drafters: list[str] = []

    def broken(engine: CheckEngine, setup: Setup, batch: Batch, *rest: Any) -> None:
        drafters.append(setup.drafter)
        if drafters == [setup.drafter] * 2:
            raise torch.OutOfMemoryError("no memory")
        run_batch(engine, setup, batch, *rest)

    monkeypatch.setattr(logits, "_run_batch", broken)
    report = check(Size((1, 2), (0,), (), 0, 1, 300, 6))
    (failure,) = report.failures
    assert failure.what == "raised OutOfMemoryError: no memory"
    assert len(set(drafters)) == 2, "the other engine ran"
    assert report.cases == 1 + 1 + (1 + 2 + 7) and report.failed == 1


@pytest.mark.slow
def test_missing_event_is_a_failure(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OracleDrafter, "set_texts", lambda self, texts: None)
    monkeypatch.setattr("lockstep.check.matrix.logits._cache_prefixes", lambda engine, cases: None)
    report = check(Size((1,), (2,), (), 0, 1, 300, 6))
    failures = {(f.batch, f.what) for f in report.failures if f.setup.drafter == "oracle"}
    nothing = {"the run had no draft tokens", "the run had no accepted draft tokens"}
    assert failures >= {("1 row", what) for what in nothing}
    assert ("prefix hit", "the run had no cached tokens") in failures


def test_full_matrix_covers_all_settings() -> None:
    size = SIZES["full"]
    setups = list(engines(size, GRAPH_MODES, "mtp"))
    assert len(set(setups)) == len(setups)
    assert {s.k for s in setups if s.graph == "full" and s.drafter != "mtp"} == {*range(8), 15}
    assert {s.graph for s in setups} == set(GRAPH_MODES) and Setup(
        "mtp", 3, "logits", "full"
    ) in setups
    cases = make_cases(1000, size.long, size.max_tokens)
    assert len(cases) == 20 and len({a.prompt[:5] for a in cases}) == 20
    runs = [b for index in range(len(setups)) for b in batches(cases, size, index)]
    assert {b.chunk for b in runs} == set(CHUNKS)
    assert {len(b.cases) for b in runs if b.name.endswith(("row", "rows"))} == {1, 2, 7, 16, 64}
    assert {a.name for b in runs if b.name == "1 row" for a in b.cases} == {
        a.name for a in cases[:-1]
    }
    assert cases[-1] in {a for b in runs if b.chunk == 64 for a in b.cases}


def test_long_prompt_of_a_cpu_is_cut_into_chunks_by_every_quick_engine() -> None:
    """A chunk size that the prompt does not reach would leave its batch out."""
    size = SIZES["quick"]
    length = long_length(size, "cpu", 1 << 20)
    assert length < long_length(size, "cuda", 1 << 20)
    cases = make_cases(50, length, size.max_tokens)
    for index, _ in enumerate(engines(size, ("none",), "mtp")):
        (chunk,) = (b.chunk for b in batches(cases, size, index) if b.name.startswith("chunks"))
        assert chunk < length


def test_cases_are_deterministic() -> None:
    assert make_cases(500, 200, 5) == make_cases(500, 200, 5)


def test_settings_fit_all_rows() -> None:
    for size in SIZES.values():
        settings: dict[str, Any] = logits_setups.settings(
            Setup("oracle", 7, "cold", "full"), size, 500
        )
        assert settings["max_num_seqs"] == max(size.num_rows)
