"""Parameters of which the default run takes some, and `make test-slow` all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some_slow(values: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """Return values as parameters. Those that are not in `default` are marked slow.

    A tuple has the values of several parameters.
    """
    values = list(values)
    assert all(value in values for value in default), "a default value is not among the values"
    slow = pytest.mark.slow
    return [
        v if v in default else pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=slow)
        for v in values
    ]
