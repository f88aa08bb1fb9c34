"""Mamba-2 follows the recurrence of the paper, and a row's bits depend only on its tokens.

They do not depend on windows, acceptance, chunks, batch mates or the slot of its state.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lockstep.kernels.mamba2 import mamba2_step
from lockstep.kernels.mamba2.cases import inputs, weights
from lockstep.kernels.norm import gated_group_norm
from lockstep.kernels.recurrent.cases import Dims, empty_state, random_state
from lockstep.kernels.recurrent.history import next_folded
from tests.kernels.backends import backends, same_bits
from tests.kernels.prompts import MAMBA2
from tests.kernels.test_cpu import assert_equals_reference

BACKENDS = backends(pytest.mark.slow)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
STATES = (torch.float32, torch.bfloat16)
SMALL = Dims(1, 2, 16, 16)
REAL = Dims(2, 16, 128, 64, w=8)


def test_mamba2_step_equals_recurrence() -> None:
    """Token by token, one head at a time, in double precision (Dao and Gu, 2024, section 2)."""
    dims = Dims(2, 4, 8, 12)
    tokens = 6
    data = inputs(dims, (1, tokens), torch.float32, 0)
    layer = weights(dims, torch.float32, 2)
    state = empty_state(dims, 2, torch.float32)
    outs = []
    for t in range(tokens):
        window = {n: x[:, t : t + 1] for n, x in data.items()}
        one = dict(slots=torch.tensor([1]), starts=torch.tensor([t]))
        one["folded"] = torch.tensor([max(t - 1, 0)])
        outs.append(mamba2_step(**window, weights=layer, state=state, **one)[0, 0])
    raw = F.pad(data["mixed"][0].double().t(), (dims.r, 0))[None]
    assert layer.conv_bias is not None
    taps = layer.conv.double()[:, None]
    mixed = F.silu(F.conv1d(raw, taps, layer.conv_bias.double(), groups=dims.channels))[0].t()
    x, b, c = mixed.split([48, 16, 16], dim=-1)
    step = F.softplus(data["dt"][0].double() + layer.dt_bias)
    decay = torch.exp(-step * torch.exp(layer.a_log.double()))
    for h in range(dims.hv):
        s = torch.zeros(12, 8, dtype=torch.float64)
        group = slice(8 * (h // 2), 8 * (h // 2) + 8)
        for t in range(tokens):
            mine = x[t, 12 * h : 12 * h + 12]
            s = s * decay[t, h] + torch.outer(step[t, h] * mine, b[t, group])
            expected = (s @ c[t, group] + layer.d[h] * mine).float()
            torch.testing.assert_close(outs[t][h], expected, rtol=1e-4, atol=1e-6)


def test_group_norm_follows_gate() -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(5, 3, 32, generator=generator) for _ in range(2))
    weight = torch.randn(3, 32, generator=generator)
    y = x * F.silu(gate)
    expected = torch.stack([F.rms_norm(y[:, g], (32,), weight[g], 1e-5) for g in range(3)], 1)
    torch.testing.assert_close(gated_group_norm(x, gate, weight, 1e-5), expected)


def test_time_steps_are_clamped() -> None:
    """transformers clamps the time steps of a prompt in the same way."""
    layer = weights(SMALL, torch.float32, 1)
    from lockstep.kernels.mamba2 import discretize

    dt = torch.linspace(-9, 9, 20)[:, None].expand(-1, 2)
    step, g = discretize(dt, layer)
    assert step.min() == torch.tensor(layer.dt_min) and step.max() == torch.tensor(layer.dt_max)
    torch.testing.assert_close(g, -torch.exp(layer.a_log) * step)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("flush", [1, 5, 20])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("state", STATES, ids=str)
def test_recurrent_step_for_each_replay_length(rows: int, flush: int, state: torch.dtype) -> None:
    """The CPU backend equals the reference bit for bit."""
    dims = Dims(2, 6, 32, 48, w=4, flush=flush, state=state)
    slots = [5, 2, 4][:rows]
    starts = torch.tensor([700, 64, 33][:rows], dtype=torch.int32)
    for maximum in range(dims.max_replayed + 1):
        for length in (1, dims.w):
            arguments = dict(
                **inputs(dims, (rows, length), torch.float32, 2),
                weights=weights(dims, torch.float32, 3),
                state=random_state(dims, 6, slots, torch.float32, 1),
                slots=torch.tensor(slots),
                starts=starts,
                folded=starts - torch.tensor([maximum, 0, maximum // 2][:rows]).int(),
                flush=flush,
            )
            assert_equals_reference(mamba2_step, arguments, f"{maximum} to replay, {length} new")


def run_steps(backend, dims, data, plan):
    """Run data's tokens in the recurrent form by a plan of (window length, accepted tokens); return
    (outputs, state, folded)."""
    state = backend.place(empty_state(dims, 3, backend.dtype))
    at = 0
    outs = []
    folded = torch.zeros(1, dtype=torch.int32)
    data = backend.place(data)
    layer = backend.place(weights(dims, backend.dtype, 12))
    tokens = data["mixed"].shape[1]
    for length, accepted in plan:
        length = min(length, tokens - at)
        accepted = min(accepted, length)
        window = {n: x[:, at : at + length].clone() for n, x in data.items()}
        for x in window.values():
            x[:, accepted:] += 1.0  # what is not accepted is another token
        starts = torch.tensor([at], dtype=torch.int32)
        one = dict(slots=torch.tensor([2]), starts=starts, folded=folded, flush=dims.flush)
        out = backend.run(mamba2_step, dict(**window, weights=layer, state=state, **one))
        outs.append(out[:, :accepted])
        at += accepted
        folded = next_folded(starts, folded, dims.flush, dims.grid)
        if at == tokens:
            return torch.cat(outs, 1), state, int(folded)
    raise AssertionError("the plan is too short")


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("flush", [1, 8])
@pytest.mark.parametrize("kept", STATES, ids=str)
def test_replay_equals_single_token_steps(backend, flush, kept):
    """Random windows and random acceptance, with frequent or rare state writes, against one token
    at a time."""
    dims = replace(REAL if backend.on_gpu else SMALL, flush=flush, state=kept)
    tokens = 200 if not backend.interpreted else 8 + dims.grid + dims.w
    data = inputs(dims, (1, tokens), backend.dtype, 5)
    draw = torch.Generator().manual_seed(6)
    plan = []
    for _ in range(tokens):
        length = int(torch.randint(1, dims.w + 1, (1,), generator=draw))
        plan.append((length, int(torch.randint(1, length + 1, (1,), generator=draw))))
    plain, state, here = run_steps(backend, replace(dims, flush=1), data, [(1, 1)] * tokens)
    jumpy, other, there = run_steps(backend, dims, data, plan)
    assert same_bits(plain, jumpy)
    if here == there:
        assert same_bits(state.recurrent[2], other.recurrent[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_16_bit_state_is_rounded_at_absolute_positions(backend):
    dims = replace(SMALL, state=torch.bfloat16, w=4)
    data = inputs(dims, (1, 24), backend.dtype, 5)
    seen = []
    for plan in ([1] * 24, [4] * 6, [3] * 8, [2, 3, 4, 1, 4, 2] * 2):
        out, state, folded = run_steps(backend, dims, data, [(n, n) for n in plan])
        assert folded == 16
        seen.append((out, state.recurrent[2]))
    exact, *_ = run_steps(backend, replace(dims, state=torch.float32), data, [(1, 1)] * 24)
    (first, kept), *rest = seen
    for out, other in rest:
        assert same_bits(out, first) and same_bits(other, kept)
    assert same_bits(first[:, :16], exact[:, :16]) and not same_bits(first[:, 16], exact[:, 16])


@pytest.mark.parametrize("backend", [f for f in BACKENDS if f.values[0].name == "triton"])
@pytest.mark.parametrize("length, part", [(1, 1.0), (4, 1.0), (5, 0.75)])
def test_recurrent_step_division_changes_no_bit(backend, length, part, monkeypatch):
    dims = REAL if backend.on_gpu else Dims(2, 4, 16, 64)
    dims = replace(dims, v=int(dims.v * part), w=8)
    data = backend.place(inputs(dims, (2, length), backend.dtype, 7))
    where = dict(slots=torch.tensor([3, 1]), starts=torch.tensor([5, 77], dtype=torch.int32))
    where["folded"] = torch.tensor([2, 75], dtype=torch.int32)
    layer = backend.place(weights(dims, backend.dtype, 12))
    actual = []
    for parts, near, tokens in ((1, 4, 4), (2, 4, 1), (4, 1, 4)):
        for name, value in (("CTAS_PER_HEAD", parts), ("PREFETCH", near)):
            monkeypatch.setattr(f"lockstep.kernels.recurrent.step.{name}", value)
        monkeypatch.setattr("lockstep.kernels.mamba2.triton.MAX_TOKENS", tokens)
        state = backend.place(random_state(dims, 4, [1, 3], backend.dtype, 8))
        out = backend.run(mamba2_step, dict(**data, weights=layer, state=state, **where))
        actual.append([out] + [part[[1, 3]] for part in state.tensors()])
    for other in actual[1:]:
        assert all(same_bits(*pair) for pair in zip(actual[0], other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunked_form_is_causal(backend):
    """Different or missing tokens from the 70th on do not change the earlier outputs."""
    dims = REAL if backend.on_gpu else SMALL
    data = inputs(dims, (100,), backend.dtype, 9)
    full, _ = MAMBA2.run_chunks(backend, dims, data, [0, 100])
    changed = {n: torch.cat([x[:70], x[70:] * 3 + 1]) for n, x in data.items()}
    other, _ = MAMBA2.run_chunks(backend, dims, changed, [0, 100])
    short, _ = MAMBA2.run_chunks(backend, dims, {n: x[:70] for n, x in data.items()}, [0, 70])
    assert same_bits(other[:70], full[:70]) and same_bits(short, full[:70])
    assert not same_bits(other[70:], full[70:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunked_and_recurrent_forms_are_close(backend):
    """Prompts of 16-bit models use tf32 on a GPU."""
    dims = REAL if backend.on_gpu else SMALL
    tokens = 130 if not backend.interpreted else 66
    data = inputs(dims, (1, tokens), backend.dtype, 10)
    chunked, _ = MAMBA2.run_chunks(backend, dims, {n: x[0] for n, x in data.items()}, [0, tokens])
    plain, _, _ = run_steps(backend, dims, data, [(1, 1)] * tokens)
    error = (chunked - plain[0]).norm() / plain.norm()
    assert error < (1e-4 if backend.dtype == torch.float32 else 1e-2)
