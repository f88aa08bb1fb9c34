"""Adversarial inputs do not change a row's bits, for any op with rows.

Values are spread over 2^-40 .. 2^40 or cancel, null lines and surrounding memory hold NaN, rows run
alone, reversed and repeated, and pages and slots are in random order. Runs on the CPU's backends,
on Triton under its interpreter and on Triton on a GPU.
"""

from itertools import islice

import pytest
import torch
from torch import Tensor

import lockstep.kernels.activations.cases as activation_cases
import lockstep.kernels.attention.cases as attention_cases
import lockstep.kernels.fp8_linear.cases as fp8_cases
import lockstep.kernels.gated_delta_rule.cases as delta_cases
import lockstep.kernels.head_linear.cases as head_cases
import lockstep.kernels.latent_attention.cases as latent_cases
import lockstep.kernels.linear.cases as linear_cases
import lockstep.kernels.mamba2.cases as mamba2_cases
import lockstep.kernels.norm.cases as norm_cases
import lockstep.kernels.rotary.cases as rotary_cases
from lockstep.kernels.attention import paged_attention
from lockstep.kernels.experts import experts
from lockstep.kernels.gated_delta_rule import gated_delta_chunk, gated_delta_step
from lockstep.kernels.latent_attention import latent_attention
from lockstep.kernels.mamba2 import mamba2_chunk, mamba2_step
from lockstep.kernels.norm import rms_norm
from lockstep.kernels.recurrent.cases import Dims
from lockstep.kernels.rotary import rope_and_cache
from lockstep.kernels.route import route
from lockstep.kernels.row_subsets import ROWS, count_rows, take_rows
from lockstep.kernels.sampling import sample
from tests.kernels.adversarial import (
    harden_values,
    pad_with_poison,
    permute_storage,
    repeat_rows,
    restore_storage,
    storage,
)
from tests.kernels.backends import CPU, Backend, of_every_op, same_bits, tensors_of

LONG = ((4095, 1), (5, 4), (1020, 8), (0, 300), (255, 1), (2046, 4))
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
INTERPRETED = {
    gated_delta_chunk: 1,
    gated_delta_step: 1,
    mamba2_chunk: 1,
    mamba2_step: 1,
    sample: 1,
    paged_attention: 1,
    latent_attention: 1,
    experts: 1,
    route: 2,
}
"""Op -> number of first cases that the interpreter runs, since it is slow."""
EXACT_BACKENDS = [
    param
    for param in of_every_op(ROWS)
    if not param.values[0].backends[param.values[1].name].opt_in_reason
]
"""Backends that promise row independence. A backend that is opt-in, such as cuBLAS, promises no
bits; a probe watches it."""
STRIDE_ALONE = {"cuda": 1, "cpu": 6}
"""Device -> stride of the rows that run alone. In the batches, each has other batch mates and
another index."""
REPEATS = {"cuda": 40, "cpu": 4}
"""Device -> repetitions of all rows in one batch: more than the largest tile of a device."""
REAL_SIZES = (
    (linear_cases, "SIZES", ((70, 16480, 5120),)),
    (linear_cases, "SPLIT", ((70, 5120, 17408, 2), (70, 96, 5120, 8))),
    (fp8_cases, "SIZES", ((70, 5120, 6144, 4),)),
    (norm_cases, "SHAPES", ((70, 5120), (70, 48, 128))),
    (activation_cases, "SHAPES", ((70, 17408),)),
    (rotary_cases, "LAYERS", ((70, 24, 4, 256, 64, True, 1.0),)),
    (attention_cases, "BATCHES", ((LONG, 24, 4, 256, 64), (LONG, 32, 8, 128, 64))),
    (head_cases, "SIZES", ((70, 128, 128, 512), (70, 128, 512, 128))),
    (latent_cases, "LAYERS", ((70, 128, 128, 512, 64),)),
    (latent_cases, "BATCHES", ((LONG, 128, 512, 64, 64), (LONG, 16, 512, 64, 64))),
    (delta_cases, "LAYERS", (Dims(16, 48, 128, 128, w=8),)),
    (mamba2_cases, "LAYERS", (Dims(8, 64, 128, 64, w=8),)),
)
"""Tables of the cases, and their replacements: the dimensions of real models."""


def cases(op, backend, stride=1):
    """Yield (name, arguments) of all cases with rows; fewer under the interpreter.

    stride: yield each case of this stride, on a CPU's backends.
    """
    some = ((name, a) for name, a in backend.cases(op) if count_rows(op, a))
    stop = INTERPRETED.get(op, 4) if backend.interpreted else None
    yield from islice(some, 0, stop, stride if backend.exact else 1)


def written_masks(before: list[Tensor], after: list[Tensor]) -> list[Tensor]:
    """Return masks of what was written, without null lines, which may hold anything."""
    masks = []
    for x, y in zip(before, after, strict=True):
        x = x.cpu()
        y = y.cpu()
        mask = ~((x == y) | (x.isnan() & y.isnan()))
        mask[0] = False
        masks.append(mask)
    return masks


