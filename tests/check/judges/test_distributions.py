"""Sampled tokens fit the exact distribution, and faults of the sampler fail the tests."""

from collections.abc import Callable, Container, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lockstep.kernels.sampling.contract as contract
import lockstep.kernels.sampling.reference as reference
from lockstep.check.engines import CheckEngine, build, build_plain
from lockstep.check.judges import distributions
from lockstep.check.judges.distributions import (
    SamplingContext,
    chi_squared,
    p_value,
    parameter_cases,
    run_sampling,
    token_classes,
    token_probabilities,
    wrong_distribution,
    wrong_pairs,
)
from lockstep.check.judges.plain_runs import PlainRuns
from lockstep.check.report.coverage import OUTSIDE_THE_ENGINE
from lockstep.check.report.report import Report
from lockstep.check.scenarios.scenario import Kind
from lockstep.text.processor import Processor

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def plain(model: str) -> PlainRuns:
    return PlainRuns(build_plain(model, {"load_format": "dummy"}))


@pytest.fixture
def failed_tests(
    plain: PlainRuns, model: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., set[str]]:
    """Return a function that returns the names of failed tests.

    It takes fewer samples than the quick size. case_names: cases to run, None for all.
    """

    def run(case_names: Container[str] | None = None) -> set[str]:
        report = Report("quick", "")
        all_cases = parameter_cases

        def selected_cases(context: SamplingContext) -> dict[str, Any]:
            return {
                name: params
                for name, params in all_cases(context).items()
                if case_names is None or name in case_names
            }

        monkeypatch.setattr(distributions, "parameter_cases", selected_cases)

        def build_kind(kind: Kind) -> CheckEngine:
            # The faults are in the reference: where Numba runs, it is not the default.
            settings = {"load_format": "dummy", "kernels": {"sample": "reference"}}
            return build(model, {**settings, **kind.settings()}, kind.hooks())

        run_sampling(plain, build_kind, 48, report)
        assert report.cases == len(report.tallies)
        assert report.cases == 40 or case_names is not None
        return {f.batch for f in report.failures}

    return run


def test_a_sound_sampler_passes(failed_tests: Callable[..., set[str]]) -> None:
    assert failed_tests() == set()


@pytest.mark.parametrize("logit", [float("nan"), float("inf")])
def test_logits_that_no_distribution_has_are_a_failure(
    plain: PlainRuns, monkeypatch: pytest.MonkeyPatch, logit: float
) -> None:
    context = distributions.find_context(plain)
    raw_logits = context.raw_logits.clone()
    raw_logits[7] = logit
    broken = replace(context, raw_logits=raw_logits)
    monkeypatch.setattr(distributions, "find_context", lambda _: broken)
    report = Report("quick", "")
    run_sampling(plain, lambda kind: pytest.fail("no engine is needed"), 48, report)
    assert [failure.what for failure in report.failures] == [f"the logit of token 7 is {logit}"]


