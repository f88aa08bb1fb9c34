"""lockstep bench drafters: available drafters, acceptance by position, equality of tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from lockstep.bench import drafters
from lockstep.bench.drafters import (
    CountedDraftLength,
    DrafterLine,
    compare_drafters,
    draw,
    plot,
)
from lockstep.cli import app
from lockstep.errors import ConfigError
from lockstep.sampling_params import SamplingParams
from tests.tiny_model import LLAMA, QWEN3, make_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
ONCE = ("--output-len", "12", "--num-iters", "1", "--load-format", "dummy", "--json")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = make_model(tmp_path_factory.mktemp("target") / "model", LLAMA)
    return str(folder)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = make_model(tmp_path_factory.mktemp("draft") / "model", QWEN3)
    return str(folder)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ("bench", "drafters", *arguments), catch_exceptions=False)


def test_acceptance_is_counted_by_position() -> None:
    policy = CountedDraftLength(3)
    policy.observe(2, 3, 3, [3, 0], 1.0)
    policy.observe(2, 3, 3, [1, 2], 1.0)
    policy.observe(2, 3, 0, [0, 0], 1.0)
    assert policy.shares == [0.75, 0.5, 0.25]
    assert policy.choose(2) == 3


def test_figures_are_relative_to_the_run_without_drafts(target: str) -> None:
    config = {"method": "draft_model", "model": target, "num_speculative_tokens": 3}
    settings = {"model": target, "load_format": "dummy"}
    undrafted, drafted = compare_drafters(settings, [config], 2, GREEDY, 1)
    assert undrafted.name == "none"
    assert undrafted.accepted_at == []
    assert undrafted.speedup == 1.0
    assert drafted.agrees
    assert len(drafted.accepted_at) == 3
    assert drafted.accepted_at == sorted(drafted.accepted_at, reverse=True)
    assert drafted.acceptance_length >= 1
    assert drafted.extra_ms == pytest.approx(drafted.ms_per_step - undrafted.ms_per_step)


@pytest.mark.slow
def test_available_and_requested_drafters_are_compared(
    target: str, draft: str, tmp_path: Path
) -> None:
    image = tmp_path / "plot.png"
    requested = json.dumps({"model": draft, "num_speculative_tokens": 2})
    result_of_command = run(target, "--drafter", requested, "--num-speculative-tokens", "15",
                "--plot", str(image), *ONCE)  # fmt: skip
    assert result_of_command.exit_code == 0
    result: dict[str, Any] = json.loads(result_of_command.stdout)
    assert result["bench"] == "drafters"
    lines = {line["name"]: line for line in result["lines"]}
    assert list(lines) == ["none", "ngram", "suffix", "draft_model"]
    assert all(line["agrees"] for line in lines.values())
    assert [len(line["accepted_at"]) for line in lines.values()] == [0, 15, 15, 2]
    assert image.read_bytes().startswith(b"\x89PNG")


def test_invalid_drafter_is_refused_before_loading(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Exception, match="num_speculative_tokens=16 is not allowed"):
        run(target, "--num-speculative-tokens", "16", *ONCE)
    with pytest.raises(Exception, match="speculative_config='ngram' is not allowed"):
        run(target, "--drafter", "ngram", *ONCE)
    nowhere = json.dumps({"method": "eagle3", "model": "/nowhere"})
    with monkeypatch.context() as patched:
        patched.setattr(drafters, "compare_drafters", None)  # nothing is loaded before that
        with pytest.raises(
            ConfigError, match="speculative_config model='/nowhere' is neither an existing folder"
        ):
            run(target, "--drafter", nowhere, *ONCE)


def test_a_plot_shows_acceptance_cost_and_speed() -> None:
    undrafted = DrafterLine("none", 0, [], 1.0, 4.0, 0.0, 10.0, 1.0, True)
    other = DrafterLine("ngram", 2, [0.5, 0.25], 1.75, 5.0, 1.0, 14.0, 1.4, True)
    acceptance, costs, speeds = draw([undrafted, other], "title").axes
    (line,) = acceptance.lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2], [0.5, 0.25])
    assert list(acceptance.get_xticks()) == [1, 2]
    assert [bar.get_height() for bar in costs.patches] == [0.0, 1.0]
    assert [bar.get_height() for bar in speeds.patches] == [10.0, 14.0]


def test_a_plot_without_drafts_is_drawn(tmp_path: Path) -> None:
    line = DrafterLine("none", 0, [], 1.0, 1.0, 0.0, 10.0, 1.0, True)
    plot([line], tmp_path / "plot.png", "title")
    assert (tmp_path / "plot.png").stat().st_size > 1000
