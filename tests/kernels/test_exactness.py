"""A row's bits depend on that row only: not on batch mates, padding, windows, chunks or pages.

Every test runs on the CPU's backends, on Triton under its interpreter and on Triton on a GPU;
equality is bit for bit.
"""

from dataclasses import replace

import pytest
import torch

from lockstep.kernels.attention import paged_attention
from lockstep.kernels.attention.cases import paged
from lockstep.kernels.gated_delta_rule import gated_delta_step
from lockstep.kernels.gated_delta_rule.cases import inputs, weights
from lockstep.kernels.linear import linear
from lockstep.kernels.norm import gated_rms_norm, rms_norm
from lockstep.kernels.recurrent.cases import Dims, empty_state, random_state
from lockstep.kernels.recurrent.history import next_folded
from lockstep.kernels.sampling import sample
from lockstep.kernels.sampling.cases import among, batch
from tests.kernels.backends import backends, same_bits
from tests.kernels.prompts import GATED_DELTA

BACKENDS = backends(pytest.mark.slow)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def wide_range_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normal numbers times 2^-40 .. 2^40, for which any other order of addition shows."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-40, 41, shape, generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(exponents.float())


def numbers(backend, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return wide-range numbers (normal ones in fp16) in the backend's dtype on its device."""
    x = wide_range_numbers(*shape, seed=seed)
    if backend.dtype == torch.float16:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(backend.dtype).to(backend.device)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(48, 200), (520, 1024)], ids=str)
def test_linear_row_is_batch_independent(backend, shape):
    n, k = shape if backend.on_gpu else (48, 200)
    x = numbers(backend, 300, k)
    weight = numbers(backend, n, k, seed=1)
    full = backend.run(linear, dict(x=x, weight=weight))
    for rows in (1, 2, 3, 8, 16, 17, 40, 64, 65, 128, 200):
        for begin in (0, 37):
            part = backend.run(linear, dict(x=x[begin : begin + rows], weight=weight))
            assert same_bits(part, full[begin : begin + rows]), (rows, begin)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [48, 128, 1000, 5120])
def test_norm_row_is_batch_independent(backend, width):
    x = numbers(backend, 12, 3, width)
    weight = numbers(backend, width, seed=1)
    gate = numbers(backend, 12, 3, width, seed=2)
    state = x.float()
    for op, arguments in (
        (rms_norm, lambda s: dict(x=x[s], weight=weight, eps=1e-6)),
        (gated_rms_norm, lambda s: dict(x=state[s], gate=gate[s], weight=weight, eps=1e-6)),
    ):
        full = backend.run(op, arguments(slice(0, 12)))
        for chunk in (slice(0, 1), slice(3, 4), slice(5, 12)):
            assert same_bits(backend.run(op, arguments(chunk)), full[chunk])


CONTEXT = 600
LAYERS = [(2, 1, 32, 64), (12, 2, 64, 64), (5, 1, 80, 16), (24, 4, 256, 64)]


def run_queries_in_chunks(backend, layer, cuts):
    """Run one row of CONTEXT cached tokens, with its queries in chunks between the cuts; return
    (outputs, call)."""
    one = paged(((0, CONTEXT),), *layer, backend.dtype, seed=3)
    out = []
    for begin, end in zip(cuts, cuts[1:], strict=False):
        q = one["q"][begin:end]
        arguments = {**one, "q": q, "query_len": end - begin}
        arguments["starts"] = torch.tensor([begin], dtype=torch.int32)
        arguments["cu_seqlens"] = torch.tensor([0, end - begin], dtype=torch.int32)
        out.append(backend.run(paged_attention, arguments))
    return torch.cat(out), one


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_attention_prefill_verify_and_decode_agree(backend, layer):
    """Tokens 500 .. 599 in one chunk, and in windows of every length across a split's end."""
    begin = 500
    full, _ = run_queries_in_chunks(backend, layer, [begin, CONTEXT])
    for width in (1, 4) if backend.interpreted else (1, 2, 3, 4, 5, 6, 7, 8, 64):
        cuts = range(begin + 9, min(begin + 9 + 4 * width, CONTEXT), width)
        cut, _ = run_queries_in_chunks(backend, layer, [begin, *cuts, CONTEXT])
        assert same_bits(cut, full), width


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layer", [(8, 2, 32, 16), (6, 1, 64, 32)], ids=str)
def test_attention_row_is_batch_and_page_independent(backend, layer):
    """Vary batch mates, an empty row, a wider page table, more query rows, other pages."""
    rows = ((254, 4), (0, 0), (511, 2), (3, 9), (255, 1))
    full = paged(rows, *layer, backend.dtype)
    out = backend.run(paged_attention, full)
    bounds = full["cu_seqlens"].tolist()
    for s, (start, count) in enumerate(rows):
        alone = dict(full)
        alone["q"] = full["q"][bounds[s] : bounds[s + 1]]
        alone["page_table"] = torch.nn.functional.pad(full["page_table"][s : s + 1], (0, 24))
        alone["starts"] = torch.tensor([start], dtype=torch.int32)
        alone["cu_seqlens"] = torch.tensor([0, count], dtype=torch.int32)
        alone["query_len"] = max(count, 1)
        moved = dict(alone)
        order = torch.randperm(len(full["k_cache"]), generator=torch.Generator().manual_seed(9))
        index = torch.argsort(order)
        moved["k_cache"] = full["k_cache"][order]
        moved["v_cache"] = full["v_cache"][order]
        moved["page_table"] = index[alone["page_table"].long()].int()
        for arguments in (alone, moved):
            actual = backend.run(paged_attention, arguments)
            assert not actual.isnan().any()
            assert same_bits(actual, out[bounds[s] : bounds[s + 1]]), s