def half_seeds(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    return UNIFORM(seed & 0xFFFFFFFF, positions, ids)


def one_position(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    return UNIFORM(seed, positions[:1].expand(len(positions)), ids)


def no_noise(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    return UNIFORM(seed, positions, ids) * 0.01 + 0.5


def stale_penalties(x: Tensor, first: int, drafts: Tensor, *rest: Any) -> Tensor:
    return PENALISE(x, first, drafts * 0 - 1, *rest)


def no_top_p(x: Tensor, min_p: float, top_k: int, top_p: float, *rest: Any) -> Tensor:
    return FILTER(x, min_p, top_k, 1.0, *rest)


def warm_only(x: Tensor, part: slice, *rest: Any) -> Tensor:
    state = rest[4]
    state.temperature.clamp_(min=0.01)
    return PROCESS(x, part, *rest)


def k_of_top_k(x: Tensor, min_p: float, top_k: int, *rest: Any) -> Tensor:
    if 0 < top_k < x.shape[-1]:
        top = x.topk(top_k)
        x = torch.full_like(x, -torch.inf).scatter_(-1, top.indices, top.values)
    return FILTER(x, min_p, 0, *rest)


def last_of_ties(scores: Tensor) -> tuple[Tensor, Tensor]:
    index = scores.shape[-1] - 1 - scores.flip(-1).argmax(-1, keepdim=True)
    return index[..., 0], scores.gather(-1, index)[..., 0]


UNIFORM = reference.uniform
PROCESS = reference._process
PENALISE = reference._penalise
FILTER = reference._filter


@pytest.mark.default_cases("stale_penalties")
@pytest.mark.parametrize(
    ("name", "fault", "expected"),
    [
        ("uniform", half_seeds, {"seeds"}),
        ("uniform", one_position, {"positions"}),
        ("uniform", no_noise, {"no parameter, alone", "no parameter, window", "min_p, window"}),
        ("_penalise", stale_penalties, {"presence_penalty, window", "all together, window"}),
        ("_filter", no_top_p, {"top_p, alone", "top_p, window"}),
        ("_filter", k_of_top_k, {"ties, top_k, alone", "ties, top_k, window"}),
        ("find_best", last_of_ties, {"ties, greedy, alone", "ties, greedy, window"}),
        ("_process", warm_only, {"low temperature, alone", "low temperature, window"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_sampler_faults_are_detected(
    failed_tests: Callable[..., set[str]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fault: Any,
    expected: set[str],
) -> None:
    if name in ("uniform", "find_best"):
        functions = replace(reference.REFERENCE_FUNCTIONS, **{name: fault})
        monkeypatch.setattr(contract, "REFERENCE_FUNCTIONS", functions)
    else:
        monkeypatch.setattr(reference, name, fault)
    assert expected <= failed_tests({test.partition(",")[0] for test in expected})


def test_shared_seed_is_detected(
    failed_tests: Callable[..., set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Processor.requests

    def requests_with_one_seed(self: Processor, *args: Any, **options: Any) -> Any:
        created = requests(self, *args, **options)
        return [replace(request, seed=created[0].seed) for request in created]

    monkeypatch.setattr(Processor, "requests", requests_with_one_seed)
    assert "completions" in failed_tests(())


def context() -> SamplingContext:
    raw_logits = torch.tensor(RNG.normal(size=40) * 2, dtype=torch.float32)
    return SamplingContext(
        raw_logits, (1, 2, 3), (4, 4, 5), (6, 7, 8, 9, 10, 11, 12), frozenset({0})
    )


def test_every_parameter_that_shapes_a_distribution_has_a_case() -> None:
    all_cases = parameter_cases(context())
    shaping = set(fields_of_the_sampler())
    for name in shaping:
        assert any(name.startswith(case) for case in all_cases), name


def fields_of_the_sampler() -> Iterator[str]:
    """Return the fields of SamplingParams that change the distribution of the next token.

    A grammar is not among them: its masks act like allowed_token_ids.
    """
    not_sampling = {
        "n",
        "seed",
        "max_tokens",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
    }
    not_sampling |= {
        "ignore_eos",
        "logprobs",
        "prompt_logprobs",
        "detokenize",
        "skip_special_tokens",
    }
    not_sampling |= {"structured_outputs", "forced_token_ids", "prediction", *OUTSIDE_THE_ENGINE}
    params = next(iter(parameter_cases(context()).values()))
    return (field.name for field in fields(params) if field.name not in not_sampling)


def test_every_case_changes_the_distribution() -> None:
    sampling_context = context()
    all_cases = parameter_cases(sampling_context)
    unchanged = token_probabilities(sampling_context, all_cases["no parameter"], 2)
    for name, params in all_cases.items():
        assert name == "no parameter" or not np.allclose(
            token_probabilities(sampling_context, params, 2), unchanged
        ), name


def test_chi_squared_and_its_probability() -> None:
    assert p_value(18.307, 10) == pytest.approx(0.05, rel=1e-3)
    probabilities = np.array([0.5, 0.3, 0.15, 0.04, 0.01])
    sampled = RNG.choice(5, size=4000, p=probabilities)
    counts = np.bincount(sampled, minlength=5).astype(float)
    assert p_value(*chi_squared(counts, probabilities * 4000)) > 1e-3
    assert p_value(*chi_squared(counts, probabilities[::-1] * 4000)) < 1e-9
    statistic, degrees = chi_squared(np.array([30.0, 2.0, 1.0]), np.array([28.0, 3.0, 2.0]))
    assert degrees == 1, "rare outcomes are one bin"


def test_impossible_token_is_named() -> None:
    expected = [np.array([0.5, 0.5, 0.0])]
    assert wrong_distribution(np.array([[0], [1], [2]]), expected) is not None
    assert wrong_distribution(np.array([[0], [1], [0]]), expected) is None


def test_wrong_pairs_detects_dependence() -> None:
    probabilities = np.full(32, 1 / 32)
    class_of_token = token_classes(probabilities)
    assert np.bincount(class_of_token).tolist() == [8] * distributions.NUM_CLASSES
    first, second = (RNG.integers(0, 32, (500, 4)) for _ in range(2))
    assert wrong_pairs(first, second, probabilities, "pairs") is None
    assert wrong_pairs(first, first, probabilities, "pairs") is not None
