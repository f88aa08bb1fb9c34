"""The table's ops: every backend equals the reference in every element; neighbours do not count.

Rows alone, in other orders and beside null rows, in buffers full of garbage; the reference itself
is held against plain Python here and by the walk in tests/runner.
"""

from typing import Any

import pytest
import torch

from lockstep.kernels.table import advance_rows, draft_step, follow, lookup, prepare_step
from lockstep.kernels.table.cases import PAGE_SIZE, Draw, advance, lines
from tests.kernels.faces import CASES, Face, changed, faces, tensors_of

FACES = faces()
OPS = (prepare_step, advance_rows, follow, draft_step, lookup)
ORACLE = Face("reference", "cpu", torch.float32)


def outcome(face: Face, op: Any, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """All that an op returns and writes; memory that it takes is full of garbage before."""
    arguments = face.fresh(arguments)
    found = tensors_of(face.run(op, arguments)) + changed(arguments)
    return [x.cpu() for x in found]


@pytest.mark.parametrize("face", FACES[1:])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_equals_the_reference(op, face, monkeypatch):
    empty, new_empty = torch.empty_like, torch.Tensor.new_empty
    poisoned = [
        (torch, "empty_like", lambda x, **k: empty(x, **k).fill_(-77)),
        (torch.Tensor, "new_empty", lambda x, *s, **k: new_empty(x, *s, **k).fill_(-77)),
    ]
    for name, arguments in CASES[op](torch.float32):
        wanted = outcome(ORACLE, op, arguments)
        with monkeypatch.context() as patch:
            for owner, function, poison in poisoned:
                patch.setattr(owner, function, poison)
            found = outcome(face, op, arguments)
        for i, (want, have) in enumerate(zip(wanted, found, strict=True)):
            assert have.dtype == want.dtype and torch.equal(have, want), (name, i)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_rows_are_committed_as_in_plain_python(face, width):
    """60 random rows, alone and together, drafts that repeat a token, flushes, ended prompts,
    positions where the target has no token."""
    seen = set()
    for seed in range(6):
        batch = advance(10, width, 80, prompt=False, vocab=3, seed=seed)
        before = {name: x.clone() for name, x in vars(batch["lines"]).items()}
        expected = [plain(batch, before, s) for s in range(10)]
        for picks in [list(range(10)), [3], [9, 0, 4, 4 + 5]]:
            some = face.fresh(batch)
            rows = torch.tensor(picks, device=face.device)
            for name in ("row_ids", "tokens", "drafts", "seq_lens", "held"):
                some[name] = some[name][rows].contiguous()
            accepted, results = face.run(advance_rows, some)
            table = some["lines"]
            for i, s in enumerate(picks):
                want, row = expected[s], int(batch["row_ids"][s])
                assert int(accepted[i]) == want["accepted"]
                assert results[i].tolist() == want["results"]
                assert int(table.computed[row]) == want["computed"]
                assert int(table.pending[row]) == want["pending"]
                assert table.tokens[row].tolist() == want["tokens"]
                assert (table.drafts[row] == -1).all()
                assert some["counts"][row].tolist() == want["counts"]
                seen.add(want["accepted"])
            others = sorted(set(range(13)) - {int(batch["row_ids"][s]) for s in picks} - {0})
            assert torch.equal(some["counts"][others].cpu(), batch["counts"][others])
            for name in ("tokens", "computed", "pending", "drafts"):
                assert torch.equal(getattr(table, name)[others].cpu(), before[name][others])
    assert seen == set(range(width))


def plain(batch: dict[str, Any], before: dict[str, torch.Tensor], s: int) -> dict[str, Any]:
    """What becomes of row s of the step."""
    row, tokens = int(batch["row_ids"][s]), batch["tokens"][s].tolist()
    drafts, held = batch["drafts"][s].tolist(), int(batch["held"][s])
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == tokens[accepted] >= 0:
        accepted += 1
    start = int(before["computed"][row])
    history, counts = before["tokens"][row].tolist(), batch["counts"][row].tolist()
    emits = row > 0 and int(batch["seq_lens"][s]) >= int(before["prompt_len"][row])
    if emits:
        history[start + 1 : start + 1 + len(tokens)] = [max(token, 0) for token in tokens]
        for token in tokens[: accepted + 1]:
            if token >= 0:
                counts[token] += 1
    pending = (held if held < batch["flush"] else 0) + accepted + 1
    return dict(
        accepted=accepted,
        results=[*tokens, accepted, sum(draft >= 0 for draft in drafts)],
        computed=start + accepted + 1 if row else 0,
        pending=pending if row else 0,
        tokens=history,
        counts=counts,
    )


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("prompt", [False, True])
def test_a_row_is_prepared_as_it_is_alone(face, prompt):
    """Batch mates, their order and null rows decide where a row's tokens stand, never what."""
    draw, drafts = Draw(5), 3
    table = lines(draw, 9, drafts, 90, 50)
    chunks = draw.ints(1, 30, 9)

    def prepared(rows: list[int]) -> Any:
        lengths = torch.tensor([int(chunks[r - 1]) if r else 2 for r in rows], dtype=torch.int32)
        sizes = dict(tokens=len(rows) * (drafts + 1), query_len=drafts + 1)
        if prompt:
            sizes = dict(tokens=int(lengths.sum()), query_len=int(lengths.max()))
        some = dict(lines=table, row_ids=torch.tensor(rows), state_src=torch.tensor(rows).int() % 3)
        some |= dict(query_lens=lengths if prompt else None, page_size=PAGE_SIZE, **sizes)
        return face.run(prepare_step, face.fresh(some))

    rows = [4, 1, 9, 2, 7, 0, 0]
    whole = prepared(rows)
    bounds = whole.cu_seqlens.tolist()
    for s, row in enumerate(rows):
        alone = prepared([row])
        for name in ("token_ids", "positions", "slot_mapping"):
            mine = getattr(whole, name)[bounds[s] : bounds[s + 1]]
            assert torch.equal(mine, getattr(alone, name)), name
        for name in ("starts", "seq_lens", "page_table", "drafts", "sample_at", "state_src"):
            assert torch.equal(getattr(whole, name)[s], getattr(alone, name)[0]), name


@pytest.mark.parametrize("face", FACES)
def test_padding_draws_every_row_to_the_same_drafts(face):
    """Null rows write line 0 only, and what they write there is no one's."""
    table = lines(Draw(2), 4, 3, 60, 50)
    rows = torch.tensor([3, 1, 0, 0, 0])
    some = dict(computed=table.computed, drafts=table.drafts, row_ids=rows)
    some |= dict(tokens=torch.tensor([5, 6, 7, 7, 7]), page_table=table.page_table[rows])
    some = face.fresh(some)
    face.run(draft_step, some | dict(index=1, page_size=PAGE_SIZE))
    expected = table.drafts.clone()
    expected[3, 1], expected[1, 1], expected[0, 1] = 5, 6, 7
    assert torch.equal(some["drafts"].cpu(), expected)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_lookup_fills_the_columns_it_is_given(face, count):
    """The first columns of wider lines: all of them, and nothing else."""
    table = face.place(lines(Draw(3), 4, 5, 60, 2))
    rows, before = torch.tensor([4, 2, 0], device=face.device), table.drafts.clone()
    some = dict(history=table.tokens, computed=table.computed, row_ids=rows, least=1, most=3)
    face.run(lookup, some | dict(drafts=table.drafts[:, :count]))
    assert torch.equal(table.drafts[:, count:], before[:, count:])
    assert torch.equal(table.drafts[[1, 3]], before[[1, 3]])
    whole = torch.full_like(before, 7)
    face.run(lookup, some | dict(drafts=whole))
    assert torch.equal(table.drafts[rows, :count], whole[rows, :count])