def assert_rows_alone(op, backend, how, stride=1):
    """Assert that rows in any order and batch have the bits that they have in the whole batch."""
    for name, plain in cases(op, backend, stride):
        arguments = harden_values(op, plain, how, backend.dtype)
        full = backend.fresh(arguments, op.writes)
        every = list(range(count_rows(op, arguments)))
        expected = tensors_of(backend.run(op, full))
        alone = every[:1] if backend.interpreted else every[:: STRIDE_ALONE[backend.device]]
        choices = [[row] for row in alone]
        times = 2 if backend.interpreted else REPEATS[backend.device]
        choices += [every[::-1], repeat_rows(op, arguments, times)]
        for rows in choices:
            part, lines = take_rows(op, arguments, rows)
            if not len(lines):
                continue
            part = backend.fresh(part, op.writes)
            actual = tensors_of(backend.run(op, part))
            for want, have in zip(expected, actual, strict=True):
                assert same_bits(have, want.cpu()[lines]), (name, rows[:3])
            written = written_masks(storage(op, arguments), storage(op, part))
            for want, have, mask in zip(storage(op, full), storage(op, part), written, strict=True):
                assert same_bits(have.cpu()[mask], want.cpu()[mask]), (name, rows[:3])
            if rows == every[::-1]:
                wholly = written_masks(storage(op, arguments), storage(op, full))
                assert all(map(torch.equal, written, wholly)), name


@pytest.mark.parametrize(
    ("how", "stride"),
    [
        pytest.param("spread", 3, id="spread"),
        pytest.param("spread", 1, id="spread, all cases", marks=pytest.mark.slow),
        pytest.param("cancel", 1, id="cancel, all cases", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("op", "backend"), EXACT_BACKENDS)
def test_rows_are_independent(op, backend, how, stride):
    assert_rows_alone(op, backend, how, stride)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "name"),
    [
        pytest.param(op, name, id=f"{op.name}-{name}")
        for op in ROWS
        for name, backend in op.backends.items()
        if name not in CPU and not backend.opt_in_reason
    ],
)
def test_rows_are_independent_at_real_dimensions(op, name, monkeypatch):
    backend = Backend(name, "cuda", torch.bfloat16)
    for module, table, sizes in REAL_SIZES:
        assert getattr(module, table)
        monkeypatch.setattr(module, table, sizes)
    for how in ("spread", "cancel"):
        assert_rows_alone(op, backend, how)


def test_layers_table_replaces_recurrent_cases(monkeypatch):
    """A replaced LAYERS table determines the cases of recurrent ops."""
    result = {
        delta_cases: (delta_cases.gated_delta_step_cases, delta_cases.gated_delta_chunk_cases),
        mamba2_cases: (mamba2_cases.mamba2_step_cases, mamba2_cases.mamba2_chunk_cases),
    }
    only = Dims(1, 1, 16, 16, w=8)
    for module, functions in result.items():
        monkeypatch.setattr(module, "LAYERS", (only,))
        for load_cases in functions:
            names = [name.removesuffix(", partials") for name, _ in load_cases(torch.float32)]
            assert {name.partition(", Q")[0] for name in names} == {str(only)}


def test_leak_between_rows_is_detected(monkeypatch):
    """Negative control: an op that adds a trace of its batch, or writes it to storage, fails."""
    backend = Backend("reference", "cpu", torch.float32)
    for op in (rms_norm, rope_and_cache):
        sound = op.backends["reference"]

        def leaky(plain=sound.run, op=op, **arguments):
            out = plain(**arguments)
            if op is rms_norm:
                return out + arguments["x"].flatten(0, -2).sum(0) * 2.0**-50
            arguments["v_cache"][arguments["slot_mapping"] // rotary_cases.PAGE_SIZE] = len(out)
            return out

        monkeypatch.setitem(op.backends, "reference", sound._replace(run=leaky))
        with pytest.raises(AssertionError):
            assert_rows_alone(op, backend, "spread")


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(("op", "backend"), EXACT_BACKENDS)
def test_surrounding_memory_and_slot_order_do_not_matter(op, backend):
    for name, plain in cases(op, backend):
        arguments = harden_values(op, plain, "spread", backend.dtype)
        here = backend.fresh(arguments)
        there = backend.place(pad_with_poison(op, permute_storage(op, arguments)))
        expected = tensors_of(backend.run(op, here))
        actual = tensors_of(backend.run(op, there))
        for want, have in zip(expected, actual, strict=True):
            assert same_bits(have, want), name
            assert not have.isnan().any() if have.is_floating_point() else True, name
        written = written_masks(storage(op, arguments), storage(op, here))
        back = restore_storage(op, {n: x for n, x in there.items() if n in ROWS[op].storage})
        for want, have, mask in zip(storage(op, here), back, written, strict=True):
            assert same_bits(have.cpu()[mask], want.cpu()[mask]), name
