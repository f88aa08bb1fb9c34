"""Covering arrays have every pair, or triple, of feature values that no exclusion names."""

import random
from itertools import combinations, product

import numpy as np
import pytest

from lockstep.check.companions import ATTENTION, MIXTURE, NUMERICS
from lockstep.check.judges.plain_runs import SERVED
from lockstep.check.matrix.setups import SIZES
from lockstep.check.scenarios import covering
from lockstep.check.scenarios.covering import CoveringPlan, count_tuples
from lockstep.check.scenarios.features import (
    EXCLUSIONS,
    FAILURE,
    FEATURES,
    Exclusion,
    Feature,
    FeatureTable,
    Level,
    feature_table,
)
from lockstep.check.scenarios.generator import met_values
from lockstep.check.scenarios.met_tuples import MetTuples

DRAFTERS = ("ngram", "suffix", "prediction", "mtp")
COSTLY = [("model", SERVED)]


def small_table() -> FeatureTable:
    """Return six features, two per level, with one exclusion across levels."""
    features = tuple(
        Feature(f"{level.value} {index}", level, tuple("abc"[: 2 + index]), "", index == 0)
        for level in Level
        for index in range(2)
    )
    excluded = Exclusion(("engine 0", ("a",)), ("request 1", ("c",)), "they do not fit")
    return FeatureTable(features, (excluded,))


def default_table() -> FeatureTable:
    """Return the features of the bundled model's check on a CPU."""
    models = (SERVED, ATTENTION, MIXTURE)
    return feature_table(models, NUMERICS, DRAFTERS, ("none",), True, True, True)


@pytest.mark.parametrize("strength", [2, 3])
def test_rows_have_every_tuple_that_is_not_excluded(strength: int) -> None:
    table = small_table()
    plan = CoveringPlan(table, strength, 0, 1, 2)
    rows = [
        dict(plan.values.names[n] for n in row)
        for index in range(plan.num_scenarios)
        for row in plan.scenario(index).rows()
    ]
    assert all(len(row) == len(table.features) for row in rows)
    had = {tuple(sorted(t)) for row in rows for t in combinations(row.items(), strength)}
    excluded = {("engine 0", "a"), ("request 1", "c")}
    assert not any(excluded <= set(t) for t in had)
    expected = set()
    for features in combinations(table.features, strength):
        for values in product(*(feature.values for feature in features)):
            pairs = {(f.name, v) for f, v in zip(features, values, strict=True)}
            if not excluded <= pairs:
                expected.add(tuple(sorted(pairs)))
    assert had == expected
    assert count_tuples(plan.feasible) == len(expected)


def test_same_seed_gives_the_same_rows() -> None:
    first, again, other = (CoveringPlan(default_table(), 2, seed, 1, 4) for seed in (3, 3, 4))
    rows = [[plan.scenario(index) for index in range(3)] for plan in (first, again, other)]
    assert rows[0] == rows[1] != rows[2]


@pytest.mark.slow
def test_default_check_plans_every_pair() -> None:
    size = SIZES["default"]
    plan = CoveringPlan(default_table(), size.strength, 0, 1, size.requests, COSTLY)
    assert plan.num_scenarios < 1.2 * size.scenarios
    assert plan.impossible == [], [[plan.values.names[n] for n in t] for t in plan.impossible]
    models = [dict(plan.values.names[n] for n in plan.scenario(i).engine)["model"]
              for i in range(plan.num_scenarios)]  # fmt: skip
    assert 0 < models.count(SERVED) < len(models) / 5


def test_quick_check_plans_every_value() -> None:
    size = SIZES["quick"]
    plan = CoveringPlan(default_table(), size.strength, 0, 1, size.requests, COSTLY)
    had = {n for i in range(size.scenarios) for row in plan.scenario(i).rows() for n in row}
    missing = [name for n, name in enumerate(plan.values.names) if n not in had]
    assert missing == []
    assert plan.num_for_values <= size.scenarios


@pytest.mark.parametrize("per_engine", [1, 2, 3])
def test_scenarios_of_a_model_alone_have_every_value(per_engine: int) -> None:
    """The model has more drafters than half of the scenarios would have engines."""
    table = feature_table((SERVED,), ("as served",), DRAFTERS, ("none",), True, True, True)
    plan = CoveringPlan(table, 2, 0, per_engine, SIZES["quick"].requests)
    total = plan.num_for_values
    assert total % per_engine == 0 and total >= per_engine * len(DRAFTERS)
    scenarios = [plan.scenario(index) for index in range(total)]
    values = {n for scenario in scenarios for row in scenario.rows() for n in row}
    assert values == set(range(len(plan.values.names)))


def test_a_model_alone_has_no_companions_and_fewer_values() -> None:
    graphs = ("full", "none")
    table = feature_table((SERVED,), ("as served",), ("ngram",), graphs, False, False, False)
    values = {feature.name: feature.values for feature in table.features}
    assert values["model"] == (SERVED,) and values["snapshots"] == ("no state",)
    assert values["prompt"] == ("ids",) and values["graph"] == ("full", "none")
    plan = CoveringPlan(table, 2, 0, 2, 5)
    assert plan.num_scenarios % 2 == 0 and plan.impossible == []


