"""Parts of a check run in order, within their time and memory, or are left out with the reason."""

import gc
from typing import Any

import pytest

from lockstep.check import Shard, run_check
from lockstep.check.checked_model import CheckedModel
from lockstep.check.collector import Collector
from lockstep.check.deadline import TIME_UP
from lockstep.check.matrix.setups import Setup
from lockstep.check.report.report import Report
from lockstep.check.run import OTHER_SHARD
from lockstep.check.scenarios.examiner import Effort
from lockstep.errors import CapacityError, ConfigError
from lockstep.worker.local_ranks import LocalRanks
from lockstep.worker.rank_pool import RankProcess


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return settings for a check whose kernels and logits are not judged."""
    monkeypatch.setattr("lockstep.check.run.run_kernels", lambda *rest: None)
    monkeypatch.setattr("lockstep.check.run.run_logits", lambda *rest: None)
    return {"load_format": "dummy", "device": "cpu"}


def test_model_that_fits_once_is_left_out_of_comparisons(
    model: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.check.checked_model.free_memory", lambda: 1)
    report = run_check("quick", model, **settings)
    reasons = report.not_exercised()
    (reason,) = (reason for reason in reasons if reason.startswith("a second engine of the model"))
    assert reasons[reason] == [
        *("tests of distributions", "random scenarios", "matrix of tokens", "matrix of cache")
    ]
    states = {section.name: section.state for section in report.sections}
    assert set(states.values()) == {"not run"}
    assert report.verdict.startswith("Nothing was compared. Not run: ")


def test_memory_of_an_engine_is_that_of_the_plain_one_alone(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with adapters next to the plain one does not make the next engine larger."""
    settings = {"load_format": "dummy", "device": "cpu"}
    checked = CheckedModel(model, settings, Report("quick"), lambda *rest: None)
    checked.device = "cuda"
    memory = 100 << 30
    allocated = 40 << 30
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: allocated)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: allocated)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (memory - allocated, memory))
    assert checked.why_no_second_engine() is None
    allocated = 55 << 30
    assert checked.why_no_second_engine() is None
    allocated = 70 << 30
    assert checked.why_no_second_engine() == (
        "a second engine of the model needs 40.0 GiB, and 30.0 GiB of GPU memory are free"
    )


def test_model_that_does_not_fit_is_left_out(
    model: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*rest: Any) -> None:
        raise CapacityError("the weights need 9 GiB")

    monkeypatch.setattr("lockstep.check.checked_model.build_plain", refuse)
    report = run_check("quick", model, sections=("sampling", "cache"), **settings)
    parts = report.not_exercised()["the weights need 9 GiB"]
    assert parts == ["tests of distributions", "matrix of cache"]


@pytest.mark.slow
def test_engines_of_a_check_share_the_processes_of_their_ranks(
    model: str, settings: dict[str, Any], small_check: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    start = LocalRanks._start_process

    def counted(ranks: LocalRanks, *rest: Any) -> RankProcess:
        started.append(start(ranks, *rest))
        return started[-1]

    monkeypatch.setattr(LocalRanks, "_start_process", counted)
    effort = Effort(scenarios=2)
    report = run_check(
        "quick",
        model,
        effort=effort,
        sections=("tokens", "cache"),
        tensor_parallel_size=2,
        **settings,
    )
    assert report.cases and not report.failed, report.verdict
    assert len({tally.setup for tally in report.tallies}) > 2
    (rank,) = started
    assert not rank.process.is_alive(), "it ends with the check"


def test_no_time_leaves_everything_out(model: str, settings: dict[str, Any]) -> None:
    report = run_check("quick", model, seconds=0.0, **settings)
    assert report.cases == 0 and len(report.not_exercised()[TIME_UP]) == 7
    assert report.not_exercised()[TIME_UP][-1] == "random scenarios", "it takes the time left"


def test_only_the_first_shard_has_undivided_sections(model: str, settings: dict[str, Any]) -> None:
    effort = Effort(1, shard=Shard(2, 3))
    report = run_check("quick", model, effort=effort, sections=("kernels", "sampling"), **settings)
    assert report.not_exercised()[OTHER_SHARD] == ["kernels", "tests of distributions"]


def test_section_without_engines_in_the_shard_is_left_out(
    model: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup("none", 0, "cold", "none")
    monkeypatch.setattr("lockstep.check.matrix.tokens.setups", lambda *rest: [setup])
    report = run_check("quick", model, seconds=0.0, sections=("cache", "capture"), **settings)
    reasons = report.not_exercised()
    assert reasons["this shard has none"] == ["matrix of cache"]
    assert reasons["no GPU"] == ["captured CUDA graphs"]


def test_unknown_size_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="size='huge'.*quick, default, full"):
        run_check("huge", model)


def test_auto_drafting_is_that_of_a_server(model: str) -> None:
    """Kernels are those of the checkpoint's own drafter; engines of the check choose theirs."""
    settings = {"load_format": "dummy", "speculative_config": "auto", "max_num_seqs": 5}
    checked = CheckedModel(model, settings, Report("quick"), lambda *rest: None)
    assert checked.config.speculative_config is not None
    assert checked.config.speculative_config.method == "mtp"
    assert checked.settings == {"load_format": "dummy", "speculative_config": None}
    assert (checked.rows, checked.drafting, checked.graphs[-1]) == (5, None, "none")


def test_survivors_of_collections_are_frozen_until_the_end() -> None:
    gc.unfreeze()
    try:
        collector = Collector()
        with collector.freezing():
            frozen = gc.get_freeze_count()
            survivors = [[] for _ in range(1000)]
            collector.collect()
            assert gc.get_freeze_count() >= frozen + len(survivors)
        assert not gc.get_freeze_count()
    finally:
        gc.freeze()


def test_objects_that_the_caller_froze_stay_frozen() -> None:
    gc.freeze()
    try:
        with Collector().freezing():
            pass
        # Some may be freed meanwhile; unfreeze() would leave none.
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
