"""Covering arrays: few combinations of a test's parameters that still contain every pair of values.

`@pytest.mark.covering` at a test keeps such combinations in the default run, and
`@pytest.mark.default_cases` those with these parts in their ids. `make test-slow` runs the others.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest


def covering(rows: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Return the indices, in order, of rows that contain what all rows contain.

    A row is a combination of values, one per parameter. With strength 1, the chosen rows contain
    every value of every parameter; with 2, every pair of values of two parameters. The choice is
    greedy and deterministic: most new combinations first. Among equals, strength 1 takes the least
    used values, so that values of the other parameters alternate, and 2 the first row.
    """
    assert len({len(row) for row in rows}) <= 1, "the rows have different numbers of parameters"
    parts = [set(combinations(enumerate(row), min(strength, len(row)))) for row in rows]
    missing = set().union(*parts)
    uses: Counter[tuple[int, Hashable]] = Counter()
    chosen: list[int] = []
    while missing:
        ranks = []
        for index, row in enumerate(rows):
            used = sum(uses[item] for item in enumerate(row)) if strength == 1 else 0
            ranks.append((-len(parts[index] & missing), used, index))
        *_, best = min(ranks)
        chosen.append(best)
        missing -= parts[best]
        uses.update(enumerate(rows[best]))
    return sorted(chosen)


def mark_uncovered(items: Iterable[pytest.Item]) -> None:
    """Mark `slow` what the marks `covering` and `default_cases` leave out of the default run.

    Items that are marked `gpu` or `slow` already are left alone. Raises UsageError if a name of
    `default_cases` is in no id of its test.
    """
    tests: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        if not (item.get_closest_marker("gpu") or item.get_closest_marker("slow")):
            tests[item.nodeid.partition("[")[0]].append(item)
    for members in tests.values():
        for name, choose in (("covering", _covered), ("default_cases", _named)):
            mark = members[0].get_closest_marker(name)
            for item in choose(members, *mark.args, **mark.kwargs) if mark else ():
                item.add_marker(pytest.mark.slow)


def _covered(items: list[Any], strength: int = 2) -> list[Any]:
    """Return the items of one test that its covering leaves out."""
    rows = [[_key(value) for value in item.callspec.params.values()] for item in items]
    chosen = set(covering(rows, strength))
    return [item for index, item in enumerate(items) if index not in chosen]


def _named(items: list[Any], *names: str) -> list[Any]:
    """Return the items of one test whose id contains none of these parts.

    If a single item was selected on the command line, it is kept.
    """
    ids = [f"-{item.callspec.id}-" for item in items]
    unknown = [name for name in names if not any(f"-{name}-" in one for one in ids)]
    if len(items) == 1:
        return []
    if unknown:
        test = items[0].nodeid.partition("[")[0]
        raise pytest.UsageError(f"{test}: default_cases names {unknown}, which no id contains")
    return [
        item
        for item, one in zip(items, ids, strict=True)
        if not any(f"-{name}-" in one for name in names)
    ]


def _key(value: Any) -> Hashable:
    """Return what identifies a value of a parameter: itself, or its id if it has no hash."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
