"""StepShape: how many tokens may be pending before a step writes the state."""

import pytest

from lockstep.step import SINGLE_FLUSH, StepShape


@pytest.mark.parametrize(("most", "single"), [(1, 1), (2, 2), (8, SINGLE_FLUSH)])
def test_steps_of_one_token_write_sooner(most: int, single: int) -> None:
    assert StepShape.uniform(4, 1).flush(most) == single
    assert StepShape.uniform(4, 4).flush(most) == most
