"""Backends of the drafters' ops equal the reference and ignore null rows."""

import pytest
import torch

from lockstep.kernels.drafting import (
    block_step,
    mtp_inputs,
    next_draft_step,
    ngram_lookup,
    prediction_lookup,
)
from lockstep.kernels.step_metadata.cases import PAGE_SIZE, RandomSource, random_table
from tests.kernels.backends import backends, of_every_op
from tests.kernels.integers import assert_equals_the_reference

BACKENDS = backends()
OPS = (mtp_inputs, next_draft_step, block_step, ngram_lookup, prediction_lookup)


@pytest.mark.parametrize(("op", "backend"), of_every_op(OPS, reference=False))
def test_drafting_equals_reference(op, backend, monkeypatch):
    assert_equals_the_reference(op, backend, monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_null_rows_do_not_change_drafts(backend):
    """Null rows write only row 0, which is never read."""
    table = random_table(RandomSource(2), 4, 3, 60, 50)
    rows = torch.tensor([3, 1, 0, 0, 0])
    arguments = dict(
        computed=table.computed, folded=table.folded, drafts=table.drafts, row_ids=rows
    )
    arguments |= dict(tokens=torch.tensor([5, 6, 7, 7, 7]), page_table=table.page_table[rows])
    arguments = backend.fresh(arguments)
    backend.run(next_draft_step, arguments | dict(index=1, shift=0, page_size=PAGE_SIZE))
    expected = table.drafts.clone()
    expected[3, 1] = 5
    expected[1, 1] = 6
    expected[0, 1] = 7
    assert torch.equal(arguments["drafts"].cpu(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_ngram_lookup_fills_only_requested_columns(backend, count):
    """The lookup fills the first columns of wider rows, and nothing else."""
    table = backend.place(random_table(RandomSource(3), 4, 5, 60, 2))
    rows = torch.tensor([4, 2, 0], device=backend.device)
    before = table.drafts.clone()
    arguments = dict(history=table.tokens, computed=table.computed, row_ids=rows, min_n=1, max_n=3)
    arguments |= dict(texts=rows[:0], oldest=rows[2:])
    backend.run(ngram_lookup, arguments | dict(drafts=table.drafts[:, :count]))
    assert torch.equal(table.drafts[:, count:], before[:, count:])
    assert torch.equal(table.drafts[[1, 3]], before[[1, 3]])
    full = torch.full_like(before, 7)
    backend.run(ngram_lookup, arguments | dict(drafts=full))
    assert torch.equal(table.drafts[rows, :count], full[rows, :count])
