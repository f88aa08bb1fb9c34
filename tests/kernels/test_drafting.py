"""The drafters' ops: every backend equals the reference; null rows do not count."""

import pytest
import torch

from lockstep.kernels.drafting import block_step, mtp_inputs, next_draft_step, ngram_lookup
from lockstep.kernels.step_metadata.cases import PAGE_SIZE, RandomSource, random_table
from tests.kernels.backends import backends, of_every_op
from tests.kernels.integers import assert_equals_the_reference

BACKENDS = backends()
OPS = (mtp_inputs, next_draft_step, block_step, ngram_lookup)


@pytest.mark.parametrize(("op", "backend"), of_every_op(OPS, reference=False))
def test_equals_the_reference(op, backend, monkeypatch):
    assert_equals_the_reference(op, backend, monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_draws_every_row_to_the_same_drafts(backend):
    """Null rows write row 0 only, and what they write there is no one's."""
    table = random_table(RandomSource(2), 4, 3, 60, 50)
    rows = torch.tensor([3, 1, 0, 0, 0])
    some = dict(computed=table.computed, folded=table.folded, drafts=table.drafts, row_ids=rows)
    some |= dict(tokens=torch.tensor([5, 6, 7, 7, 7]), page_table=table.page_table[rows])
    some = backend.fresh(some)
    backend.run(next_draft_step, some | dict(index=1, shift=0, page_size=PAGE_SIZE))
    expected = table.drafts.clone()
    expected[3, 1] = 5
    expected[1, 1] = 6
    expected[0, 1] = 7
    assert torch.equal(some["drafts"].cpu(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_ngram_lookup_fills_the_columns_it_is_given(backend, count):
    """The first columns of wider rows: all of them, and nothing else."""
    table = backend.place(random_table(RandomSource(3), 4, 5, 60, 2))
    rows = torch.tensor([4, 2, 0], device=backend.device)
    before = table.drafts.clone()
    some = dict(history=table.tokens, computed=table.computed, row_ids=rows, min_n=1, max_n=3)
    some |= dict(texts=rows[:0], oldest=rows[2:])
    backend.run(ngram_lookup, some | dict(drafts=table.drafts[:, :count]))
    assert torch.equal(table.drafts[:, count:], before[:, count:])
    assert torch.equal(table.drafts[[1, 3]], before[[1, 3]])
    whole = torch.full_like(before, 7)
    backend.run(ngram_lookup, some | dict(drafts=whole))
    assert torch.equal(table.drafts[rows, :count], whole[rows, :count])
