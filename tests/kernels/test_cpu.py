"""An op's CPU backend gives the reference's bits."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.kernels import Op
from lockstep.kernels.attention import paged_attention
from lockstep.kernels.attention.cases import paged
from lockstep.kernels.backends import load_cases
from lockstep.kernels.gated_delta_rule import gated_delta_chunk, gated_delta_step
from lockstep.kernels.gated_delta_rule.cases import inputs, weights
from lockstep.kernels.recurrent import cpu
from lockstep.kernels.recurrent.cases import Dims, random_state
from lockstep.kernels.recurrent.convolution import causal_convolution
from lockstep.kernels.recurrent.history import (
    history_length,
    max_replayed,
    next_folded,
    past_indices,
    state_grid,
)
from tests.kernels.backends import OPS as EVERY_OP
from tests.kernels.backends import Backend, left, same_bits

REFERENCE = Backend("reference", "cpu", torch.float32)
CPU = Backend("cpu", "cpu", torch.float32)
OPS = [op for op in EVERY_OP if "cpu" in op.backends]
HALF_DTYPES = (torch.bfloat16, torch.float16)
"""16-bit dtypes; test_backends.py covers fp32."""


def assert_equals_reference(op: Op, arguments: dict[str, Any], name: str) -> None:
    """Assert equal results and in-place writes, except for the null slot, which may hold
    anything."""
    actual = []
    for backend in (REFERENCE, CPU):
        inputs = backend.fresh(arguments)
        actual.append(left(op, backend.run(op, inputs), inputs))
    expected, had = actual
    assert list(expected) == list(had), name
    for part, want in expected.items():
        assert had[part].dtype == want.dtype and same_bits(had[part], want), (name, part)


def test_recurrent_and_attention_ops_have_cpu_backends() -> None:
    assert {op.name for op in OPS} >= {"paged_attention", "gated_delta_step", "gated_delta_chunk"}


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_cpu_backend_equals_reference(op: Op, dtype: torch.dtype) -> None:
    for name, arguments in load_cases(op)(dtype):
        assert_equals_reference(op, arguments, name)


@pytest.mark.parametrize("gated", [False, True])
def test_attention_across_split_boundaries(gated: bool) -> None:
    """Prompts, an empty row, verification and decoding, across the ends of splits."""
    rows = ((0, 130), (700, 5), (0, 0), (255, 1), (1023, 2), (511, 64))
    batch = paged(rows, 6, 2, 32, 16, torch.float32)
    tokens, heads, dim = batch["q"].shape
    generator = torch.Generator().manual_seed(1)
    gates = torch.randn(tokens, 2 * heads * dim + 5, generator=generator)
    assert_equals_reference(paged_attention, batch | {"gates": gates if gated else None}, str(rows))


@pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32], ids=str)
def test_attention_of_rows_of_one_length_that_are_not_adjacent(dtype: torch.dtype) -> None:
    """Rows of one token, of short splits, between prompts."""
    rows = ((40, 1), (0, 70), (60, 1), (0, 3), (63, 1), (64, 1), (120, 1), (130, 1))
    assert_equals_reference(paged_attention, paged(rows, 6, 2, 64, 16, dtype), str(rows))


def test_attention_with_more_heads_than_tile_rows() -> None:
    """A draft block has many heads, since its tokens are laid out as heads of one token."""
    for rows, heads in ((((0, 1), (300, 1), (255, 1)), 512), (((250, 3),), 400)):
        assert_equals_reference(
            paged_attention, paged(rows, heads, 1, 32, 16, torch.float32), str(rows)
        )


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("flush", [1, 5, 20])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
def test_recurrent_step_for_each_replay_length(rows: int, flush: int, state: torch.dtype) -> None:
    dims = Dims(2, 6, 32, 48, w=4, flush=flush, state=state)
    slots = [5, 2, 4][:rows]
    layer = weights(dims, torch.float32, 3)
    starts = torch.tensor([700, 64, 33][:rows], dtype=torch.int32)
    for maximum in range(dims.max_replayed + 1):
        for length in (1, dims.w):
            arguments = dict(
                **inputs(dims, (rows, length), torch.float32, 2),
                weights=layer,
                state=random_state(dims, 6, slots, torch.float32, 1),
                slots=torch.tensor(slots),
                starts=starts,
                folded=starts - torch.tensor([maximum, 0, maximum // 2][:rows]).int(),
                flush=flush,
            )
            assert_equals_reference(
                gated_delta_step, arguments, f"{maximum} to replay, {length} new"
            )


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
def test_chunked_form_of_long_prompt(state: torch.dtype) -> None:
    dims = replace(Dims(2, 6, 32, 48), r=3, state=state)
    raw = inputs(dims, (629,), torch.float32, 4)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    arguments = dict(
        **{name: raw[name] for name in ("mixed", "b", "a")},
        weights=weights(dims, torch.float32, 3),
        state=random_state(dims, 6, [1, 2], torch.float32, 5),
        cu_seqlens=ints(0, 129, 629),
        starts=ints(0, 64),
        state_src=ints(1, 2),
        state_slots=ints(1, 2),
        snapshot_slots=ints(3, 4),
    )
    assert_equals_reference(gated_delta_chunk, arguments, "129 and 500 tokens")


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_causal_convolution_equals_reference(taps: int) -> None:
    generator = torch.Generator().manual_seed(taps)
    x = torch.randn(taps + 8, 3, 10, generator=generator)
    weight = torch.randn(10, taps, generator=generator)
    assert same_bits(cpu.causal_convolution(x, weight), causal_convolution(x, weight))
    alone = cpu.causal_convolution(x[:, 1], weight)
    assert same_bits(alone, causal_convolution(x, weight)[:, 1])


def test_history_indices_are_positions_modulo_length() -> None:
    length = history_length(4, 3)
    indices = cpu.flat_indices(length, (2, 5), (9, 3), range(-3, 2)).view(5, 2)
    for row, (slot, start) in enumerate(((2, 9), (5, 3))):
        expected = past_indices(start + 2, 5, length) + slot * length
        assert torch.equal(indices[:, row], expected)


@pytest.mark.parametrize("window", [1, 4, 8])
@pytest.mark.parametrize("flush", [1, 5, 20])
@pytest.mark.parametrize("grid", [1, 16])
def test_window_writes_do_not_overlap_history_reads(window: int, flush: int, grid: int) -> None:
    maximum = max_replayed(window, flush, grid)
    for before in (3, maximum):
        length = history_length(window, before)
        for start in range(2 * length):
            written = set(past_indices(start + window, window, length).tolist())
            read = past_indices(start, before, length).tolist()
            assert len(set(read)) == before and written.isdisjoint(read)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("flush", [1, 5, 16, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unfolded_tokens_fit_history_buffer(dtype: torch.dtype, flush: int) -> None:
    """Random walks from every first position: the state is written on the grid, and never past the
    computed position."""
    grid = state_grid(dtype)
    draw = torch.Generator().manual_seed(flush)
    for window in (1, 4, 8):
        starts = torch.arange(64, dtype=torch.int32)
        folded = starts.clone()
        for _ in range(200):
            new = next_folded(starts, folded, flush, grid)
            moved = new > folded
            assert (new[moved] % grid == 0).all() and (new >= folded).all()
            assert (starts - new < max(flush, grid)).all()
            assert moved[starts - folded >= max(flush, grid)].all()
            starts += torch.randint(1, window + 1, (64,), generator=draw).int()
            folded = new
            assert (starts - folded).max() <= max_replayed(window, flush, grid)
