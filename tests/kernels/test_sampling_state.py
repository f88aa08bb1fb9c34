"""A row's sampling parameters: one declaration, one row of words, columns that read it back."""

import copy
from dataclasses import asdict

import pytest
import torch

from lockstep.kernels.sampling import COLUMNS, WORDS, RowParameters, SamplingState

ASKED = RowParameters(
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


def test_a_row_is_one_upload_and_reads_back() -> None:
    found = state()
    found.scalars[1].copy_(ASKED.words())
    for row, expected in ((0, RowParameters()), (1, ASKED), (2, RowParameters())):
        for name, value in asdict(expected).items():
            column = getattr(found, name)
            assert column[row] == torch.tensor(value, dtype=column.dtype), name


def test_columns_are_views_that_do_not_overlap() -> None:
    """Every parameter has words of its own, a seed two that lie at an even place."""
    found = state()
    assert set(COLUMNS) == set(asdict(RowParameters())) and WORDS % 2 == 0
    for name in COLUMNS:
        before = found.scalars.clone()
        getattr(found, name)[2] = -1
        where = (found.scalars != before).nonzero()
        words = {"seed": 2}.get(name, 1)
        assert where.tolist() == [[2, COLUMNS[name] + i] for i in range(words)], name


def test_a_copy_is_its_own_and_other_names_are_errors() -> None:
    found = state()
    other = copy.deepcopy(found)
    other.seed[1] = 7
    assert found.seed[1] == 0 and other.scalars[1].any()
    with pytest.raises(AttributeError, match="no attribute 'top_q'"):
        found.top_q  # noqa: B018
    with pytest.raises(Exception, match="argument|range|format"):
        RowParameters(seed=2**63).words()
