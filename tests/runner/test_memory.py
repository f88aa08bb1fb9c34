"""What a GPU's memory is given to: slots of rows, one whole request, snapshots, more pages."""

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.runner.memory import CacheBytes, measured_size

COST = CacheBytes(page=1000, slot=20000)
LIMITS: Any = SimpleNamespace(max_num_seqs=1, row_columns=100)
REQUEST = 101 * COST.page + 2 * COST.slot
"""Pages of a request of the whole length with the null page, the null slot and a row's."""


def config(**settings: Any) -> Any:
    """The settings that are read."""
    return SimpleNamespace(
        num_snapshots=None, enable_prefix_caching=True, max_num_seqs=1, **settings
    )


@pytest.mark.parametrize(
    ("spare", "slots"), [(0, 2), (19_999, 2), (20_000, 3), (200_000, 4)], ids=str
)
def test_snapshots_that_nobody_asked_for_leave_a_whole_request(spare: int, slots: int) -> None:
    size = measured_size(config(), LIMITS, COST, REQUEST + spare)
    assert size.slots == slots
    assert size.pages >= 101


def test_snapshots_that_are_asked_for_are_given() -> None:
    asked = config()
    asked.num_snapshots = 2
    size = measured_size(asked, LIMITS, COST, REQUEST)
    assert size.slots == 4
    assert size.pages == 61