def test_engines_of_several_ranks_do_not_raise() -> None:
    """An engine that raised has ended, since its ranks are no longer in one state."""
    for has_one_rank, values in ((True, 4), (False, 1)):
        table = feature_table(
            (SERVED,), ("as served",), (), ("none",), True, True, True, has_one_rank=has_one_rank
        )
        (failure,) = (feature for feature in table.features if feature.name == FAILURE)
        assert len(failure.values) == values


def test_every_exclusion_names_features_and_values_that_exist() -> None:
    known = {feature.name: set(feature.values) for feature in FEATURES} | {"drafter": set(DRAFTERS)}
    for exclusion in EXCLUSIONS:
        assert exclusion.reason
        for name, values in (exclusion.first, exclusion.second):
            assert set(values) <= known[name] | {"none"}, (name, values)


def test_planned_tuples_that_do_not_occur_are_planned_again() -> None:
    plan = CoveringPlan(small_table(), 2, 0, 1, 2)
    met = MetTuples(plan)
    total = plan.num_scenarios
    for index in range(total):
        met.plan(plan.scenario(index).rows())
        for row in plan.scenario(index).rows():
            values = dict(plan.values.names[n] for n in row)
            if values["request 0"] == "a":
                # This value never occurs.
                del values["request 0"]
            met.add(values)
    lost = plan.values.number["request 0", "a"]
    assert met.unmet_values() == ["request 0: a"]
    assert set(np.argwhere(met.missed)[:, 0]) >= {lost} and met.num_met < met.num_feasible
    assert all("request 0 a" in line and "did not occur" in line for line in met.unmet())
    assert met.excluded() == {"they do not fit": 1}
    plan.plan_again(met.missed)
    again = plan.scenario(total)
    assert any(lost in row for row in again.rows())
    assert met.to_json()["of"] == met.num_feasible and f"{met.num_met:,} of" in met.summary()


def test_only_a_tuple_that_begins_an_engine_is_called_impossible() -> None:
    """Each pair of (limit x, a, b) is allowed alone, and the three are not allowed together."""
    features = (
        Feature("engine", Level.ENGINE, ("1",), ""),
        Feature("limit", Level.LIMITS, ("x", "y"), ""),
        Feature("first", Level.REQUEST, ("a", "b"), ""),
        Feature("second", Level.REQUEST, ("a", "b", "c"), ""),
    )
    exclusions = (
        Exclusion(("limit", ("x",)), ("second", ("b", "c")), "x needs a"),
        Exclusion(("first", ("b",)), ("second", ("a",)), "they do not fit"),
    )
    for seed in range(20):
        plan = CoveringPlan(FeatureTable(features, exclusions), 2, seed, 3, 1)
        total = plan.num_scenarios
        names = [{plan.values.names[n] for n in row} for row in plan.impossible]
        assert names == [{("limit", "x"), ("first", "b")}]
        rows = [row for i in range(total) for row in plan.scenario(i).rows()]
        had = {pair for row in rows for pair in combinations(row, 2)}
        assert count_tuples(plan.feasible) == len({tuple(sorted(pair)) for pair in had})
        assert total % 3 == 0


@pytest.mark.parametrize("strength", [2, 3])
def test_only_tuples_that_no_row_has_are_called_impossible(
    strength: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy choices fail often here: what is feasible is compared with all rows that exist."""
    monkeypatch.setattr(covering, "MAX_ATTEMPTS", 1)
    for seed in range(8):
        rng = random.Random(seed)
        features = tuple(
            Feature(str(index), level, ("a", "b", "c"), "")
            for index, level in enumerate((*Level, *Level))
        )
        values = [(feature.name, value) for feature in features for value in feature.values]
        excluded = {
            frozenset(pair)
            for pair in combinations(values, 2)
            if pair[0][0] != pair[1][0] and rng.random() < 0.25
        }
        exclusions = []
        for pair in sorted(map(sorted, excluded)):
            (first, one), (second, other) = pair
            exclusions.append(Exclusion((first, (one,)), (second, (other,)), "drawn"))
        plan = CoveringPlan(FeatureTable(features, tuple(exclusions)), strength, seed, 1, 2)
        rows = product(*([(f.name, value) for value in f.values] for f in features))
        possible = {
            frozenset(chosen)
            for row in rows
            if not any(frozenset(pair) in excluded for pair in combinations(row, 2))
            for chosen in combinations(row, strength)
        }
        total = plan.num_scenarios
        names = plan.values.names
        feasible = {frozenset(names[n] for n in t) for t in np.argwhere(plan.feasible).tolist()}
        assert feasible == possible
        planned = {
            frozenset(names[n] for n in chosen)
            for index in range(total)
            for row in plan.scenario(index).rows()
            for chosen in combinations(row, strength)
        }
        assert planned >= possible


def test_values_that_depend_on_the_run_need_an_event() -> None:
    values = {"prefix": "on device", "preempted": "never", "return": "later", "top_k": "40"}
    assert met_values(values, set()) == {"preempted": "never", "top_k": "40"}
    events = {("prefix", "on device"), ("return", "later")}
    assert met_values(values, events) == values
    assert met_values({"prefix": "new"}, {("prefix", "on device")}) == {}
