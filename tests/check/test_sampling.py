"""Drawn tokens fit the exact distribution, and the tests of it can fail."""

from collections.abc import Callable, Container, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lockstep.kernels.sampling.reference as engines
from lockstep.check import sampling
from lockstep.check.exercised import OUTSIDE_THE_ENGINE
from lockstep.check.harness import CheckEngine, build, build_plain
from lockstep.check.plain import PlainRuns
from lockstep.check.report import Report
from lockstep.check.sampling import (
    Context,
    cases,
    chi_squared,
    classes,
    improbable,
    run_sampling,
    shares,
    wrong_distribution,
    wrong_pairs,
)
from lockstep.check.world import Kind
from lockstep.text.processor import Processor

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def plain(model: str) -> PlainRuns:
    return PlainRuns(build_plain(model, {"load_format": "dummy"}))


@pytest.fixture
def found(plain: PlainRuns, model: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., set[str]]:
    """The names of the tests that fail, at fewer draws than the quick size has. only: the cases
    that are run of those of a distribution, all by default."""

    def run(only: Container[str] | None = None) -> set[str]:
        report = Report("quick", "")
        every = cases

        def chosen(given: Context) -> dict[str, Any]:
            return {n: params for n, params in every(given).items() if only is None or n in only}

        monkeypatch.setattr(sampling, "cases", chosen)

        def build_kind(kind: Kind) -> CheckEngine:
            return build(model, {"load_format": "dummy", **kind.settings()}, kind.hooks())

        run_sampling(plain, build_kind, 48, report)
        assert report.cases == len(report.tallies)
        assert report.cases == 32 or only is not None
        return {f.batch for f in report.failures}

    return run


def test_a_sound_sampler_passes(found: Callable[..., set[str]]) -> None:
    assert found() == set()


def half_seeds(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    return UNIFORM(seed & 0xFFFFFFFF, positions, ids)


def one_position(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    return UNIFORM(seed, positions[:1].expand(len(positions)), ids)


def no_noise(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    return UNIFORM(seed, positions, ids) * 0.01 + 0.5


def stale_penalties(x: Tensor, first: int, drafts: Tensor, *given: Any) -> Tensor:
    return PENALISE(x, first, drafts * 0 - 1, *given)


def no_top_p(x: Tensor, min_p: float, top_k: int, top_p: float, vocab: int) -> Tensor:
    return FILTER(x, min_p, top_k, 1.0, vocab)


UNIFORM = engines.uniform
PENALISE = engines._penalise
FILTER = engines._filter


@pytest.mark.parametrize(
    ("name", "fault", "due"),
    [
        ("uniform", half_seeds, {"seeds"}),
        ("uniform", one_position, {"positions"}),
        ("uniform", no_noise, {"no parameter, alone", "no parameter, window", "min_p, window"}),
        ("_penalise", stale_penalties, {"presence_penalty, window", "all together, window"}),
        ("_filter", no_top_p, {"top_p, alone", "top_p, window"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_faults_are_seen(
    found: Callable[..., set[str]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fault: Any,
    due: set[str],
) -> None:
    monkeypatch.setattr(engines, name, fault)
    assert due <= found({test.partition(",")[0] for test in due})


def test_completions_that_share_a_seed_are_seen(
    found: Callable[..., set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Processor.requests

    def same(self: Processor, *given: Any, **more: Any) -> Any:
        made = requests(self, *given, **more)
        return [replace(request, seed=made[0].seed) for request in made]

    monkeypatch.setattr(Processor, "requests", same)
    assert "completions" in found(())


def context() -> Context:
    raw = torch.tensor(RNG.normal(size=40) * 2, dtype=torch.float32)
    return Context(raw, (1, 2, 3), (4, 4, 5), (6, 7, 8, 9, 10, 11, 12), frozenset({0}))


def test_every_parameter_that_shapes_a_distribution_has_a_case() -> None:
    every = cases(context())
    shaping = set(fields_of_the_sampler())
    for name in shaping:
        assert any(name.startswith(case) for case in every), name


def fields_of_the_sampler() -> Iterator[str]:
    """SamplingParams but for what ends an answer, or what is told of it; a grammar's masks are made
    beside the sampler, and bind it as allowed_token_ids do."""
    told = {"n", "seed", "max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output"}
    told |= {"ignore_eos", "logprobs", "prompt_logprobs", "detokenize", "skip_special_tokens"}
    told |= {"structured_outputs", *OUTSIDE_THE_ENGINE}
    params = next(iter(cases(context()).values()))
    return (f.name for f in fields(params) if f.name not in told)


def test_every_case_changes_the_distribution() -> None:
    given = context()
    every = cases(given)
    plain = shares(given, every["no parameter"], 2)
    for name, params in every.items():
        assert name == "no parameter" or not np.allclose(shares(given, params, 2), plain), name


def test_chi_squared_and_its_probability() -> None:
    assert improbable(18.307, 10) == pytest.approx(0.05, rel=1e-3)
    share = np.array([0.5, 0.3, 0.15, 0.04, 0.01])
    sound = RNG.choice(5, size=4000, p=share)
    counts = np.bincount(sound, minlength=5).astype(float)
    assert improbable(*chi_squared(counts, share * 4000)) > 1e-3
    assert improbable(*chi_squared(counts, share[::-1] * 4000)) < 1e-9
    statistic, freedom = chi_squared(np.array([30.0, 2.0, 1.0]), np.array([28.0, 3.0, 2.0]))
    assert freedom == 1, "rare outcomes are one bin"


def test_a_token_that_may_not_be_drawn_is_named() -> None:
    due = [np.array([0.5, 0.5, 0.0])]
    assert wrong_distribution(np.array([[0], [1], [2]]), due) is not None
    assert wrong_distribution(np.array([[0], [1], [0]]), due) is None


def test_pairs() -> None:
    share = np.full(32, 1 / 32)
    kinds = classes(share)
    assert np.bincount(kinds).tolist() == [8] * sampling.CLASSES
    left, right = (RNG.integers(0, 32, (500, 4)) for _ in range(2))
    assert wrong_pairs(left, right, share, "pairs") is None
    assert wrong_pairs(left, left, share, "pairs") is not None
