"""A committed window has the bits of its tokens one at a time: outputs, state and histories.

Windows are shorter and longer than the histories, end before, at and after multiples of the state's
grid, and have rows with fewer committed tokens, whose padding is NaN.
"""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lockstep.kernels import Op
from lockstep.kernels.gated_delta_rule import cases as gated_delta_cases
from lockstep.kernels.gated_delta_rule import gated_delta_step
from lockstep.kernels.mamba2 import cases as mamba2_cases
from lockstep.kernels.mamba2 import mamba2_step
from lockstep.kernels.recurrent.cases import (
    Dims,
    Raw,
    Weights,
    committed_inputs,
    empty_state,
    poison,
    random_state,
)
from lockstep.kernels.recurrent.history import folded_after, past_indices
from lockstep.kernels.recurrent.state import RecurrentState
from tests.kernels.backends import Backend, backends, same_bits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
STATES = (torch.float32, torch.bfloat16)
SMALL = Dims(1, 2, 16, 16)
REAL = Dims(2, 8, 128, 64, w=4)


@dataclass(frozen=True)
class RecurrentForm:
    """Op of the recurrent form, with the functions of its cases."""

    op: Op
    inputs: Raw
    weights: Weights

    def __str__(self) -> str:
        return self.op.name


FORMS = (
    RecurrentForm(gated_delta_step, gated_delta_cases.inputs, gated_delta_cases.weights),
    RecurrentForm(mamba2_step, mamba2_cases.inputs, mamba2_cases.weights),
)


@dataclass
class Rows:
    """Rows of a layer: state, slots [S], starts [S] and folded [S]."""

    state: RecurrentState
    slots: Tensor
    starts: Tensor
    folded: Tensor


def random_rows(dims: Dims, backend: Backend, starts: list[int], lacking: list[int]) -> Rows:
    """Return rows whose states lack these tokens; entries that nothing may read are NaN."""
    slots = torch.randperm(len(starts), generator=torch.Generator().manual_seed(3)) + 1
    state = random_state(dims, len(starts) + 1, slots.tolist(), backend.dtype, 4)
    for slot, start, count in zip(slots.tolist(), starts, lacking, strict=True):
        poison(state, slot, start, dims.r, count)
    first = torch.tensor(starts, dtype=torch.int32)
    folded = first - torch.tensor(lacking, dtype=torch.int32)
    return Rows(backend.place(state), slots, first, folded)


def step(
    form: RecurrentForm,
    backend: Backend,
    dims: Dims,
    rows: Rows,
    window: dict[str, Tensor],
    flush: int = 1,
) -> Tensor:
    """Step one window of all rows, and advance the rows by its committed tokens, else by all."""
    layer = backend.place(form.weights(dims, backend.dtype, 13))
    where = dict(slots=rows.slots, starts=rows.starts, folded=rows.folded, flush=flush)
    out: Tensor = backend.run(
        form.op, dict(**window, weights=layer, state=rows.state, **where)
    ).cpu()
    committed = window.get("committed")
    rows.folded = folded_after(rows.starts, rows.folded, flush, dims.grid, committed)
    rows.starts = rows.starts + (out.shape[1] if committed is None else committed)
    return out


def take(data: dict[str, Tensor], begins: Tensor, count: int) -> dict[str, Tensor]:
    """Return tokens begins[s] .. begins[s] + count - 1 of each row of data [S, T, ...]."""
    index = begins.long()[:, None] + torch.arange(count)
    return {name: x[torch.arange(len(x))[:, None], index] for name, x in data.items()}