STATES = (torch.float32, torch.bfloat16)
SMALL = Dims(1, 2, 16, 16)
REAL = Dims(4, 12, 128, 128, w=8)


def run_steps(backend, dims, data, plan):
    """Run data's tokens in the recurrent form by a plan of (window length, accepted tokens); return
    (outputs, state, folded)."""
    state = backend.place(empty_state(dims, 3, backend.dtype))
    at = 0
    outs = []
    folded = torch.zeros(1, dtype=torch.int32)
    data = backend.place(data)
    layer = backend.place(weights(dims, backend.dtype, 13))
    tokens = data["mixed"].shape[1]
    for length, accepted in plan:
        length = min(length, tokens - at)
        accepted = min(accepted, length)
        window = {n: x[:, at : at + length] for n, x in data.items()}
        window["mixed"] = window["mixed"].clone()
        window["mixed"][:, accepted:] += 1.0  # what is not accepted is another token
        starts = torch.tensor([at], dtype=torch.int32)
        one = dict(slots=torch.tensor([2]), starts=starts, folded=folded, flush=dims.flush)
        outs.append(
            backend.run(gated_delta_step, dict(**window, weights=layer, state=state, **one))
        )
        outs[-1] = outs[-1][:, :accepted]
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
    at a time. A 16-bit state is rounded at the same positions."""
    fast = not backend.interpreted
    dims = replace(REAL if backend.on_gpu else SMALL, flush=flush, state=kept)
    tokens = 200 if fast else 8 + dims.grid + dims.w
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
    """A row that begins between two grid points, in windows that end before, on and after the next
    one: the state is that of single steps, rounded at multiples of the grid."""
    dims = replace(SMALL, state=torch.bfloat16, w=4)
    data = inputs(dims, (1, 24), backend.dtype, 5)
    seen = {}
    for plan in ([1] * 24, [4] * 6, [3] * 8, [2, 3, 4, 1, 4, 2] * 2):
        out, state, folded = run_steps(backend, dims, data, [(n, n) for n in plan])
        assert folded == 16
        seen[str(plan)] = out, state.recurrent[2]
    exact, *_ = run_steps(backend, replace(dims, state=torch.float32), data, [(1, 1)] * 24)
    (first, kept), *rest = seen.values()
    for out, other in rest:
        assert same_bits(out, first) and same_bits(other, kept)
    assert same_bits(first[:, :16], exact[:, :16]) and not same_bits(first[:, 16], exact[:, 16])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kept", STATES, ids=str)
def test_recurrent_step_row_is_batch_independent(backend, kept):
    dims = replace(REAL if backend.on_gpu else SMALL, state=kept)
    rows = 5
    length = dims.w
    data = backend.place(inputs(dims, (rows, length), backend.dtype, 7))
    layer = backend.place(weights(dims, backend.dtype, 13))
    slots = torch.tensor([3, 1, 0, 5, 4])
    starts = torch.tensor([5, 77, 0, 1000, 64], dtype=torch.int32)
    folded = starts - torch.tensor([0, 2, 0, dims.max_replayed, 1], dtype=torch.int32)
    filled = [torch.randn(x.shape, generator=torch.Generator().manual_seed(8)) for x in
              empty_state(dims, 6, backend.dtype).tensors()]  # fmt: skip

    def run(which):
        state = backend.place(empty_state(dims, 6, backend.dtype))
        for part, values in zip(state.tensors(), filled, strict=True):
            part.copy_(values * 0.1)
        picked = {n: x[which] for n, x in data.items()}
        where = dict(slots=slots[which], starts=starts[which], folded=folded[which])
        return backend.run(
            gated_delta_step, dict(**picked, weights=layer, state=state, **where)
        ), state

    full, after = run(slice(0, rows))
    for s in (0, 1, 3, 4):
        alone, state = run(slice(s, s + 1))
        assert same_bits(alone[0], full[s])
        for part, expected in zip(state.tensors(), after.tensors(), strict=True):
            assert same_bits(part[slots[s]], expected[slots[s]])


@pytest.mark.parametrize("backend", [f for f in BACKENDS if f.values[0].name == "triton"])
@pytest.mark.parametrize("length, part", [(1, 1.0), (4, 1.0), (5, 1.0), (4, 0.75)])
def test_recurrent_step_division_changes_no_bit(backend, length, part, monkeypatch):
    """Varies CTAs per head, heads per norm CTA and prefetched tokens; also with fewer columns in
    the last CTA of a head."""
    dims = REAL if backend.on_gpu else Dims(2, 4, 16, 64)
    dims = replace(dims, v=int(dims.v * part))
    data = backend.place(inputs(replace(dims, w=8), (2, length), backend.dtype, 7))
    where = dict(slots=torch.tensor([3, 1]), starts=torch.tensor([5, 77], dtype=torch.int32))
    where["folded"] = torch.tensor([2, 75], dtype=torch.int32)
    actual = []
    divisions: list[dict[str, int]] = [
        dict(CTAS_PER_HEAD=1),
        dict(CTAS_PER_HEAD=2, MAX_TOKENS=1),
        dict(CTAS_PER_HEAD=4, HEADS=2, PREFETCH=1),
    ]
    for division in divisions:
        for name, value in division.items():
            shared = name in ("CTAS_PER_HEAD", "PREFETCH")
            index = "recurrent.step" if shared else "gated_delta_rule.triton"
            monkeypatch.setattr(f"lockstep.kernels.{index}.{name}", value)
        state = backend.place(random_state(replace(dims, w=8), 4, [1, 3], backend.dtype, 8))
        layer = backend.place(weights(dims, backend.dtype, 13))
        out = backend.run(gated_delta_step, dict(**data, weights=layer, state=state, **where))
        actual.append([out] + [part[[1, 3]] for part in state.tensors()])
    for other in actual[1:]:
        assert all(same_bits(*pair) for pair in zip(actual[0], other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunked_and_recurrent_forms_are_close(backend):
    """The same function up to rounding, in state and output. Prompts of 16-bit models use tf32 on a
    GPU, which has 10 bits."""
    dims = REAL if backend.on_gpu else SMALL
    tokens = 130 if not backend.interpreted else 66
    data = inputs(dims, (1, tokens), backend.dtype, 10)
    flat = {n: x[0] for n, x in data.items()}
    layer = backend.place(weights(dims, backend.dtype, 13))
    chunked, left = GATED_DELTA.run_chunks(backend, dims, flat, [0, tokens])
    gate = backend.place(flat["z"])
    chunked = backend.run(
        gated_rms_norm, dict(x=chunked, gate=gate, weight=layer.norm, eps=layer.eps)
    )
    plain, right, _ = run_steps(backend, dims, data, [(1, 1)] * tokens)
    error = (chunked - plain[0]).norm() / plain.norm()
    assert error < (1e-4 if backend.dtype == torch.float32 else 1e-2)
    # stepping still owes its state the last token, so compare what the next token would see
    nxt = backend.place(inputs(dims, (1, 1), backend.dtype, 12))
    where = dict(slots=torch.tensor([2]), starts=torch.tensor([tokens], dtype=torch.int32))
    seen = [
        backend.run(
            gated_delta_step,
            dict(**nxt, weights=layer, state=state, **where, folded=where["starts"] - lacking),
        )
        for state, lacking in ((left, 0), (right, 1))
    ]
    error = (seen[0] - seen[1]).norm() / seen[1].norm()
    assert error < (1e-4 if backend.dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab", [100, 5000])
def test_sample_row_is_batch_independent(backend, vocab):
    """Each position alone, without its row's other queries and without batch mates."""
    both = backend.place(batch(vocab, 3, seed=4))
    full = backend.run(sample, both)
    rows = full.shape[0]
    assert ((full >= 0) & (full < vocab)).all()
    for s in range(rows):
        alone = {n: x[s : s + 1] if n not in ("history", "state") else x for n, x in both.items()}
        assert same_bits(backend.run(sample, alone), full[s : s + 1]), s
        first = dict(alone, logits=alone["logits"][:, :1], drafts=alone["drafts"][:, :0])
        first["positions"] = alone["positions"][:, :1]
        first["allowed"] = alone["allowed"][:, :1]
        assert same_bits(backend.run(sample, first), full[s : s + 1, :1]), s


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("vocab", "kept"), [(100, 64), (9000, 4200)])
def test_sample_of_candidates_equals_masked_vocabulary(backend, vocab, kept):
    """The same tokens as with the whole vocabulary and -inf for the other logits: masks, noise and
    all."""
    few = among(batch(vocab, 1, seed=2), kept)
    full = {name: value for name, value in few.items() if name != "ids"}
    full["logits"] = torch.full((*few["logits"].shape[:2], vocab), -torch.inf)
    full["logits"][..., few["ids"]] = few["logits"]
    assert same_bits(
        backend.run(sample, backend.place(few)), backend.run(sample, backend.place(full))
    )
