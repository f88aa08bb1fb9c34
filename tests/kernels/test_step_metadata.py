"""A step's metadata: every backend equals the reference in every element, independent of batch
mates.

Rows run alone, in other orders and with null rows, in buffers full of garbage. The reference itself
is compared with plain Python here and by the walk in tests/worker.
"""

from typing import Any

import pytest
import torch

from lockstep.kernels.step_metadata import advance_rows, prepare_step
from lockstep.kernels.step_metadata.cases import PAGE_SIZE, RandomSource, advance, random_table
from tests.kernels.backends import backends, of_every_op
from tests.kernels.integers import assert_equals_the_reference

BACKENDS = backends()


@pytest.mark.parametrize(
    ("op", "backend"), of_every_op((prepare_step, advance_rows), reference=False)
)
def test_metadata_equals_reference(op, backend, monkeypatch):
    assert_equals_the_reference(op, backend, monkeypatch)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 2, 5, 8])
@pytest.mark.parametrize("grid", [1, 16])
@pytest.mark.parametrize("forced", [False, True])
def test_advance_rows_equals_plain_python(backend, width, grid, forced):
    """60 random rows, alone and together, with drafts that repeat a token, flushes, ended prompts,
    forced tokens, and positions without a target token."""
    seen = set()
    for seed in range(6):
        options = dict(vocab=3, seed=seed, state_grid=grid, forced=forced)
        batch = advance(10, width, 120, prompt=False, **options)
        before = {name: x.clone() for name, x in vars(batch["table"]).items()}
        expected = [advance_in_python(batch, before, s) for s in range(10)]
        for picks in [list(range(10)), [3], [9, 0, 4, 4 + 5]]:
            some = backend.fresh(batch)
            rows = torch.tensor(picks, device=backend.device)
            for name in ("row_ids", "tokens", "drafts", "seq_lens"):
                some[name] = some[name][rows].contiguous()
            emitted, accepted, results = backend.run(advance_rows, some)
            table = some["table"]
            for i, s in enumerate(picks):
                want = expected[s]
                row = int(batch["row_ids"][s])
                assert emitted[i].tolist() == want["results"][:width]
                assert int(accepted[i]) == want["accepted"]
                assert results[i].tolist() == want["results"]
                assert int(table.computed[row]) == want["computed"]
                assert int(table.folded[row]) == want["folded"]
                assert table.tokens[row].tolist() == want["tokens"]
                assert (table.drafts[row] == -1).all()
                assert some["counts"][row].tolist() == want["counts"]
                seen.add(want["accepted"])
            rest = sorted(set(range(13)) - {int(batch["row_ids"][s]) for s in picks} - {0})
            assert torch.equal(some["counts"][rest].cpu(), batch["counts"][rest])
            for name in ("tokens", "computed", "folded", "drafts"):
                assert torch.equal(getattr(table, name)[rest].cpu(), before[name][rest])
    assert forced or seen == set(range(width))


def advance_in_python(
    batch: dict[str, Any], before: dict[str, torch.Tensor], s: int
) -> dict[str, Any]:
    """Return the expected state of row s after the step."""
    row = int(batch["row_ids"][s])
    tokens = batch["tokens"][s].tolist()
    drafts = batch["drafts"][s].tolist()
    start = int(before["computed"][row])
    history = before["tokens"][row].tolist()
    forced = history[start + 1 : int(before["forced_end"][row])][: len(tokens)]
    targets = tokens
    tokens = [*forced, *tokens[len(forced) :]]
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == tokens[accepted] >= 0:
        accepted += 1
    differing = [i for i in range(len(forced)) if i <= accepted and forced[i] != targets[i]]
    mismatch = [differing[0], targets[differing[0]]] if differing else [-1, targets[-1]]
    counts = batch["counts"][row].tolist()
    emits = row > 0 and int(batch["seq_lens"][s]) >= int(before["prompt_len"][row])
    if emits:
        history[start + 1 : start + 1 + len(tokens)] = [max(token, 0) for token in tokens]
        for token in tokens[: accepted + 1]:
            if token >= 0:
                counts[token] += 1
    folded = int(before["folded"][row])
    ends = [n for n in range(folded + 1, start + 1) if n % batch["state_grid"] == 0]
    if batch["forced"]:
        computed = start + accepted + 1
        folded = max(folded, computed // batch["state_grid"] * batch["state_grid"])
    elif ends and start - folded >= batch["flush"]:
        folded = ends[-1]
    return dict(
        accepted=accepted,
        results=[*tokens, accepted, sum(draft >= 0 for draft in drafts), *mismatch],
        computed=start + accepted + 1 if row else 0,
        folded=folded if row else 0,
        tokens=history,
        counts=counts,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prompt", [False, True])
def test_prepared_row_is_batch_independent(backend, prompt):
    """Batch mates, their order and null rows determine only the indices of a row's tokens, never
    their values."""
    source = RandomSource(5)
    drafts = 3
    table = random_table(source, 9, drafts, 90, 50)
    chunks = source.ints(1, 30, 9)

    def prepared(rows: list[int]) -> Any:
        lengths = torch.tensor([int(chunks[r - 1]) if r else 2 for r in rows], dtype=torch.int32)
        sizes = dict(tokens=len(rows) * (drafts + 1), query_len=drafts + 1)
        if prompt:
            sizes = dict(tokens=int(lengths.sum()), query_len=int(lengths.max()))
        some = dict(table=table, row_ids=torch.tensor(rows), state_src=torch.tensor(rows).int() % 3)
        some |= dict(query_lens=lengths if prompt else None, page_size=PAGE_SIZE, **sizes)
        return backend.run(prepare_step, backend.fresh(some))

    rows = [4, 1, 9, 2, 7, 0, 0]
    full = prepared(rows)
    bounds = full.cu_seqlens.tolist()
    for s, row in enumerate(rows):
        alone = prepared([row])
        for name in ("token_ids", "positions", "slot_mapping"):
            mine = getattr(full, name)[bounds[s] : bounds[s + 1]]
            assert torch.equal(mine, getattr(alone, name)), name
        for name in (
            "starts",
            "committed",
            "seq_lens",
            "page_table",
            "drafts",
            "sample_at",
            "state_src",
        ):
            assert torch.equal(getattr(full, name)[s], getattr(alone, name)[0]), name