def assert_same_rows(form: RecurrentForm, backend: Backend, dims: Dims, a: Rows, b: Rows) -> None:
    """Assert that both give the same bits for W further tokens, and then have the same states."""
    assert torch.equal(a.starts, b.starts)
    window = form.inputs(dims, (len(a.slots), dims.w), backend.dtype, 21)
    kept_a, kept_b = (kept_entries(dims, rows) for rows in (a, b))
    assert all(map(same_bits, kept_a, kept_b))
    assert same_bits(*(step(form, backend, dims, rows, window) for rows in (a, b)))
    assert torch.equal(a.folded, b.folded)
    assert same_bits(*(rows.state.recurrent[rows.slots] for rows in (a, b)))
    assert not a.state.recurrent[a.slots].isnan().any()


def kept_entries(dims: Dims, rows: Rows) -> list[Tensor]:
    """Return what later steps read: the last R raw inputs, and u, k and decay of tokens after the
    last point at which any step may write the state."""
    entries = []
    for slot, end in zip(rows.slots.tolist(), rows.starts.tolist(), strict=True):
        for part in rows.state.tensors()[1:]:
            count = dims.r if part is rows.state.conv else end % dims.grid
            entries.append(part[slot, past_indices(end, count, part.shape[1])])
    return entries


def assert_window_equals_tokens(
    form: RecurrentForm, backend: Backend, dims: Dims, rows: Rows, length: int, committed: list[int]
) -> None:
    """Assert that a committed window equals single tokens of each row."""
    raw = committed_inputs(form.inputs, dims, length, committed, backend.dtype, 5)
    single = copy.deepcopy(rows)
    out = step(form, backend, dims, rows, raw)
    counts = raw.pop("committed")
    assert (out[torch.arange(length) >= counts[:, None]] == 0).all()
    for t in range(length):
        live = counts > t
        if not live.any():
            break
        some = Rows(single.state, single.slots[live], single.starts[live], single.folded[live])
        token = {name: x[live, t : t + 1] for name, x in raw.items()}
        assert same_bits(step(form, backend, dims, some, token)[:, 0], out[live, t]), t
        single.starts[live] = some.starts
        single.folded[live] = some.folded
    assert_same_rows(form, backend, dims, rows, single)


