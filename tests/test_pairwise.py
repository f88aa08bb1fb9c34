"""covering() keeps every pair of values and is deterministic; what it leaves out is marked slow."""

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.pairwise import covering, mark_uncovered


def pairs(rows: Any) -> set[Any]:
    """Return every pair of values of two parameters in the rows."""
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


@pytest.mark.parametrize(
    ("sizes", "at_most"), [((2, 2, 2), 4), ((3, 3, 3, 3), 9), ((5, 4, 2, 2), 20), ((7, 3), 21)]
)
def test_every_pair_is_covered_by_few_rows(sizes: tuple[int, ...], at_most: int) -> None:
    rows = list(product(*map(range, sizes)))
    chosen = covering(rows)
    assert pairs(rows[i] for i in chosen) == pairs(rows)
    assert len(chosen) <= at_most
    assert chosen == covering(rows) == sorted(set(chosen))


def test_pairs_that_no_row_contains_are_not_needed() -> None:
    rows = [row for row in product(range(3), range(3), range(2)) if row[:2] != (1, 2)]
    chosen = covering(rows)
    assert pairs(rows[i] for i in chosen) == pairs(rows)


def test_strength_1_covers_values_and_alternates_the_others() -> None:
    rows = list(product("abcd", (True, False)))
    chosen = [rows[i] for i in covering(rows, strength=1)]
    assert chosen == [("a", True), ("b", False), ("c", True), ("d", False)]


@pytest.mark.parametrize("strength", [1, 2])
def test_one_parameter_or_none_keeps_every_row(strength: int) -> None:
    assert covering([(1,), (2,), (3,)], strength) == [0, 1, 2]
    assert covering([], strength) == []


class Item:
    """The part of a pytest item that mark_uncovered() uses."""

    def __init__(self, name: str, values: list[Any], *marks: pytest.Mark) -> None:
        self.nodeid = f"{name}[{values}]"
        parts = "-".join(map(str, values))
        self.callspec = SimpleNamespace(params=dict(enumerate(values)), id=parts)
        self.marks = {mark.name: mark for mark in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks[mark.name] = mark.mark


def test_items_outside_the_covering_are_marked_slow() -> None:
    """Items of other marks, and tests without the mark, are left alone."""
    first: list[int] = []
    second: list[int] = []
    covered = pytest.mark.covering(strength=1).mark
    gpu = pytest.mark.gpu.mark
    items: Any = [
        Item("a", [first, 1], gpu, covered),
        Item("a", [first, 1], covered),
        Item("a", [first, True], covered),
        Item("a", [second, 1], covered),
        Item("a", [second, True], covered),
        Item("b", [first, 1]),
        Item("c", [first, 1], covered),
    ]
    mark_uncovered(items)
    assert ["slow" in item.marks for item in items] == [False, False, True, True] + [False] * 3


def test_items_without_a_named_part_are_marked_slow() -> None:
    mark = pytest.mark.default_cases("a, b", "c").mark
    items: Any = [Item("a", [x, 1], mark) for x in ("a", "a, b", "c", "cc")]
    mark_uncovered(items)
    assert ["slow" in item.marks for item in items] == [True, False, False, True]
    alone: Any = Item("a", ["cc", 1], mark)
    mark_uncovered([alone])
    assert "slow" not in alone.marks, "named on the command line"
    with pytest.raises(pytest.UsageError, match="names .'c'., which no id contains"):
        mark_uncovered([Item("a", [x], mark) for x in ("a, b", "cc")])
