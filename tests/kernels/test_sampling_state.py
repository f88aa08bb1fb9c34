"""A row's sampling parameters: one declaration, one row of words, columns that read them back."""

import copy
from dataclasses import asdict

import pytest
import torch

from lockstep.kernels.sampling import COLUMNS, WORDS, RowParameters, SamplingState

PARAMETERS = RowParameters(
    seed=-(2**62) + 5,
    flags=63,
    top_k=50,
    min_position=2**31 - 1,
    temperature=0.7,
    top_p=0.95,
    min_p=0.05,
    repetition=1.3,
    presence=-0.5,
    frequency=2.0,
)


def state() -> SamplingState:
    return SamplingState.empty(3, 11, 4, (2, 3), "cpu")


def test_row_parameters_round_trip() -> None:
    actual = state()
    actual.scalars[1].copy_(PARAMETERS.words())
    for row, expected in ((0, RowParameters()), (1, PARAMETERS), (2, RowParameters())):
        for name, value in asdict(expected).items():
            column = getattr(actual, name)
            assert column[row] == torch.tensor(value, dtype=column.dtype), name


def test_parameter_columns_do_not_overlap() -> None:
    """Every parameter has its own words; a seed has two at an even index."""
    actual = state()
    assert set(COLUMNS) == set(asdict(RowParameters())) and WORDS % 2 == 0
    for name in COLUMNS:
        before = actual.scalars.clone()
        getattr(actual, name)[2] = -1
        where = (actual.scalars != before).nonzero()
        words = {"seed": 2}.get(name, 1)
        assert where.tolist() == [[2, COLUMNS[name] + i] for i in range(words)], name


def test_deepcopy_is_independent_and_unknown_names_raise() -> None:
    actual = state()
    other = copy.deepcopy(actual)
    other.seed[1] = 7
    assert actual.seed[1] == 0 and other.scalars[1].any()
    with pytest.raises(AttributeError, match="no attribute 'top_q'"):
        actual.top_q  # noqa: B018
    with pytest.raises(Exception, match="argument|range|format"):
        RowParameters(seed=2**63).words()