@pytest.mark.covering
@pytest.mark.parametrize("kept", STATES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("backend", backends())
def test_window_equals_single_tokens(backend, form, kept):
    """States lack 0 to the maximum of tokens. Rows end before, at and after a multiple of 16."""
    dims = replace(REAL if backend.on_gpu else SMALL, state=kept, flush=3)
    lengths = (1, 2, dims.w, 16, 17, 64)
    lacking = list(range(dims.max_replayed + 1))
    if backend.interpreted:
        dims = replace(dims, hv=1, w=2, flush=1)
        lengths, lacking = (24,), [0, dims.max_replayed]
    for length in lengths:
        # The first row begins before its histories have wrapped around, the others later.
        ends = [(5 + 8 * bool(i)) * 16 + i % 3 - 1 for i in range(len(lacking))]
        rows = random_rows(dims, backend, [end - length for end in ends], lacking)
        assert_window_equals_tokens(form, backend, dims, rows, length, [length] * len(lacking))


@pytest.mark.covering
@pytest.mark.parametrize("kept", STATES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("backend", backends(pytest.mark.slow))
def test_padding_disturbs_no_row(backend, form, kept):
    """Rows of 1 to 33 committed tokens; the conv history is longer and shorter than a window."""
    for width, r in ((1, 3), (1, 6), (4, 2)):
        dims = replace(REAL if backend.on_gpu else SMALL, state=kept, w=width, r=r)
        committed = [1, 2, 3, 16, 17, 33]
        starts = [66, 700, 1007, 15, 64, 31]
        lacking = [0, dims.max_replayed, 1, dims.w, dims.max_replayed, 0]
        if backend.interpreted:
            committed = committed[1::2]
            starts = starts[1::2]
            lacking = lacking[1::2]
        rows = random_rows(dims, backend, starts, lacking)
        assert_window_equals_tokens(form, backend, dims, rows, 33, committed)


@pytest.mark.covering
@pytest.mark.parametrize("kept", STATES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("backend", backends(pytest.mark.slow))
def test_answer_in_committed_windows_equals_single_tokens(backend, form, kept):
    """Committed windows between windows of drafts, against one token at a time."""
    dims = replace(REAL if backend.on_gpu else SMALL, state=kept, flush=5)
    plan = [64, 64, 3, -4, -1, 17, 1, -4, 30, 2]
    if backend.interpreted:
        plan = [20, -4, 3, 18]
    tokens = sum(map(abs, plan))
    data = form.inputs(dims, (1, tokens), backend.dtype, 7)

    def fresh() -> Rows:
        zero = torch.zeros(1, dtype=torch.int32)
        state = backend.place(empty_state(dims, 3, backend.dtype))
        return Rows(state, torch.tensor([2]), zero, zero)

    plain, windows = fresh(), fresh()
    expected = [
        step(form, backend, dims, plain, take(data, plain.starts, 1)) for _ in range(tokens)
    ]
    outs = []
    for count in plan:
        window = take(data, windows.starts, abs(count))
        if count > 0:
            window["committed"] = torch.tensor([count], dtype=torch.int32)
        outs.append(step(form, backend, dims, windows, window, dims.flush))
    assert same_bits(torch.cat(outs, 1), torch.cat(expected, 1))
    assert_same_rows(form, backend, dims, plain, windows)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("backend", backends())
def test_null_rows_change_no_other_row(backend, form):
    """Null rows have one committed token and share slot 0."""
    dims = replace(SMALL, state=torch.bfloat16)
    rows = random_rows(dims, backend, [70, 1003], [3, dims.max_replayed])
    raw = committed_inputs(form.inputs, dims, 6, [1, 6, 1, 4], backend.dtype, 5)
    results: list[list[Tensor]] = []
    for chosen in ([1, 3], [0, 1, 2, 3]):
        window = {name: x[chosen] for name, x in raw.items()}
        slots, starts, folded = (torch.zeros(4, dtype=x.dtype).index_copy(
            0, torch.tensor([1, 3]), x)[chosen]
            for x in (rows.slots, rows.starts, rows.folded))  # fmt: skip
        batch = Rows(copy.deepcopy(rows.state), slots, starts, folded)
        out = step(form, backend, dims, batch, window)
        assert (out[torch.arange(6) >= window["committed"][:, None]] == 0).all()
        live = slots > 0
        results.append([out[live], *(part[1:] for part in batch.state.tensors())])
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("backend", backends())
def test_window_writes_only_what_later_steps_read(backend, form):
    """Every backend writes the entries that the reference writes."""
    cases = [case for case in backend.cases(form.op) if case[1]["committed"] is not None]
    assert cases
    for name, arguments in cases[-1:] if backend.interpreted else cases:
        masks = []
        for one in (Backend("reference", "cpu", torch.float32), backend):
            called = one.fresh(arguments)
            one.run(form.op, called)
            parts = zip(arguments["state"].tensors(), called["state"].tensors(), strict=True)
            masks.append([~((x == y.cpu()) | (x.isnan() & y.cpu().isnan())) for x, y in parts])
        assert all(map(torch.equal, *masks)), name


def test_written_tokens_of_committed_window() -> None:
    """fp32: all committed tokens. 16 bits: up to the last multiple of 16, if it is later."""
    starts = torch.tensor([20, 20, 20, 30, 16, 0])
    folded = torch.tensor([16, 0, 20, 16, 16, 0])
    committed = torch.tensor([3, 3, 12, 64, 15, 1])
    assert folded_after(starts, folded, 9, 1, committed).tolist() == [23, 23, 32, 94, 31, 1]
    assert folded_after(starts, folded, 9, 16, committed).tolist() == [16, 16, 32, 80, 16, 0]
    assert folded_after(starts, folded, 9, 1, None).tolist() == [16, 20, 20, 30, 16, 0]
